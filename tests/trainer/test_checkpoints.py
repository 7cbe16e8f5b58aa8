"""Checkpoints: saved beside the training, whole or not there, and resumed to the bit."""

from __future__ import annotations

import errno
import json
import logging
import random
import shutil
import threading
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from fakes.fixtures import Closes
from fakes.lossy_disk import LossyDisk, power_cuts
from fakes.rank_bench import Trainer
from fakes.slowness import limit
from safetensors.torch import load_file
from torch import Tensor

from umbra.proto.errors import UsageError
from umbra.services.config import CheckpointConfig
from umbra.services.process.files import Disk
from umbra.services.trainer.checkpoints.folder import (
    CheckpointFolder,
    export_checkpoint,
    read_index,
)
from umbra.services.trainer.checkpoints.saver import Saver
from umbra.services.trainer.checkpoints.state import ModelState, Saved, resume
from umbra.services.trainer.distributed.ranks import Ranks
from umbra.services.trainer.make_model import make_model


@pytest.fixture
def start(directory: Path, tmp_path: Path, closes: Closes) -> Any:
    """Makes trainers of the same checkpoints."""

    def make(model: Path = directory, **keys: Any) -> Trainer:
        return closes(Trainer(model, tmp_path / "checkpoints", **keys))

    return make


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


@pytest.mark.parametrize(
    "keys",
    [
        {"deterministic": True, "schedule": "cosine", "warmup_steps": 2},
        {"optimizer": "sgd", "betas": [0.9, 0.95]},
        {"lora_rank": 4},
        {"weights": "bf16", "precision": "bf16"},
        {"offload": "optimizer", "weights": "bf16", "precision": "bf16"},
        {"minibatches": 2, "epochs": 2, "objective": "decoupled"},
        {"objective": "ppo_critic", "critic.learning_rate": 1e-3},
    ],
    ids=lambda keys: "-".join(map(str, keys.values())),
)
def test_going_on_is_exact(start: Any, keys: dict[str, Any]) -> None:
    whole = start(**keys, **{"checkpoint.every": 0}).train(4)
    first = start(**keys).train(2)
    saved = first.save()
    torch.manual_seed(7)  # somebody else draws meanwhile
    again = start(**keys)
    assert again.step == 2
    assert same(again.learner.weights(), first.learner.weights())
    before = torch.get_rng_state(), random.getstate()
    again.train(4)
    assert torch.equal(torch.get_rng_state(), before[0]), "no random number is drawn"
    assert random.getstate() == before[1]
    assert same(again.learner.weights(), whole.learner.weights()), "bit for bit"
    assert not same(again.learner.weights(), first.learner.weights())
    if "lora_rank" in keys:  # whose outputs would be others from one step to the next
        with pytest.raises(UsageError, match=r"of an adapter of trainer.lora_alpha = 32: set"):
            start(**keys, lora_alpha=8.0)
    exported = export_checkpoint(saved, saved.parent / "hf") / "model.safetensors"
    assert same(load_file(exported), first.learner.weights())
    torch.use_deterministic_algorithms(False)


def test_what_is_kept(start: Any) -> None:
    keys = {"checkpoint.every": 1, "checkpoint.keep": 2, "checkpoint.best_metric": "quality"}
    trainer = start(**keys)
    kept, covered = list[list[int]](), list[int]()
    for step, quality in enumerate((0.1, 0.9, 0.2, 0.3, 0.95, 0.4, 0.5), start=1):
        trainer.saver.after(step, {"quality": quality, "nothing": None})
        assert [outcome.error for outcome in trainer.saver.last(step, None)] == [""]
        kept.append(trainer.folder.steps())
        covered.append(trainer.folder.covered)
    assert kept == [[1], [1, 2], [2, 3], [2, 3, 4], [4, 5], [5, 6], [5, 6, 7]]
    assert covered == [0, 1, 2, 3, 4, 5, 6], "one can go on from any of the newest two"
    lowest = CheckpointConfig(best_metric="-quality")
    assert CheckpointFolder(trainer.folder.path, lowest).best() == 6
    path = trainer.folder.path
    modes = {(p.is_dir(), p.stat().st_mode & 0o777) for p in [path, *path.rglob("*")]}
    assert modes == {(True, 0o700), (False, 0o600)}, "they are for their user alone"


