"""The power goes while checkpoints are made: those that were told of are whole."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from fakes.lossy_disk import LossyDisk, power_cuts

from umbra.services.config import CheckpointConfig
from umbra.services.process.files import Disk
from umbra.services.trainer.checkpoints.folder import CheckpointFolder, read_index
from umbra.services.trainer.checkpoints.saver import Saver
from umbra.services.trainer.checkpoints.state import ModelState, Saved, resume
from umbra.services.trainer.distributed.ranks import Ranks

KEEP = CheckpointConfig(every=1, keep=2)


class Training:
    """Steps with a checkpoint each, from the newest one on; a buffer holds the step."""

    def __init__(self, path: Path, disk: Disk) -> None:
        module = torch.nn.Module()
        self.rows = torch.zeros(700)
        module.register_buffer("rows", self.rows)
        self.models = [ModelState("policy", module)]
        self.folder = CheckpointFolder(path, KEEP, disk)
        self.step = resume(self.folder, self.models, Ranks())
        self._saver = Saver(self.folder, self.models, Ranks(), self.step, {})

    def save(self, step: int) -> None:
        """A checkpoint of `step`."""
        self.rows.fill_(step)
        self.step = self._saver.begun = step - 1
        (outcome,) = self._saver.last(step, {"loss": 1.0})
        assert not outcome.error

    def close(self) -> None:
        self._saver.close()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LossyDisk, list[int]]]:
    """Yield the disk of five checkpoints, and the newest reported one after each step of it."""
    root = tmp_path_factory.mktemp("disk")
    disk = LossyDisk(root)
    told = [0]
    with closing(Training(root / "checkpoints", disk)) as training:
        for step in (1, 2, 3, 4, 5):
            training.save(step)
            told += [told[-1]] * (len(disk.steps) - len(told)) + [step]
    assert {step[0] for step in disk.steps} >= {"rename", "remove", "sync", "names", "folder"}
    yield disk, told


def test_a_power_cut_leaves_each_checkpoint_whole_or_not_there(
    saved: tuple[LossyDisk, list[int]], tmp_path: Path
) -> None:
    disk, told = saved
    for step, place in power_cuts(disk, tmp_path, seeds=3):
        training = Training(place / "checkpoints", Disk())
        training.close()
        assert training.step >= told[step], f"after step {step}: {disk.steps[step - 1]}"
        assert bool((training.rows == training.step).all())
        folder = training.folder
        assert not list(folder.path.glob("damaged-*")), f"after step {step}: {disk.steps[step - 1]}"
        for one in folder.steps():
            training.models[0].load(Saved(folder, read_index(folder.of(one))))
        shutil.rmtree(place)


def test_a_power_cut_is_no_hindrance_to_the_next_checkpoint(
    saved: tuple[LossyDisk, list[int]], tmp_path: Path
) -> None:
    for _, place in power_cuts(saved[0], tmp_path, seeds=0):
        with closing(Training(place / "checkpoints", Disk())) as training:
            after = training.step + 1
            training.save(after)
        with closing(Training(place / "checkpoints", Disk())) as again:
            assert again.step == after
        left = {path.name for path in (place / "checkpoints").iterdir()}
        assert all(name.startswith("step-") for name in left), left
        shutil.rmtree(place)
