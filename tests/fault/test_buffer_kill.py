"""`kill -9` of the real buffer, at random moments, with peers over real sockets."""

import random
from pathlib import Path

from fakes.crash_run import crash_run
from fakes.slowness import until

KILLS = 30


def test_nothing_acknowledged_is_lost_when_the_buffer_is_killed(tmp_path: Path) -> None:
    chance = random.Random(7)
    with crash_run(tmp_path, seed=7, fork=True) as run:
        for number in range(KILLS):
            before = len(run.acked)
            if number % 2:  # else it may be killed before it has done anything
                until(lambda n=before: len(run.acked) > n, "something is acknowledged", run.turn)
            run.work(chance.uniform(0.01, 0.25))
            run.buffer.kill()
            acked = len(run.acked)
            run.buffer.start()
            run.check_kept(acked)
        until(lambda: len(run.trained) > KILLS, "training goes on", run.turn)
        run.finish()


def test_a_trainer_that_is_killed_gets_the_same_batches(tmp_path: Path) -> None:
    """Its buffer is killed too; `CrashRun` compares every batch with the one before."""
    with crash_run(tmp_path, seed=3, fork=True) as run:
        for kill_buffer in (False, True, False):
            target = run.version + 10
            while run.version < target:
                run.turn()
            if kill_buffer:
                run.buffer.kill()
                run.buffer.start()
            run.start_trainer_again(max(0, run.version - 1))
            while run.version < target + 2:
                run.turn()
        run.finish()