def test_training_does_not_wait_for_the_disk(
    start: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """1. A write that does not end. 2. The next one is due. Result: told once, and made up for."""
    go_on, write = threading.Event(), Disk.write_all

    def slow(*args: Any, **kwargs: Any) -> Any:
        assert go_on.wait(limit(30))
        return write(*args, **kwargs)

    monkeypatch.setattr(Disk, "write_all", slow)
    trainer = start(**{"checkpoint.every": 1}).train(1)
    first = {name: tensor.clone() for name, tensor in trainer.learner.weights().items()}
    with caplog.at_level(logging.WARNING):
        trainer.train(3)
    late = "step 2: the checkpoint of step 1 is still being written"
    assert sum(late in record.message for record in caplog.records) == 1
    assert trainer.saver.settled() == []
    assert trainer.folder.steps() == [], "nothing has a name before it is whole"
    go_on.set()
    (outcome,) = trainer.saver.last(3, None)
    assert (outcome.step, outcome.error) == (1, "")
    trainer.train(4)
    trainer.save()
    assert trainer.folder.steps() == [1, 4]
    exported = export_checkpoint(trainer.folder.of(1), trainer.folder.path / "hf")
    assert same(load_file(exported / "model.safetensors"), first), "as it was at the copy"


def test_a_full_disk_leaves_the_old_one(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = start().train(1)
    old = trainer.save()
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(Disk, "write_all", full)
    trainer.train(2)
    (outcome,) = trainer.saver.last(2, trainer.row)
    assert outcome.error == "No space left on device"
    assert [entry.name for entry in old.parent.iterdir()] == ["step-1"]
    monkeypatch.undo()
    trainer.train(3)
    trainer.save()
    assert trainer.folder.steps() == [1, 3]


@pytest.mark.parametrize("damage", ["cut", "changed", "no file", "no index", "no text", "format"])
def test_a_damaged_one_is_named_and_the_one_before_is_taken_if_that_is_whole(
    start: Any, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = start().train(1)
    trainer.save()
    trainer.train(2)
    newest = trainer.save()
    data, index = newest / "rank-00000.rows", newest / "checkpoint.json"
    content = data.read_bytes()
    match damage:
        case "cut":
            data.write_bytes(content[:-100])
        case "changed":
            at = len(content) // 4  # of a weight
            data.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        case "no file":
            data.unlink()
        case "no index":
            index.unlink()
        case "no text":  # a bit of a name has changed
            index.write_bytes(index.read_bytes().replace(b"policy/", b"policy\xff", 1))
        case _:
            index.write_text(json.dumps(json.loads(index.read_text()) | {"format": 3}))
    with pytest.raises(UsageError, match=str(newest)):
        export_checkpoint(newest, newest.parent / "hf")
    with caplog.at_level(logging.WARNING):
        assert start().step == 1
    assert str(newest) in caplog.text, "it says which file"
    assert "the checkpoint of step 2 is damaged" in caplog.text
    assert sorted(entry.name for entry in newest.parent.iterdir()) == ["damaged-step-2", "step-1"]
    (newest.parent / "step-1" / "rank-00000.rows").write_bytes(b"")
    with pytest.raises(UsageError, match=r"none of the checkpoints in .* is whole \(steps 1\)"):
        start()


def test_another_model(start: Any, directory: Path, tmp_path: Path) -> None:
    start().train(1).save()
    make_model(tmp_path / "wide", hidden=64, ff=64)
    make_model(tmp_path / "deep", hidden=32, ff=64, layers=3)
    with pytest.raises(UsageError, match=r"step-1 is of another model: .* is \[101, 32\] in it"):
        start(model=tmp_path / "wide")
    with pytest.raises(UsageError, match=r"it has no .*layers\.2\..* and \d+ more; set"):
        start(model=tmp_path / "deep")
    with pytest.raises(UsageError, match=r"is of all weights, but trainer\.lora_rank is above 0"):
        start(lora_rank=2)
    with pytest.raises(UsageError, match=r"has the state of AdamW, but trainer\.optimizer is"):
        start(optimizer="sgd")
    with pytest.raises(UsageError, match=r"step-1 has no critic: set trainer.objective and adv"):
        start(objective="ppo_critic")
    with pytest.raises(UsageError, match=r"cannot be loaded|another model|no directory"):
        export_checkpoint(tmp_path / "checkpoints/step-1", tmp_path / "hf", str(tmp_path / "deep"))


class Rows:
    """Steps with a checkpoint each, from the newest one on; a buffer holds the step."""

    def __init__(self, path: Path, disk: Disk) -> None:
        module = torch.nn.Module()
        self.rows = torch.zeros(700)
        module.register_buffer("rows", self.rows)
        self.models = [ModelState("policy", module)]
        self.folder = CheckpointFolder(path, CheckpointConfig(every=1, keep=2), disk)
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


def test_a_power_cut_leaves_each_checkpoint_whole_or_not_there(tmp_path: Path) -> None:
    """And is no hindrance to the next one, tried with the two extremes of each step."""
    (tmp_path / "disk").mkdir()
    disk = LossyDisk(tmp_path / "disk")
    told = [0]  # the newest reported checkpoint after each step of the disk
    with closing(Rows(tmp_path / "disk" / "checkpoints", disk)) as training:
        for step in (1, 2, 3, 4, 5):
            training.save(step)
            told += [told[-1]] * (len(disk.steps) - len(told)) + [step]
    assert {step[0] for step in disk.steps} >= {"rename", "remove", "sync", "names", "folder"}
    cuts = Counter[int]()
    for step, place in power_cuts(disk, tmp_path / "cuts", seeds=3):
        cuts[step] += 1
        where = f"after step {step}: {disk.steps[step - 1]}"
        with closing(Rows(place / "checkpoints", Disk())) as training:
            assert training.step >= told[step], where
            assert bool((training.rows == training.step).all())
            folder = training.folder
            assert not list(folder.path.glob("damaged-*")), where
            for one in folder.steps():
                training.models[0].load(Saved(folder, read_index(folder.of(one))))
            after = training.step + 1
            if cuts[step] <= 2:
                training.save(after)
        if cuts[step] <= 2:
            with closing(Rows(place / "checkpoints", Disk())) as again:
                assert again.step == after
            assert all(path.name.startswith("step-") for path in folder.path.iterdir()), where
        shutil.rmtree(place)
