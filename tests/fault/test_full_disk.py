"""A full disk under the real buffer: back-pressure and a clear word, and no loss."""

import subprocess
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from fakes.crash_run import CONFIG, BufferProcess, CrashRun, check, check_kept
from unit.test_checkpoints import Trainer


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
    """A file that takes all that is left."""
    ballast = place / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    return ballast


def work_until_stuck(run: CrashRun) -> None:
    """Go on until the buffer says that its disk is full."""
    while not any("No space left" in item.what for item in run.status().stuck):
        run.turn()
    run.work(0.3)  # what was acknowledged before the disk was full may not have been read yet


@pytest.mark.fault
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


@pytest.mark.fault
@pytest.mark.timeout(120)
def test_a_full_disk_is_waited_for(tmp_path: Path, small_disk: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    buffer = BufferProcess(folder, f'{CONFIG}store = "{small_disk}/store"\n')
    run = CrashRun(buffer, seed=5)
    try:
        while run.version < 5:
            run.turn()
        ballast = fill(small_disk)
        work_until_stuck(run)
        acked, version = len(run.acked), run.version
        run.work(1.0)
        assert (len(run.acked), run.version) == (acked, version), "acknowledged without a store"
        ballast.unlink()
        while run.version < version + 5:
            run.turn()
        # Killed while it is full: whatever was acknowledged must have been on the disk by then.
        ballast = fill(small_disk)
        work_until_stuck(run)
        acked = len(run.acked)
        buffer.kill()
        ballast.unlink()
        buffer.start()
        check_kept(run, acked)
        assert not run.status().stuck
        run.work(0.3)
        check(run, run.finish())
    finally:
        run.close()
        buffer.close()
