"""Rates of late: exact for bursts, never zero between two of them, falling once one is overdue."""

import pytest
from fakes.broker_world import world

from umbra.proto.messages import Heartbeat
from umbra.services.buffer.figures import RESOLUTION_S, WINDOW_S, Meter, Throughput


def test_a_batch_a_minute() -> None:
    meter = Meter(0, 0.0)
    assert meter.rate(30.0) == 0.0
    for minute in range(1, 5):
        meter.see(256 * minute, 60.0 * minute)
        for later in (0.0, 20.0, 59.0):
            assert meter.rate(60.0 * minute + later) == pytest.approx(256 / 60)
    assert meter.rate(4 * 60.0 + 120.0) == pytest.approx(256 / 120), "the next one is overdue"


def test_the_start_of_a_resumed_run_does_not_count() -> None:
    names = ("steps_per_s", "samples_per_s", "answers_per_s", "issued_per_s", "ended_per_s")
    counts = dict.fromkeys(names, 100)
    throughput = Throughput(lambda: {**counts}, 0.0)
    for now in (20.0, 40.0):  # its processes load the model
        throughput.see(now)
    counts |= {"issued_per_s": 140}
    throughput.see(40.1)
    counts |= {"samples_per_s": 140}
    assert throughput.rates(44.1).samples_per_s == pytest.approx(10.0, rel=0.05)


def test_a_stream_is_measured_over_the_window() -> None:
    meter = Meter(0, 0.0)
    for tick in range(1, 2001):  # 40/s for 50 s, then 80/s
        total = 2 * tick if tick <= 1000 else 2000 + 4 * (tick - 1000)
        meter.see(total, tick / 20)
        if tick > 1:
            assert meter.rate(tick / 20) > 0
    assert meter.rate(100.0) == pytest.approx(80.0)
    assert len(meter._marks) <= WINDOW_S / RESOLUTION_S * 1.5


def test_a_count_that_goes_down_begins_anew() -> None:
    """A trainer that starts again has its last steps to do once more."""
    meter = Meter(0, 0.0)
    meter.see(10, 1.0)
    meter.see(5, 2.0)
    assert meter.rate(2.0) == 0.0
    meter.see(9, 4.0)
    assert meter.rate(4.0) == 2.0


def test_the_first_status_has_the_speed_of_what_was_done() -> None:
    """Who asks once is told as much as who has watched; waiting for generators does not count."""
    run = world(run_ahead=1)
    run.pass_time(5.0)
    assert run.broker.status(run.now).rates.issued_per_s == 0.0
    tasks = run.produce("a", 0)
    run.pass_time(1.0)
    run.pass_time(1.0)
    rates = run.broker.status(run.now).rates
    assert rates.issued_per_s == rates.answers_per_s == len(tasks)  # all within a second
    assert rates.samples_per_s == rates.steps_per_s == 0.0
    run.batch(1)
    run.commit(1)
    rates = run.broker.status(run.now).rates
    assert rates.samples_per_s == pytest.approx(4 / 2.0), "of 4 samples, since work began"
    assert rates.steps_per_s == pytest.approx(1 / 2.0)


def test_the_progress_of_a_member_has_a_rate() -> None:
    run = world()
    (member,) = [m for m in run.broker.status(run.now).members if m.name == "a"]
    assert member.progress_per_s == 0.0

    for second in range(1, 6):
        run.now = float(second)
        run.ask("a", Heartbeat(state="ready", activity="x", progress=7 * second, idle_s=0.0))
    (member,) = [m for m in run.broker.status(run.now).members if m.name == "a"]
    assert member.progress_per_s == pytest.approx(7.0)
