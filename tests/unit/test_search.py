"""What `umbra simulate --search` tries, and what it chooses."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fakes.simulated import scenario

from umbra import cli
from umbra.deploy.simulator.prediction import Prediction
from umbra.deploy.simulator.search import TOLERANCE, TURNS, Choice, best, bounds, search
from umbra.proto.errors import UsageError

SMALL: dict[str, dict[str, Any]] = {
    "cluster": {"gpus": 4, "trainer_gpus": 1},
    "run": {"steps": 8},
    "buffer": {"group_size": 2, "batch_groups": 4, "run_ahead": 1, "max_staleness": 2},
    "speed": {"training": {"step_s": 0.0, "tokens_per_s": 1000.0}},
}


def rated(**rates: float) -> list[tuple[Choice, Prediction]]:
    """Ways called GPUs_run-ahead_bound, and their samples/s."""
    return [
        (
            Choice(*map(int, name.strip("w").split("_"))),
            cast(Prediction, SimpleNamespace(samples_per_s=rate)),
        )
        for name, rate in rates.items()
    ]


def test_the_freshest_of_the_nearly_fastest_is_chosen() -> None:
    assert best(rated(w2_4_4=10.0, w2_2_2=9.6, w2_1_1=9.0)) == Choice(2, 2, 2)
    assert best(rated(w2_4_4=10.0, w3_2_4=9.9, w2_2_4=9.8)) == Choice(3, 2, 4)
    assert best(rated(w2_1_1=10.0, w0_0_0=9.9)) == TURNS


def test_bounds_are_powers_of_two_and_the_largest() -> None:
    assert bounds(1) == [1]
    assert bounds(6) == [1, 2, 4, 6]


def test_what_is_chosen_is_nearly_as_fast_as_anything_that_was_tried() -> None:
    tried = dict(search(scenario(**SMALL)))
    assert list(tried)[:4] == [TURNS, Choice(1, 2, 2), Choice(2, 2, 2), Choice(3, 2, 2)]
    fastest = max(tried.values(), key=lambda one: one.samples_per_s)
    chosen = best(list(tried.items()))
    assert tried[chosen].samples_per_s >= (1 - TOLERANCE) * fastest.samples_per_s
    assert all(one.staleness["max"] <= way.max_staleness for way, one in tried.items())


def test_a_bound_of_zero_leaves_nothing_to_search() -> None:
    strict = {"buffer": {"run_ahead": 0, "max_staleness": 0}}
    with pytest.raises(UsageError, match=r"buffer\.max_staleness, which is 0"):
        list(search(scenario(**strict)))


def test_the_command_names_the_choice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text("""
        [cluster]
        gpus = 3
        trainer_gpus = 1
        [run]
        steps = 6
        [buffer]
        group_size = 2
        batch_groups = 2
        run_ahead = 1
        max_staleness = 1
        [generator]
        slots = 4
        [speed.decode]
        step_s = 0.01
        [speed.training]
        step_s = 1.0
        [samples.lengths]
        kind = "uniform"
        least = 10
        most = 30
    """)
    assert cli.main(["simulate", str(file), "--search"]) == 0
    named = capsys.readouterr().out.rpartition("best: ")[2].strip()
    assert cli.main(["simulate", str(file), "--search", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert str(Choice(**told["best"])) == named
    assert named in told["tried"]
