"""Losses and learning of a run: the watcher alone, and in the broker."""

import pytest
from fakes.broker_world import trajectory, world

from umbra.proto import messages as m
from umbra.proto.records import Task
from umbra.services.buffer.health import (
    KEPT,
    RESOLUTION_S,
    SHARES,
    WINDOW_S,
    Health,
    Meter,
    SampleFailure,
    StepCurves,
)
from umbra.services.config import BufferConfig, RunConfig, TrainerConfig


def health(trainer: TrainerConfig | None = None) -> Health:
    buffer = BufferConfig(group_size=4, batch_groups=4)  # 16 samples a batch
    return Health(RunConfig(buffer=buffer, trainer=trainer or TrainerConfig()))


def held(watcher: Health, version: int = 1) -> dict[str, m.RunWarning]:
    watcher.look(version)
    return {one.name: one for one in watcher.warnings() if one.until < 0}


def test_groups_with_equal_rewards() -> None:
    watcher = health()
    for _ in range(3):
        watcher.group([1.0] * 4)
    assert not held(watcher), "three groups are not a batch"
    watcher.group([0.0, 1.0, 0.0, 0.0])
    assert watcher.figures()["equal_rewards"] == 0.75 and "equal_rewards" not in held(watcher)
    for _ in range(4):
        watcher.group([0.0] * 4)
    found = held(watcher, 7)["equal_rewards"]
    assert found.figures == {"share": 0.875} and found.since == 7
    assert "88% of recent groups" in found.text and "buffer.dynamic_sampling" in found.text
    for _ in range(16):
        watcher.group([0.0, 1.0, 0.0, 0.0])
    assert "equal_rewards" not in held(watcher, 9)
    (over,) = watcher.warnings()
    assert (over.name, over.since, over.until) == ("equal_rewards", 7, 9)
    assert watcher.figures() == dict.fromkeys(SHARES, 0.0)
    taught = health(TrainerConfig(objective="opd"))
    for _ in range(4):
        taught.group([0.0] * 4)
    assert taught.figures()["equal_rewards"] == 1.0 and not held(taught)


@pytest.mark.parametrize("stage", ["", "reward"])
@pytest.mark.parametrize("own", [True, False])
def test_failures_of_samples_own_end_the_run_and_those_of_dead_processes_do_not(
    own: bool, stage: str
) -> None:
    """Once four batches are known: a reward raises, or generators and scorers die with samples."""
    run = world(group_size=4, batch_groups=4, stages=[stage] * bool(stage), max_attempts=1,
                lease_s=5.0, dead_after_s=1000, run_ahead=9)  # fmt: skip
    run.join("scorer", "r")
    for _ in range(16):
        assert run.broker.run.state == "ready" and not run.broker.failure
        (task,) = run.lease("a", 1, 0)
        if stage:
            run.answer("a", [task], 0)
            (task,) = run.to_score("r", capacity=1)
        if not own:
            run.pass_time(6.0)
        elif stage:
            run.give("r", [task], error="it raised")
        else:
            run.back("a", task, "it raised", failed=True)
    status = run.status
    assert status.health["failed_samples"] == own
    assert (status.state, status.ending) == ("draining" if own else "ready", run.broker.failure)
    assert not status.finished, "it can go on from its store"
    said = f"{stage}{': ' * bool(stage)}it raised (sample s-60 of prompt 16)"
    for part in ("100% of recent samples ended as failed", said, "buffer.max_failed_share = 0.5"):
        assert (part in run.broker.failure) == own, run.broker.failure
    run.broker.close(run.now)
    ledger = run.status.ledger
    assert ledger.ended["failed"] == 64 and ledger.balance == 0
    assert not any(ledger.in_flight.values())


def test_the_status_has_figures_and_warnings_and_the_metrics_a_row() -> None:
    run = world(group_size=4, batch_groups=4, run_ahead=9)
    tasks = run.lease("a", 16, 0)
    run.submit("a", *(trajectory(one, 0, finish_reason="length") for one in tasks))
    run.pass_time(0.1)
    assert run.batch(1).trajectories
    run.ask("trainer", m.CommitBatch(step=1, metrics={"updates": 0.0}))
    run.pass_time(0.1)
    status = run.status
    assert [one.name for one in status.warnings] == ["equal_rewards", "truncated"]
    assert status.health["equal_rewards"] == status.health["truncated"] == 1.0
    rows = {row.fields["name"]: row.fields for row in run.rows if row.kind == "warning"}
    assert set(rows) == {one.name for one in status.warnings}
    assert rows["truncated"]["figures"] == {"share": 1.0}


