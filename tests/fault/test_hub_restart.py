"""The weight hub is killed in the middle of a real run: it is restarted, and the run ends well."""

from fakes.whole_runs import Up

STEPS = 90  # so many that it is under way still when its hub is killed again


def test_a_killed_hub_is_restarted_and_the_run_goes_on(up: Up) -> None:
    """1. A run trains. 2. Its hub is killed, at whatever it does. 3. Again, some steps later.

    Result: both times it is restarted at another port and brought up to date, also while everybody
    waits for its weights (run_ahead = 0); no step is lost.
    """
    process = up(f"run.steps={STEPS}", "buffer.run_ahead=0")
    process.broker()
    process.until_step(3)
    process.kill("weight-hub")
    process.until(lambda: "took over /dev/shm/" in process.log("weight-hub"), "a new hub")
    process.until_step(len(process.steps()) + 5)
    process.kill("weight-hub")
    summary = process.finish()
    assert summary["restarts"] == {"weight-hub": 2}, process.lines
    assert summary["steps"] == STEPS
    assert summary["ledger"]["trained"] == STEPS * 16
    # Each version was served: the generator was never behind. A row may have died with a hub.
    assert summary["staleness"]["max"] == summary["staleness"]["bound"] == 0
    assert {row["staleness/total/max"] for row in process.steps()} == {0.0}
    assert summary["mixed_version_trajectories"] == 0
    assert len(set(range(STEPS)) - {row["version"] for row in process.rows("push")}) <= 3
    assert process.log("weight-hub").count("took over /dev/shm/") == 2
