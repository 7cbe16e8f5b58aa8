"""Checkpoints of a trainer on a GPU: pinned copies, the state of its generator."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer.test_checkpoints import Trainer, same

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_going_on_is_exact(tiny_model_dir: Path, tmp_path: Path, precision: str) -> None:
    keys: dict[str, Any] = {"device": "cuda", "precision": precision, "deterministic": True}
    with closing(Trainer(tiny_model_dir, tmp_path / "whole", **keys)) as whole:
        expected = whole.train(4).learner.weights()
    with closing(Trainer(tiny_model_dir, tmp_path / "parts", **keys)) as first:
        first.train(2).save()
        torch.cuda.manual_seed(3)
    with closing(Trainer(tiny_model_dir, tmp_path / "parts", **keys)) as again:
        assert again.step == 2
        assert same(again.train(4).learner.weights(), expected)
    torch.use_deterministic_algorithms(False)
