"""Moments in 8 bits over several ranks: checkpoints by rows, for any number of them."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.installed import needs
from fakes.rank_bench import make_batches, train
from fakes.rank_processes import see_through, start
from safetensors.torch import load_file

from umbra.services.trainer.checkpoints.folder import read_index
from umbra.services.trainer.distributed.ranks import Ranks
from umbra.services.trainer.make_model import make_model

needs("torchao")

STEPS, SAVED = 3, 2
CASE: dict[str, Any] = {"optimizer": "adamw8bit", "betas": [0.9, 0.95], "learning_rate": 1e-3}


@pytest.mark.timeout(400)
def test_two_ranks_save_and_others_go_on(tmp_path: Path) -> None:
    """1. Two ranks train to the end, and halfway. 2. Two go on from that, and one does. Result: two
    have the weights of those that did not stop, bit for bit; one has them up to rounding."""
    make_model(tmp_path / "model", hidden=128, ff=128, layers=1)
    batches = make_batches(STEPS)
    cases = {
        "whole": CASE,
        "half": {**CASE, "checkpoints": "saved", "until": SAVED},
        "again": {**CASE, "checkpoints": "saved"},
    }
    see_through(start(tmp_path / "model", tmp_path, 2, cases, batches))
    whole, again = (load_file(tmp_path / f"{name}.safetensors") for name in ("whole", "again"))
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())
    saved = tmp_path / "saved"
    shutil.rmtree(saved / f"step-{STEPS}")
    index = read_index(saved / f"step-{SAVED}")
    assert index.tensors["optimizer/model.embed_tokens.weight.exp_avg_sq"].dtype == "uint8"
    with torch.compiler.set_stance("force_eager"):
        one = train(tmp_path / "model", batches, Ranks(), checkpoints=saved, **CASE)
    for name, tensor in one.weights.items():
        torch.testing.assert_close(tensor, whole[name], atol=2e-5, rtol=1e-3)
