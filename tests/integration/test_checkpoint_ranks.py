"""Checkpoints that one number of ranks writes and another reads; really sharded (FSDP2, gloo)."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.rank_bench import Alone, make_batches, narrow_model, train
from fakes.rank_processes import see_through, start
from safetensors.torch import load_file

from umbra.proto.records import Trajectory
from umbra.services.trainer.checkpoints.export import export_checkpoint
from umbra.services.trainer.checkpoints.folder import FileInfo, Index, read_index
from umbra.services.trainer.distributed.ranks import Ranks

STEPS, SAVED = 4, 2
ADAM = {"optimizer": "adamw", "betas": [0.9, 0.95], "learning_rate": 1e-3}
MOMENTUM = {"optimizer": "sgd", "betas": [0.9, 0.95], "learning_rate": 0.05}
CASES: dict[str, dict[str, Any]] = {
    "adamw": ADAM,
    "masters": {**MOMENTUM, "weights": "bf16", "precision": "bf16", "offload": "optimizer"},
    "momentum": MOMENTUM,
    "lora": {**ADAM, "lora_rank": 4, "learning_rate": 1e-2},
    "critic": {**ADAM, "objective": "ppo_critic", "critic.learning_rate": 1e-3},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return narrow_model(tmp_path_factory)


@pytest.fixture(scope="module")
def batches() -> list[list[Trajectory]]:
    return make_batches(STEPS)


@pytest.fixture(scope="module")
def alone(
    directory: Path, batches: list[list[Trajectory]], tmp_path_factory: pytest.TempPathFactory
) -> Alone:
    return Alone(directory, batches, CASES, tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def of_two(
    directory: Path, batches: list[list[Trajectory]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """What two ranks leave that train to the end (`NAME-whole`), and halfway (`NAME`)."""
    folder = tmp_path_factory.mktemp("two")
    whole = {f"{name}-whole": case for name, case in CASES.items()}
    half = {name: {**case, "checkpoints": name, "until": SAVED} for name, case in CASES.items()}
    run_ranks(directory, folder, 2, {**whole, **half}, batches)
    return folder


def assert_same(case: str, tensor: torch.Tensor, expected: torch.Tensor) -> None:
    """Up to the rounding of the case: FSDP and autocast round to bf16 in different places."""
    atol, rtol = (5e-4, 1e-2) if case == "masters" else (2e-5, 1e-3)
    torch.testing.assert_close(tensor, expected, atol=atol, rtol=rtol)


def run_ranks(
    directory: Path, folder: Path, world: int, cases: dict[str, Any], batches: Any
) -> None:
    see_through(start(directory, folder, world, cases, batches))


def test_two_ranks_save_one_goes_on(
    of_two: Path, alone: Alone, directory: Path, batches: list[list[Trajectory]], tmp_path: Path
) -> None:
    """1. Two ranks train two steps. 2. One goes on. Result: as one would have from the start."""
    shutil.copytree(of_two, tmp_path, dirs_exist_ok=True)
    for name, case in CASES.items():
        saved = tmp_path / name / f"step-{SAVED}"
        assert len(read_index(saved).files) == 2
        index = read_index(saved)
        held = [sizes(index, file) for file in index.files]
        of_all = {key: sum(one.get(key, 0) for one in held) for key in held[0]}
        assert all(
            rows <= -(-of_all[key] // 2) for one in held for key, rows in one.items() if "." in key
        ), "a rank saves its own rows and no more"
        whole = export_checkpoint(saved, tmp_path / f"{name}-hf") / "model.safetensors"
        for key, tensor in load_file(tmp_path / f"{name}.safetensors").items():
            assert torch.equal(load_file(whole)[key], tensor), "the export is what was trained"
        after = train(
            directory, batches, Ranks(), tmp_path / "c", checkpoints=tmp_path / name, **case
        )
        assert len(after.rows) == STEPS - SAVED
        for key, tensor in after.weights.items():
            assert_same(name, tensor, alone[name].weights[key])


def sizes(index: Index, file: FileInfo) -> dict[str, int]:
    """Rows of every matrix in a file."""
    return {rows.name: rows.count for rows in file.rows if len(index.tensors[rows.name].shape) > 1}


def test_one_rank_saves_three_go_on(
    alone: Alone, directory: Path, batches: list[list[Trajectory]], tmp_path: Path
) -> None:
    for name, case in CASES.items():
        train(
            directory,
            batches,
            Ranks(),
            tmp_path / "c",
            checkpoints=tmp_path / name,
            until=SAVED,
            **case,
        )
    cases = {name: {**case, "checkpoints": name} for name, case in CASES.items()}
    run_ranks(directory, tmp_path, 3, cases, batches)
    for name in CASES:
        for key, tensor in load_file(tmp_path / f"{name}.safetensors").items():
            assert_same(name, tensor, alone[name].weights[key])
        assert len(read_index(tmp_path / name / f"step-{STEPS}").files) == 3


def test_as_many_ranks_go_on_bit_by_bit(
    of_two: Path, directory: Path, batches: list[list[Trajectory]], tmp_path: Path
) -> None:
    """1. Two ranks train to the end. 2. Two train halfway. 3. Two others go on. Result: equal."""
    shutil.copytree(of_two, tmp_path, dirs_exist_ok=True)
    rest = {name: {**case, "checkpoints": name} for name, case in CASES.items()}
    run_ranks(directory, tmp_path, 2, rest, batches)
    for name in CASES:
        expected = load_file(tmp_path / f"{name}-whole.safetensors")
        for key, tensor in load_file(tmp_path / f"{name}.safetensors").items():
            assert torch.equal(tensor, expected[key]), (name, key)
