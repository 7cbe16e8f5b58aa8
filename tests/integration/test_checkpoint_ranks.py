"""Checkpoints that one number of ranks writes and another reads; really sharded (FSDP2, gloo)."""

import shutil
from pathlib import Path
from typing import Any

import torch
from fakes.rank_bench import Alone, train
from fakes.rank_processes import see_through, start
from safetensors.torch import load_file

from umbra.proto.records import Trajectory
from umbra.services.trainer.checkpoints.folder import FileInfo, Index, export_checkpoint, read_index
from umbra.services.trainer.distributed.ranks import Ranks

STEPS, SAVED = 4, 2
ADAM = {"optimizer": "adamw", "betas": [0.9, 0.95], "learning_rate": 1e-3}
MOMENTUM = {"optimizer": "sgd", "betas": [0.9, 0.95], "learning_rate": 0.05}
CASES: dict[str, dict[str, Any]] = {
    "adamw": ADAM,
    "masters": {**MOMENTUM, "weights": "bf16", "precision": "bf16", "offload": "optimizer"},
    "lora": {**ADAM, "lora_rank": 4, "learning_rate": 1e-2},
    "critic": {**ADAM, "objective": "ppo_critic", "critic.learning_rate": 1e-3},
}


def assert_same(case: str, tensor: torch.Tensor, expected: torch.Tensor) -> None:
    """Up to the rounding of the case: FSDP and autocast round to bf16 in different places."""
    atol, rtol = (5e-4, 1e-2) if case == "masters" else (2e-5, 1e-3)
    torch.testing.assert_close(tensor, expected, atol=atol, rtol=rtol)


def test_ranks_go_on_from_what_others_saved(
    alone: Alone, directory: Path, batches: list[list[Trajectory]], tmp_path: Path
) -> None:
    """1. Three ranks train to the end; halfway, and on from that; and on from what one rank saved.
    2. One rank goes on from theirs. Result: three have the weights of those that did not stop, bit
    for bit; where the number changes, they are the same up to rounding.
    """
    cases: dict[str, dict[str, Any]] = {}
    for name, case in CASES.items():
        cases[f"{name}-whole"] = case
        cases[f"{name}-half"] = {**case, "checkpoints": name, "until": SAVED}
        cases[f"{name}-again"] = {**case, "checkpoints": name}
        cases[f"{name}-ones"] = {**case, "checkpoints": f"{name}-one"}
        ones = {"checkpoints": tmp_path / f"{name}-one", "until": SAVED}
        train(directory, batches, Ranks(), tmp_path / "c", **ones, **case)
    see_through(start(directory, tmp_path, 3, cases, batches))
    for name, case in CASES.items():
        whole, half, again, ones = (
            load_file(tmp_path / f"{name}-{kind}.safetensors")
            for kind in ("whole", "half", "again", "ones")
        )
        saved = tmp_path / name / f"step-{SAVED}"
        for folder in (saved, tmp_path / f"{name}-one" / f"step-{STEPS}"):
            index = read_index(folder)
            assert len(index.files) == 3
            held = [sizes(index, file) for file in index.files]
            of_all = {key: sum(one.get(key, 0) for one in held) for key in held[0]}
            assert all(
                rows <= -(-of_all[key] // 3)
                for one in held
                for key, rows in one.items()
                if "." in key
            ), "a rank saves its own rows and no more"
        exported = export_checkpoint(saved, tmp_path / f"{name}-hf") / "model.safetensors"
        for key, tensor in load_file(exported).items():
            assert torch.equal(half[key], tensor), "the export is what was trained"
        shutil.rmtree(tmp_path / name / f"step-{STEPS}")
        checkpoints = tmp_path / name
        after = train(directory, batches, Ranks(), tmp_path / "c", checkpoints=checkpoints, **case)
        assert len(after.rows) == STEPS - SAVED
        for key, expected in alone[name].weights.items():
            assert torch.equal(again[key], whole[key]), (name, key)
            assert_same(name, ones[key], expected)
            assert_same(name, after.weights[key], expected)


def sizes(index: Index, file: FileInfo) -> dict[str, int]:
    return {rows.name: rows.count for rows in file.rows if len(index.tensors[rows.name].shape) > 1}