def test_every_step_is_a_point_at_first_and_long_runs_are_condensed_to_means() -> None:
    curves = StepCurves()
    curves.add(1, {"loss": 0.5, "of no interest": 1.0, "samples": 8.0}, 10.0)
    curves.add(2, {"loss": 0.25, "reward/mean": 1.0, "samples": 8.0}, 12.0)
    for step in (3, 4, 5):
        curves.add(step, {"loss": 1.0}, 12.0)
    curves.cut(3)
    curves.add(3, {"loss": 2.0}, 12.0)
    record = curves.record()
    assert record.steps == [1, 2, 3]
    assert record.values == {
        "reward/mean": [None, 1.0, None], "loss": [0.5, 0.25, 2.0],
        "samples_per_s": [None, 4.0, None],
    }  # fmt: skip
    for steps in (KEPT, KEPT + 1, 10 * KEPT):
        curves = StepCurves()
        for step in range(1, steps + 1):
            curves.add(step, {"loss": float(step)}, float(step))
        record = curves.record()
        assert len(record.steps) <= KEPT and record.steps[-1] == steps
        losses = record.values["loss"]
        assert losses[0] == pytest.approx((1 + record.steps[0]) / 2)
        assert losses == sorted(loss for loss in losses if loss is not None)


def test_a_meter_measures_slow_and_fast_counts() -> None:
    meter = Meter(0, 0.0)
    assert meter.rate(30.0) == 0.0
    for minute in range(1, 5):  # a batch a minute
        meter.see(256 * minute, 60.0 * minute)
        for later in (0.0, 20.0, 59.0):
            assert meter.rate(60.0 * minute + later) == pytest.approx(256 / 60)
    assert meter.rate(4 * 60.0 + 120.0) == pytest.approx(256 / 120), "the next one is overdue"
    meter = Meter(0, 0.0)
    for tick in range(1, 2001):  # 40/s for 50 s, then 80/s
        meter.see(2 * tick + 2 * max(tick - 1000, 0), tick / 20)
    assert meter.rate(100.0) == pytest.approx(80.0)
    assert len(meter._marks) <= WINDOW_S / RESOLUTION_S * 1.5
    meter.see(5, 101.0)  # a trainer that starts again has its last steps to do once more
    assert meter.rate(101.0) == 0.0
    meter.see(9, 103.0)
    assert meter.rate(103.0) == 2.0


def test_the_first_status_has_the_speed_of_what_was_done_in_this_life() -> None:
    """Waiting for generators does not count; nor does a resumed run until something comes."""
    run = world(run_ahead=1, durable=True, dead_after_s=1000)
    run.pass_time(5.0)
    assert run.status.rates.issued_per_s == 0.0
    tasks = run.produce("a", 0)
    run.pass_time(1.0)
    run.pass_time(1.0)
    rates = run.status.rates
    assert rates.issued_per_s == rates.answers_per_s == len(tasks)  # all within a second
    assert rates.samples_per_s == rates.steps_per_s == 0.0
    run.train(1)
    rates = run.status.rates
    assert rates.samples_per_s == pytest.approx(4 / 2.0), "of 4 samples, since work began"
    assert rates.steps_per_s == pytest.approx(1 / 2.0)
    run.restart_broker()
    for _ in range(2):  # its processes load the model
        run.pass_time(20.0)
        rates = run.status.rates
        assert rates.samples_per_s == rates.issued_per_s == rates.steps_per_s == 0.0
    run.produce("a", 1)
    run.pass_time(0.1)
    run.train(2)
    run.now += 4.0
    assert run.status.rates.samples_per_s == pytest.approx(1.0, rel=0.05)


def test_truncated_failed_and_stale_answers_are_warned_of() -> None:
    watcher = health()
    task = Task(sample_id="s", group_id="g", prompt_id="p", attempt=1, row={}, lease_s=1.0)
    for number in range(16):
        reason = "length" if number < 4 else "stop"
        watcher.answered(trajectory(task, 0, finish_reason=reason))
    found = held(watcher)["truncated"]
    assert found.figures == {"share": 0.25}
    assert found.text.startswith("25% of recent answers were cut off at a limit on tokens (samp")
    for _ in range(8):
        watcher.group([0.0, 1.0, 0.0, 1.0])
    for number, text in enumerate(("a tool hung", "raised: 12x", "raised: z")):
        watcher.failed(SampleFailure(f"s-{number}", f"p{number}", text, samples=4, own=True))
    found = held(watcher)["failed_samples"]
    assert found.figures == {"share": pytest.approx(12 / 44)}
    assert "27% of recent samples ended as failed" in found.text
    assert "the newest: raised: z (sample s-2 of prompt p2)" in found.text and not watcher.verdict
    for _ in range(4):
        watcher.trained(16)
    watcher.dropped(4)
    assert "6% of recent answers were dropped as stale" in held(watcher, 4)["stale_samples"].text
    for _ in range(7):
        watcher.trained(16)
    assert "stale_samples" not in held(watcher, 12), "it is over"
