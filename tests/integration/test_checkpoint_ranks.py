"""Checkpoints that one number of ranks writes and another reads; really sharded (FSDP2, gloo)."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.rank_bench import Alone, train
from fakes.rank_processes import see_through, start
from safetensors.torch import load_file

from umbra.proto.records import Trajectory
from umbra.services.trainer.checkpoints.folder import FileInfo, Index, export_checkpoint, read_index
from umbra.services.trainer.distributed.ranks import Ranks
from umbra.services.trainer.make_model import make_model

STEPS, SAVED = 4, 2
ADAM = {"optimizer": "adamw", "betas": [0.9, 0.95], "learning_rate": 1e-3}
MOMENTUM = {"optimizer": "sgd", "betas": [0.9, 0.95], "learning_rate": 0.05}
CASES: dict[str, dict[str, Any]] = {
    "adamw": ADAM,
    "masters": {**MOMENTUM, "weights": "bf16", "precision": "bf16", "offload": "optimizer"},
    "lora": {**ADAM, "lora_rank": 4, "learning_rate": 1e-2},
    "critic": {**ADAM, "objective": "ppo_critic", "critic.learning_rate": 1e-3},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    path: Path = tmp_path_factory.mktemp("models") / "tiny"
    make_model(path, hidden=32, ff=64, init_std=0.1)
    return path


def assert_same(case: str, tensor: torch.Tensor, expected: torch.Tensor) -> None:
    """Up to the rounding of the case: FSDP and autocast round to bf16 in different places."""
    atol, rtol = (5e-4, 1e-2) if case == "masters" else (2e-5, 1e-3)
    torch.testing.assert_close(tensor, expected, atol=atol, rtol=rtol)


def test_two_ranks_save_and_others_go_on(
    alone: Alone, directory: Path, batches: list[list[Trajectory]], tmp_path: Path
) -> None:
    """1. Two ranks train to the end, and halfway. 2. Two go on from that, and one does. Result: two
    have the weights of those that did not stop, bit for bit; one has them up to rounding.
    """
    cases: dict[str, dict[str, Any]] = {}
    for name, case in CASES.items():
        cases[f"{name}-whole"] = case
        cases[f"{name}-half"] = {**case, "checkpoints": name, "until": SAVED}
        cases[f"{name}-again"] = {**case, "checkpoints": name}
    see_through(start(directory, tmp_path, 2, cases, batches))
    for name, case in CASES.items():
        whole, half, again = (
            load_file(tmp_path / f"{name}-{kind}.safetensors")
            for kind in ("whole", "half", "again")
        )
        for key, tensor in whole.items():
            assert torch.equal(again[key], tensor), (name, key)
        saved = tmp_path / name / f"step-{SAVED}"
        index = read_index(saved)
        assert len(index.files) == 2
        held = [sizes(index, file) for file in index.files]
        of_all = {key: sum(one.get(key, 0) for one in held) for key in held[0]}
        assert all(
            rows <= -(-of_all[key] // 2) for one in held for key, rows in one.items() if "." in key
        ), "a rank saves its own rows and no more"
        exported = export_checkpoint(saved, tmp_path / f"{name}-hf") / "model.safetensors"
        for key, tensor in load_file(exported).items():
            assert torch.equal(half[key], tensor), "the export is what was trained"
        shutil.rmtree(tmp_path / name / f"step-{STEPS}")
        checkpoints = tmp_path / name
        after = train(directory, batches, Ranks(), tmp_path / "c", checkpoints=checkpoints, **case)
        assert len(after.rows) == STEPS - SAVED
        for key, tensor in after.weights.items():
            assert_same(name, tensor, alone[name].weights[key])


def sizes(index: Index, file: FileInfo) -> dict[str, int]:
    return {rows.name: rows.count for rows in file.rows if len(index.tensors[rows.name].shape) > 1}


def test_one_rank_saves_three_go_on(
    alone: Alone, directory: Path, batches: list[list[Trajectory]], tmp_path: Path
) -> None:
    cases = {name: {**case, "checkpoints": name} for name, case in CASES.items()}
    for name in cases:
        path = tmp_path / name
        train(
            directory,
            batches,
            Ranks(),
            tmp_path / "c",
            checkpoints=path,
            until=SAVED,
            **CASES[name],
        )
    see_through(start(directory, tmp_path, 3, cases, batches))
    for name in cases:
        for key, tensor in load_file(tmp_path / f"{name}.safetensors").items():
            assert_same(name, tensor, alone[name].weights[key])
        assert len(read_index(tmp_path / name / f"step-{STEPS}").files) == 3
