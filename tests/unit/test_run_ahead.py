"""`buffer.min_ess`: generation runs less far ahead while the trainer can make little of it."""

from __future__ import annotations

import pytest
from fakes.broker_world import World, world

from umbra.proto.errors import UsageError
from umbra.proto.messages import CommitAck, CommitBatch
from umbra.services.buffer.policy.run_ahead import RunAhead
from umbra.services.config.feasibility import check_feasible
from umbra.services.config.loader import load_config


def heard(ahead: RunAhead, *values: float | None) -> list[int]:
    """What it comes to after each of these."""
    found: list[int] = []
    for step, ess in enumerate(values, start=1):
        ahead.heard(ess, step)
        found.append(ahead.now)
    return found


def test_it_falls_and_rises_and_waits_for_the_effect() -> None:
    ahead = RunAhead(most=2, min_ess=0.5)
    assert heard(ahead, 0.9, 0.4) == [2, 1]
    assert heard(ahead, 0.1, 0.1, 0.1) == [1, 1, 1], "made under the old rule"
    assert heard(ahead, 0.1) == [0]
    assert heard(ahead, *[0.1] * 10) == [0] * 10
    assert heard(ahead, 0.6, *[0.6] * 3, 0.6) == [1, 1, 1, 1, 2]
    assert heard(ahead, *[0.9] * 5) == [2] * 5


def test_without_a_bound_or_a_measure_nothing_changes() -> None:
    assert heard(RunAhead(most=3, min_ess=0.0), 0.01, 0.01) == [3, 3]
    assert heard(RunAhead(most=3, min_ess=0.5), None, None) == [3, 3]


def commit(run: World, step: int, ess: float) -> None:
    assert run.batch(step).trajectories
    body = CommitBatch(step=step, metrics={"ess": ess})
    assert run.get("trainer", body, CommitAck).version == step


def issued_ahead(run: World) -> int:
    """Batches that generators get at once, beyond the one that is due."""
    return len(run.produce("a", run.broker.batches.version)) // 4 - 1


def test_fewer_groups_are_issued() -> None:
    """B = 2 groups of 2 samples. The trainer reports a low ESS: the next step is on-policy."""
    run = world(run_ahead=1, max_staleness=4, min_ess=0.5)
    assert issued_ahead(run) == 1
    commit(run, 1, ess=0.2)
    assert issued_ahead(run) == -1, "a batch is there: no more until it is trained"
    assert [(row.kind, row.fields) for row in run.rows if row.kind == "run_ahead"] == [
        ("run_ahead", {"step": 1, "ess": 0.2, "run_ahead": 0})
    ]
    commit(run, 2, ess=0.2)
    assert issued_ahead(run) == 0
    commit(run, 3, ess=0.9)
    assert issued_ahead(run) == 0, "that was the effect of the change"
    commit(run, 4, ess=0.9)
    assert issued_ahead(run) == 1


def test_it_outlives_the_buffer() -> None:
    run = world(run_ahead=2, max_staleness=4, min_ess=0.5, durable=True)
    run.produce("a", 0)
    commit(run, 1, ess=0.2)
    run.restart_broker()
    assert run.broker.run.run_ahead.now == 1


def test_an_update_that_was_left_out_is_counted() -> None:
    run = world()
    run.produce("a", 0)
    run.batch(1)
    run.ask("trainer", CommitBatch(step=1, metrics={"skipped": 1.0}))
    assert run.broker.counters["batches_skipped"] == 1


def test_a_bound_with_nothing_to_lower_is_refused() -> None:
    overrides = ["buffer.min_ess=0.5", "buffer.run_ahead=0"]
    with pytest.raises(UsageError, match=r"min_ess has nothing to lower with buffer\.run_ahead"):
        check_feasible(load_config(overrides=overrides, environ={}))
