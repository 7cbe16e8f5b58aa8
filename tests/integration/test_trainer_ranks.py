"""A trainer of several ranks, really sharded (FSDP2 over gloo), against the same in one process."""

import os
import re
import signal
import time
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.architectures import ARCHITECTURES
from fakes.rank_bench import Trained, learn, train
from fakes.rank_processes import WAIT_S, on_ranks, started
from fakes.slowness import seconds

from umbra.proto.errors import PeerLostError
from umbra.proto.records import Trajectory
from umbra.services.config import CheckpointConfig, TrainerConfig
from umbra.services.modeling import sequence_parallel
from umbra.services.trainer.checkpoints.folder import (
    CheckpointFolder,
    export_checkpoint,
    read_index,
)
from umbra.services.trainer.checkpoints.saver import Saver
from umbra.services.trainer.checkpoints.state import ModelState
from umbra.services.trainer.distributed.ranks import join_ranks
from umbra.services.trainer.learner import Learner
from umbra.services.trainer.policy import load_policy

RANKS = 3, {}  # which divide most things unevenly; whole runs have two
ADAM = {"optimizer": "adamw", "betas": [0.9, 0.95], "learning_rate": 1e-3}
MOMENTUM = {"optimizer": "sgd", "betas": [0.9, 0.95], "learning_rate": 0.05}
CASES: dict[str, dict[str, Any]] = {
    "token_mean": {"minibatches": 2, "epochs": 2, "objective": "decoupled", "max_ratio": 1.9},
    "sequence_mean": {"aggregation": "sequence_mean", "share_prompts": False, "minibatches": 3},
    "constant": {
        "aggregation": "constant",
        "micro_tokens": 200,
        "logits_mib": 0.002,
        "objective": "ppo",
        "entropy_coef": 0.01,
        "max_grad_norm": 1e-2,
    },
    "adamw": {**ADAM, "activation_checkpointing": "selective"},
    "wide": {"pack_tokens": 128, "micro_tokens": 512, "activation_checkpointing": True},
    "critic": {"objective": "ppo_critic", "critic.learning_rate": 1e-3},
    "offloaded": {"offload": "all", "activation_checkpointing": True, "minibatches": 2},
    "host_optimizer": {"offload": "optimizer", "minibatches": 2},
    "lora": {"lora_rank": 4, "learning_rate": 1.0},
    # Weights of version 1 are kept aside, and change places with version 2's for a pass.
    "compared": {"lag": 1, "max_mismatch": 1e9, "mismatch_every": 1, "learning_rate": 1.0},
}
RESUMED: dict[str, dict[str, Any]] = {
    "adamw": ADAM,
    "masters": {**MOMENTUM, "weights": "bf16", "precision": "bf16", "offload": "optimizer"},
    "lora": {**ADAM, "lora_rank": 4, "learning_rate": 1e-2},
    "critic": {**ADAM, "objective": "ppo_critic", "critic.learning_rate": 1e-3},
}


def assert_as_alone(found: list[Trained], alone: Trained) -> None:
    """Check that ranks learned what one rank did."""
    assert all(one.rows == found[0].rows for one in found), "all ranks know the same"
    for row, expected in zip(found[0].rows, alone.rows, strict=True):
        for key, value in expected.items():
            same = None if value is None else pytest.approx(value, rel=1e-3, abs=1e-6)
            assert row[key] == same, key
    for name, tensor in found[0].weights.items():
        torch.testing.assert_close(tensor, alone.weights[name], atol=2e-5, rtol=1e-3)
    for name, (_, elements) in alone.local.items():
        assert sum(one.local[name][0] for one in found) == elements, name


def assert_same_learned(
    folder: Path, world: int, directory: Path, batches: Any, case: dict[str, Any], **sharing: int
) -> None:
    """Check that as many ranks learn `case` as one does."""
    found = on_ranks(folder, world, learn, directory, batches, {"": {**case, **sharing}})
    assert_as_alone([one[""] for one in found], train(directory, batches, **case))


@pytest.mark.parametrize("case", CASES)
def test_the_number_of_ranks_does_not_change_what_is_learned(
    together: list[dict[str, Trained]], case: str, alone: Any
) -> None:
    found, expected = [one[case] for one in together], alone(case)
    assert_as_alone(found, expected)
    if case == "compared":
        assert [(row["mismatch/compared"] or 0) > 0 for row in expected.rows] == [True, False, True]
    # Rows [start, end) of rank r, as torch.chunk divides them; nobody holds a whole matrix.
    for name, (_, elements) in expected.local.items():
        parts = [one.local[name][0] for one in found]
        if ".lora_A." in name:
            assert parts[2] == 0, "4 rows: 2, 2 and 0"
        elif not any(kind in name for kind in ("layernorm", "lora", "norm.weight")):
            assert max(parts) < elements, f"{name} is not sharded: {parts}"


def test_each_rank_merges_its_own_experts(batches: list[list[Trajectory]], tmp_path: Path) -> None:
    """Four experts on three ranks: two, two and none."""
    model = ARCHITECTURES["qwen3-moe"].write(tmp_path / "model")
    assert_same_learned(tmp_path, 3, model, batches, {"lora_rank": 4, "learning_rate": 0.1})


