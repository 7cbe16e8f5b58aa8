"""`kill -9` and a full disk under the real buffer: back-pressure, a clear word, and no loss."""

import json
import random
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from fakes.crash_run import CONFIG, CrashRun
from fakes.rank_bench import Trainer
from fakes.slowness import until

from umbra import cli
from umbra.proto.messages import Status


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(place)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: Path) -> Path:
    ballast = place / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    return ballast


def is_full(status: Status) -> bool:
    return any(item.hopeless for item in status.stuck)


def work_until_stuck(run: CrashRun) -> None:
    while not is_full(run.status()):
        run.turn()
    # What was acknowledged before the disk was full may not have been read yet.
    before = -1
    while before < len(run.acked) + run.version:
        before = len(run.acked) + run.version
        run.work(0.5)


def test_a_checkpoint_that_does_not_fit(small_disk: Path, tiny_model_dir: Path) -> None:
    """1. A checkpoint. 2. The disk is full. Result: it is told, and the old one is whole."""
    with closing(Trainer(tiny_model_dir, small_disk / "checkpoints")) as trainer:
        trainer.train(1).save()
        ballast = fill(small_disk)
        trainer.train(2)
        (outcome,) = trainer.saver.last(2, trainer.row)
        assert outcome.error.endswith("No space left on device")
        assert trainer.folder.steps() == [1]
        with closing(Trainer(tiny_model_dir, small_disk / "checkpoints")) as other:
            assert other.step == 1
        ballast.unlink()
        trainer.train(3).save()
        assert trainer.folder.steps() == [1, 3]


def test_a_full_disk_is_waited_for(tmp_path: Path, small_disk: Path) -> None:
    config = f'{CONFIG}store = "{small_disk}/store"\n'
    with closing(CrashRun(tmp_path, seed=5, config=config)) as run:
        run.train(5)
        ballast = fill(small_disk)
        work_until_stuck(run)
        acked, version = len(run.acked), run.version
        run.work(1.0)
        assert (len(run.acked), run.version) == (acked, version), "acknowledged without a store"
        ballast.unlink()
        run.train(5)
        # Killed while it is full: all acknowledged results must be on the disk already.
        ballast = fill(small_disk)
        work_until_stuck(run)
        acked = len(run.acked)
        run.buffer.kill()
        ballast.unlink()
        run.buffer.start()
        run.check_kept(acked)
        assert not is_full(run.status())  # peers who were silent meanwhile may be named
        run.work(0.3)
        run.finish()


def test_a_run_whose_disk_stays_full_ends_with_a_sentence_and_goes_on_once_there_is_room(
    project: Path,
    small_disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is full for store, metrics and logs; nobody dies of it before the run gives up."""
    (project / "runs").symlink_to(small_disk)
    monkeypatch.chdir(project)
    monkeypatch.setattr("umbra.deploy.run.up.HELP_S", 3.0)

    def steps() -> int:
        return sum(p.read_text().count('"kind":"step"') for p in small_disk.glob("*/metrics.jsonl"))

    def fill_after_a_step() -> None:
        while not steps():
            time.sleep(0.1)
        fill(small_disk)

    threading.Thread(target=fill_after_a_step, daemon=True).start()
    assert cli.main(["up", "run.toml", "--set", "run.steps=100000"]) == 6
    said = capsys.readouterr().err
    assert f"no room for the store in {small_disk}" in said
    assert "s; after that is mended, resume with `umbra up disk/" in said
    (small_disk / "ballast").unlink()
    (run,) = (path for path in small_disk.iterdir() if path.name != "keys")
    last = steps() + 5
    assert cli.main(["up", str(run), "--set", f"run.steps={last}"]) == 0
    ledger = json.loads((run / "summary.json").read_text())["ledger"]
    assert (ledger["trained"], ledger["balance"]) == (last * 16, 0)


KILLS = 30


def test_nothing_acknowledged_is_lost_when_the_buffer_is_killed(tmp_path: Path) -> None:
    chance = random.Random(7)
    with closing(CrashRun(tmp_path, seed=7, fork=True)) as run:
        for number in range(KILLS):
            before = len(run.acked)
            if number % 2:  # else it may be killed before it has done anything
                until(lambda n=before: len(run.acked) > n, "something is acknowledged", run.turn)
            run.work(chance.uniform(0.01, 0.25))
            run.buffer.kill()
            acked = len(run.acked)
            run.buffer.start()
            run.check_kept(acked)
        run.train(5)
        run.finish()


def test_a_trainer_that_is_killed_gets_the_same_batches(tmp_path: Path) -> None:
    """Its buffer is killed too; `CrashRun` compares every batch with the one before."""
    with closing(CrashRun(tmp_path, seed=3, fork=True)) as run:
        for kill_buffer in (False, True, False):
            run.train(10)
            if kill_buffer:
                run.buffer.kill()
                run.buffer.start()
            run.start_trainer_again(max(0, run.version - 1))
            run.train(3)
        run.finish()
