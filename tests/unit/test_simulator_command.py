"""`umbra simulate` as a command, and the file that it reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fakes.simulated import scenario

from umbra import cli
from umbra.deploy.simulator import tables
from umbra.deploy.simulator.lengths import LogNormal, LongTail, Uniform, quantiles
from umbra.deploy.simulator.scenario import load_scenario
from umbra.proto.errors import UsageError

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "simulated" / "cluster.toml"
DOCS = ROOT / "docs" / "scale.md"
KEYS = {
    "cluster": tables.ClusterTable,
    "speed.decode": tables.DecodeSpeed,
    "speed.training": tables.TrainingSpeed,
    "speed.scoring": tables.ScoringSpeed,
    "speed.network": tables.Network,
    "speed.broker": tables.BrokerSpeed,
    "samples": tables.Samples,
    "failures": tables.FailureTable,
}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"cluster": {"trainer_gpus": 2}}, "leaves no engine"),
        ({"cluster": {"trainer_gpus": 0}, "buffer": {"run_ahead": 1}}, "set buffer.run_ahead = 0"),
        ({"buffer": {"batch_tokens": 100}}, "buffer.batch_tokens is not simulated"),
        ({"buffer": {"run_ahed": 1}}, "did you mean buffer.run_ahead"),
        ({"buffers": {}}, "unknown section [buffers]; did you mean buffer"),
        ({"cluster": {"gpu": 1}}, "cluster: object contains unknown field `gpu`"),
        ({"speed": {"decode": {"step_s": 0.0}}}, "speed.decode needs step_s above 0"),
        ({"speed": {"decode": {"step_s": -1}}}, "speed.decode.step_s: expected `float` >= 0"),
        ({"samples": {"lengths": {"kind": "normal"}}}, "samples.lengths"),
        ({"buffer": {"stages": ["ref_logp"]}}, "set cluster.scorer_gpus"),
        ({"speed": {"scoring": {"reward": {}}}}, "speed.scoring.reward is no stage"),
        ({"failures": {"monitor": {"mtbf_s": 1, "recovery_s": 1}}}, "failures"),
        (
            {"samples": {"lengths": {"kind": "uniform", "least": 9, "most": 3}}},
            "least = 9 is above most = 3",
        ),
        ({"samples": {"lengths": {"kind": "file", "path": "no.json"}}}, "no.json cannot be read"),
    ],
)
def test_mistakes_are_named(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError) as caught:
        scenario(**changes)
    assert told in str(caught.value)


def test_lengths_have_the_shape_that_was_asked_for() -> None:
    assert quantiles(Uniform(least=3, most=9), Path()) == [3, 9]
    bell = quantiles(LogNormal(median=100, sigma=1.0, most=1000), Path())
    assert bell == sorted(bell) and bell[1000] == pytest.approx(100) and bell[-1] == 1000
    tail = quantiles(LongTail(least=10, most=20, longest=100, share=0.1), Path())
    assert (
        tail == sorted(tail) and tail[1800] == pytest.approx(20) and tail[-1] == pytest.approx(100)
    )


TOML = """
[cluster]
gpus = 4
trainer_gpus = 1
[run]
steps = 4
[buffer]
group_size = 2
batch_groups = 2
[generator]
slots = 4
[speed.decode]
step_s = 0.01
[speed.training]
step_s = 1.0
[samples.lengths]
kind = "file"
path = "lengths.json"
"""


@pytest.fixture
def cluster_file(tmp_path: Path) -> str:
    path = tmp_path / "cluster.toml"
    path.write_text(TOML, encoding="utf-8")
    (tmp_path / "lengths.json").write_text("[30, 10, 20]", encoding="utf-8")
    return str(path)


def test_the_command_prints_a_table_or_json(
    cluster_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["simulate", cluster_file, "--seed", "3"]) == 0
    assert "16 trained" in capsys.readouterr().out
    failing = ["--set", "failures.generator={mtbf_s=5, recovery_s=1}"]
    assert cli.main(["simulate", cluster_file, *failing, "--json"]) == 0
    outcomes = json.loads(capsys.readouterr().out)
    assert set(outcomes) == {"run", "without failures"}
    assert outcomes["run"]["failures"]["generator"] > 0
    assert cli.main(["simulate", cluster_file, "--sweep"]) == 0
    assert "best: " in capsys.readouterr().out
    assert cli.main(["simulate", cluster_file, "--compare"]) == 0
    assert "synchronous, all take turns" in capsys.readouterr().out


def test_the_example_is_whole() -> None:
    example = load_scenario(EXAMPLE)
    assert (example.generators, example.trainer_gpus, example.colocated) == (64, 16, False)
    assert example.tables.failures["generator"].mtbf_s == 14400


def test_docs_name_every_key() -> None:
    text = DOCS.read_text(encoding="utf-8")
    for name, section in KEYS.items():
        for field in msgspec.structs.fields(section):
            assert f"`{field.name}`" in text, f"{name}.{field.name}"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--sweep", "--compare"], "several tables"),
        (["--set", "gpus"], "write it as section.key=value"),
        (["--set", "cluster.gpus.more=1"], "is not a table"),
        (["--sweep", "--set", "buffer.run_ahead=0"], "set buffer.run_ahead"),
        (["--compare", "--set", "buffer.run_ahead=0"], "set buffer.run_ahead >= 1"),
    ],
)
def test_the_command_refuses_what_makes_no_sense(
    cluster_file: str, flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["simulate", cluster_file, *flags]) == 2
    assert told in capsys.readouterr().err