def learn_and_lose(case: str, directory: Path, batches: list[list[Trajectory]]) -> None:
    """As one of two ranks. Rank 1 is killed in an update, or stops in an exchange of rows."""
    owner: Any = Learner if case == "dies" else sequence_parallel
    name = "update" if case == "dies" else "_exchange"
    function, calls = getattr(owner, name), count(1)

    def ending(*args: Any) -> Any:
        if next(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL if case == "dies" else signal.SIGSTOP)
        return function(*args)

    if os.environ["RANK"] == "1":
        setattr(owner, name, ending)
    settings = {"sequence_parallel": 1 if case == "dies" else 2}
    learn(directory, batches, {"": settings}, 2.0 if case == "hangs" else 30.0)


@pytest.mark.parametrize(("case", "told"), [("dies", "lost another rank"), ("hangs", "silent for")])
def test_the_others_end_when_a_rank_is_gone(
    case: str, told: str, directory: Path, batches: list[list[Trajectory]], tmp_path: Path
) -> None:
    with started(tmp_path, 2, learn_and_lose, case, directory, batches) as ranks:
        code, errors = ranks[0].wait()
    assert code == PeerLostError.exit_code, errors
    assert "trainer rank 0 lost another rank" in errors
    assert told in errors


def be_patient(case: str, folder: Path) -> None:
    """As one of two ranks: rank 0 is busy before its order for longer than `rank_timeout_s`.

    If all works rank 1 is as busy with its part of a checkpoint. Else rank 0 is killed, or stopped,
    instead of giving an order.
    """
    timeout_s = min(10.0, seconds(2.0))  # it is slept through three times
    with join_ranks(TrainerConfig(device="cpu", rank_timeout_s=timeout_s)) as ranks:
        ranks.agree(True)  # both are there
        if case != "works" and ranks.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL if case == "leaves" else signal.SIGSTOP)
        if ranks.rank == 0:
            time.sleep(1.5 * timeout_s)
        assert ranks.spread("export", str) == "export"
        checkpoints, write = CheckpointFolder(folder, CheckpointConfig()), Saver._write

        def slow(self: Saver, *args: Any) -> Any:
            time.sleep(1.5 * timeout_s * ranks.rank)
            return write(self, *args)

        setattr(Saver, "_write", slow)  # noqa: B010 - of a class
        models = [ModelState("policy", torch.nn.Linear(4, 4))]
        with closing(Saver(checkpoints, models, ranks, 0, {})) as saver:
            (outcome,) = saver.last(1, {})
        assert not outcome.error, outcome.error
        assert checkpoints.steps() == [1]


@pytest.mark.timeout(4 * WAIT_S + 20)
@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("works", ""),
        ("leaves", "trainer rank 1 lost another rank"),
        ("stops", r"trainer rank 0 was silent for [\d.]+ s \(trainer.rank_timeout_s\)"),
    ],
)
def test_a_rank_waits_for_as_long_as_rank_0_lives(case: str, told: str, tmp_path: Path) -> None:
    if case == "works":
        on_ranks(tmp_path, 2, be_patient, case, tmp_path)
        return
    with started(tmp_path, 2, be_patient, case, tmp_path) as ranks:
        code, errors = ranks[1].wait(2 * WAIT_S)
    assert code == PeerLostError.exit_code, errors
    assert re.search(told, errors)


def assert_resumed(
    folder: Path,
    world: int,
    directory: Path,
    batches: list[list[Trajectory]],
    case: dict[str, Any],
    saved: int,
    **sharing: int,
) -> Path:
    """1. Ranks train to the end; up to `saved`, and on from that; and on from what one rank saved.
    2. One rank goes on from theirs. Result: ranks have the weights of those that did not stop, bit
    for bit; where their number changes, they are the same up to rounding. Return their folder.
    """
    own, one = folder / "own", folder / "one"
    train(directory, batches, checkpoints=one, until=saved, **case)
    divided: dict[str, Any] = {**case, **sharing}
    cases = {
        "whole": divided,
        "half": {**divided, "checkpoints": own, "until": saved},
        "again": {**divided, "checkpoints": own},
        "ones": {**divided, "checkpoints": one},
    }
    results, *_ = on_ranks(folder, world, learn, directory, batches, cases)
    found = {name: trained.weights for name, trained in results.items()}
    (own / f"step-{len(batches)}").rename(folder / "aside")
    after = train(directory, batches, checkpoints=own, **case)
    assert len(after.rows) == len(batches) - saved
    policy = load_policy(export_checkpoint(own / f"step-{saved}", folder / "hf"))[0].state_dict()
    # FSDP and autocast round to bf16 in different places.
    atol, rtol = (5e-4, 1e-2) if "weights" in case else (2e-5, 1e-3)
    for key, expected in train(directory, batches, **case).weights.items():
        if not key.startswith("critic/"):
            assert torch.equal(policy[key], found["half"][key]), "the export is what was trained"
        assert torch.equal(found["again"][key], found["whole"][key]), key
        for weights in (found["whole"], found["ones"], after.weights):
            torch.testing.assert_close(weights[key], expected, atol=atol, rtol=rtol)
    return own


@pytest.mark.parametrize("case", RESUMED)
def test_ranks_go_on_from_what_others_saved(
    case: str, directory: Path, batches: list[list[Trajectory]], tmp_path: Path
) -> None:
    """A rank saves its own rows and no more."""
    own = assert_resumed(tmp_path, 3, directory, batches, RESUMED[case], saved=2)
    index = read_index(own / "step-2")
    assert len(index.files) == 3
    for name, info in index.tensors.items():
        rows = [sum(r.count for r in file.rows if r.name == name) for file in index.files]
        whole = len(info.shape) > 1
        assert not whole or (sum(rows), max(rows)) == (info.shape[0], -(-info.shape[0] // 3)), name
