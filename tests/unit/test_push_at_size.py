"""`umbra simulate --push`: the formulas, what they are fed with, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from fakes.simulated import scenario

from umbra import cli
from umbra.deploy.simulator.compare import simulate
from umbra.deploy.simulator.push import (
    PUBLISHED,
    PushCosts,
    PushHosts,
    PushModel,
    PushTables,
    all_times,
    load_push,
    measured_costs,
    push_times,
)
from umbra.proto.errors import UsageError

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "benchmarks" / "results" / "weight_push.json"
GB = 1e9
COSTS = PushCosts(
    snapshot=2 * GB, tcp=4 * GB, shm=5 * GB, load=4 * GB, tcp_keys=1 * GB, delta=2 * GB,
    delta_share=0.01,
)  # fmt: skip
HOSTS = PushHosts(copy=100 * GB, links=(8.0, 400.0), bucket_bytes=40_000_000, latency_s=0.01)
MODEL = PushModel(name="m", nbytes=80 * GB, tensor_parallel=2, trainer_hosts=2)
TABLES = PushTables(costs=COSTS, hosts=HOSTS, engines=(4, 16), models=(MODEL,))


def test_every_part_of_a_push_by_hand() -> None:
    one = push_times(TABLES, MODEL, 16)
    assert one.nodes == 4  # of 8 GPUs: 4 engines on each
    assert one.snapshot_s == pytest.approx(80 / 2 / 16)  # 8 ranks of 2 GB/s on either host
    # Over 1 GB/s the link is the limit, over 50 GB/s what one connection brings; three hops.
    assert one.wire_s["8"] == pytest.approx(80 + 3 * (0.04 + 0.01))
    assert one.wire_s["400"] == pytest.approx(20 + 3 * (0.01 + 0.01))
    assert one.keys_s == pytest.approx(80 + 3 * (0.04 + 0.01))
    # 1 Gbit/s would bring 12.5 GB/s of weights by deltas; applying them is the limit.
    assert one.delta_s == pytest.approx(40 + 3 * (0.02 + 0.01))
    assert one.copy_s == pytest.approx(80 / 5)
    assert one.load_s == pytest.approx(80 / 2 / 4)
    assert one.total_s["400"] == pytest.approx(2.5 + 20.06 + 16 + 10)
    assert push_times(TABLES, MODEL, 4).wire_s["8"] == pytest.approx(80)  # one node: no hop


def test_the_memory_of_a_host_is_shared() -> None:
    hosts = msgspec.structs.replace(HOSTS, copy=8 * GB)
    one = push_times(msgspec.structs.replace(TABLES, hosts=hosts), MODEL, 16)
    assert one.snapshot_s == pytest.approx(80 / 2 / 8)
    assert one.copy_s == pytest.approx(80 / 2)  # 4 engines
    assert one.load_s == pytest.approx(80 / 2 / 1)  # of 2 GPUs each


def test_several_connections_help_until_the_link_is_full() -> None:
    hosts = msgspec.structs.replace(HOSTS, connections=100)
    one = push_times(msgspec.structs.replace(TABLES, hosts=hosts), MODEL, 4)
    assert one.wire_s["400"] == pytest.approx(80 / 50)


def test_what_is_unknown_is_left_out() -> None:
    plain = PushCosts(snapshot=GB, tcp=GB, shm=GB, load=GB)
    one = push_times(PushTables(costs=plain), MODEL, 4)
    assert one.keys_s is None and one.delta_s is None


def test_wire_and_copy_are_those_of_the_production_protocol_in_simulated_time() -> None:
    """Four nodes of 8 engines behind the trainer's; the first relay has it first."""
    weight_bytes, rate, local, load = 2e9, 1e9, 4e9, 0.25
    run = simulate(
        scenario(
            cluster={"gpus": 40, "trainer_gpus": 8},
            buffer={"batch_groups": 64},
            run={"steps": 4},
            weight_hub={"receive_bucket_bytes": 100_000_000},
            speed={
                "decode": {"step_s": 0.001, "token_s": 0.0, "pause_s": load},
                "training": {"step_s": 20.0},
                "network": {
                    "weight_bytes": weight_bytes, "bytes_per_s": rate, "local_bytes_per_s": local,
                },
            },
        )
    )  # fmt: skip
    costs = PushCosts(snapshot=GB, tcp=rate, shm=local, load=weight_bytes / load)
    hosts = PushHosts(links=(400.0,), bucket_bytes=100_000_000, latency_s=0.0)
    model = PushModel(name="m", nbytes=weight_bytes, tensor_parallel=1, trainer_hosts=1)
    one = push_times(PushTables(costs=costs, hosts=hosts), model, 32)
    last = one.wire_s["400"] + one.copy_s  # until engines begin to load
    hops = 3 * 100_000_000 / rate
    assert run.lag_s == pytest.approx(last - hops / 2, rel=0.01)  # the mean of four nodes


def test_costs_are_read_from_the_benchmark_s_results() -> None:
    costs = load_push(MEASURED).costs
    rows = json.loads(MEASURED.read_text(encoding="utf-8"))["rows"]
    here = [r for r in rows if r["part"] == "one host" and r["receivers"] == 1]
    shm = next(r for r in here if r["method"] == "`shm`")
    assert costs.load == pytest.approx(shm["nbytes"] / shm["commit_s"])
    between = shm["push_s"] - shm["snapshot_s"] - shm["commit_s"]
    assert costs.shm == pytest.approx(shm["nbytes"] / between)
    assert 0 < costs.delta_share < 0.1
    assert costs.tcp_keys == 0  # that file does not say


@pytest.mark.parametrize("text", ["{}", "[", '{"rows": [{}]}', '{"rows": []}'])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=r"r\.json (is no file of results|has no push by `shm`)"):
        measured_costs(path)


TOML = """
engines = [8]
[costs]
snapshot = 1e9
tcp = 2e9
shm = 4e9
load = 4e9
[[models]]
name = "mine"
nbytes = 8e9
tensor_parallel = 1
trainer_hosts = 1
"""


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "push.toml"
    path.write_text(TOML, encoding="utf-8")
    assert cli.main(["simulate", str(path), "--push", "--set", "hosts.links=[400]"]) == 0
    heading, row = capsys.readouterr().out.splitlines()
    assert "wire s, 400 Gbit/s" in heading
    assert row.split() == ["mine", "8", "1", "8", "1", "1", "4", "-", "-", "2", "2", "9", "-"]
    assert cli.main(["simulate", str(path), "--push", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["pushes"][0]["wire_s"] == {"10": 6.4, "100": 4.0, "400": 4.0}
    assert told["costs"]["tcp"] == 2e9


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--sweep"], "several tables"),
        (["--seed", "3"], "--seed has no effect with --push"),
        (["--set", "costs.tcp=0"], "Expected `float` > 0"),
        (["--set", "costs.wire=1e9"], "unknown field `wire`"),
    ],
)
def test_what_makes_no_sense_is_refused(
    flags: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "push.toml"
    path.write_text(TOML, encoding="utf-8")
    assert cli.main(["simulate", str(path), "--push", *flags]) == 2
    assert told in capsys.readouterr().err


def test_figures_of_others_are_of_models_in_the_table() -> None:
    tables = load_push(MEASURED)
    assert set(PUBLISHED) <= {model.name for model in tables.models}
    assert {one.engines for one in all_times(tables)} == {8, 64, 512}


def test_docs_name_every_key() -> None:
    text = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    for section in (PushCosts, PushHosts, PushModel):
        for field in msgspec.structs.fields(section):
            assert f"`{field.name}`" in text, field.name
