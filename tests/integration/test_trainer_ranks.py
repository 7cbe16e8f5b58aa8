"""A trainer of several ranks, really sharded (FSDP2 over gloo), against the same in one process."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from fakes.architectures import ARCHITECTURES
from fakes.rank_bench import Alone, Trained
from fakes.rank_processes import TESTS, WAIT_S, end, launch, see_the_loss, start
from safetensors.torch import load_file

from umbra.proto.errors import PeerLostError
from umbra.proto.records import Routing, Trajectory

SAME = (
    "loss", "grad_norm", "entropy", "lr", "skipped", "outliers", "ratio/max",
    "clip_fraction", "mask_fraction",
    "ess", "ess_last", "mismatch/k1", "mismatch/k3", "mismatch/chi2", "mismatch/k3_on_policy",
    "staleness/updates/mean", "staleness/updates/max",
)  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "token_mean": {
        "aggregation": "token_mean",
        "minibatches": 2,
        "epochs": 2,
        "objective": "decoupled",
    },
    "sequence_mean": {
        "aggregation": "sequence_mean",
        "share_prompts": False,
        "minibatches": 3,
        "max_ratio": 1.9,
    },
    "constant": {
        "aggregation": "constant",
        "micro_tokens": 200,
        "logits_mib": 0.002,
        "objective": "ppo",
        "entropy_coef": 0.01,
        "max_grad_norm": 1e-2,
    },
    "adamw": {
        "optimizer": "adamw",
        "betas": [0.9, 0.95],
        "learning_rate": 1e-3,
        "activation_checkpointing": "selective",
    },
    "wide": {"pack_tokens": 128, "micro_tokens": 512, "activation_checkpointing": True},
    "critic": {"objective": "ppo_critic", "critic.learning_rate": 1e-3},
    "offloaded": {"offload": "all", "activation_checkpointing": True, "minibatches": 2},
    "host_optimizer": {"offload": "optimizer", "minibatches": 2},
    "lora": {"lora_rank": 4, "learning_rate": 1.0},
    # Weights of version 1 are kept aside, and change places with version 2's for a pass.
    "compared": {"lag": 1, "max_mismatch": 1e9, "mismatch_every": 1, "learning_rate": 1.0},
    # Four experts on three ranks: two, two and none; each rank merges its own.
    "experts": {"lora_rank": 4, "learning_rate": 0.1},
}


@pytest.fixture(scope="module")
def alone(
    directory: Path, batches: list[list[Trajectory]], tmp_path_factory: pytest.TempPathFactory
) -> Alone:
    folder = tmp_path_factory.mktemp("alone")
    model = ARCHITECTURES["qwen3-moe"].write(folder / "model")
    cases = {**CASES, "experts": {**CASES["experts"], "model": str(model)}}
    return Alone(directory, batches, cases, folder)


def assert_as_alone(folder: Path, case: str, world: int, alone: Trained) -> list[dict[str, Any]]:
    """Check that `world` ranks learned `case` as one rank `alone`; return what each found."""
    found = [json.loads((folder / f"{case}.{rank}.json").read_text()) for rank in range(world)]
    assert all(one["rows"] == found[0]["rows"] for one in found), "all ranks know the same"
    for row, expected in zip(found[0]["rows"], alone.rows, strict=True):
        critic = [
            key for key in expected if key.startswith("critic/") and expected[key] is not None
        ]
        compared = [key for key in expected if key in ("mismatch/compared", "mismatch/judged")]
        for key in (*SAME, *critic, *compared):
            if expected[key] is None:
                assert row[key] is None, key
            else:
                assert row[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-6), key
    for name, tensor in load_file(folder / f"{case}.safetensors").items():
        torch.testing.assert_close(tensor, alone.weights[name], atol=2e-5, rtol=1e-3)
    for file in (folder / f"{case}.critic").glob("*.safetensors"):
        assert alone.critic is not None
        for name, tensor in load_file(file).items():
            expected = load_file(alone.critic / file.name)[name]
            torch.testing.assert_close(tensor, expected, atol=2e-5, rtol=1e-3)
    return found


# Three ranks divide most things unevenly; whole runs have two.
RANKS = pytest.mark.parametrize(
    "together",
    [pytest.param((2, {}), marks=pytest.mark.real, id="2"), pytest.param((3, {}), id="3")],
    indirect=True,
    scope="module",
)


@RANKS
@pytest.mark.parametrize("case", CASES)
def test_the_number_of_ranks_does_not_change_what_is_learned(
    together: tuple[int, Path], case: str, alone: Alone
) -> None:
    world, folder = together
    expected = alone[case]
    found = assert_as_alone(folder, case, world, expected)
    if case == "compared":
        assert [row["mismatch/compared"] > 0 for row in expected.rows] == [True, False, True]
    # Rows [start, end) of rank r, as torch.chunk divides them; nobody holds a whole matrix.
    for name, (_, elements) in found[0]["local"].items():
        parts = [one["local"][name][0] for one in found]
        assert sum(parts) == elements == expected.local[name][0]
        if not any(kind in name for kind in ("layernorm", "lora", "norm.weight", "mlp.gate")):
            assert max(parts) < elements, f"{name} is not sharded: {parts}"


@RANKS
def test_a_rank_may_hold_nothing_of_a_small_parameter(together: tuple[int, Path]) -> None:
    world, folder = together
    last = json.loads((folder / f"lora.{world - 1}.json").read_text())["local"]
    of_a = [held for name, (held, _) in last.items() if ".lora_A." in name]
    assert of_a
    assert all((held == 0) == (world == 3) for held in of_a), "4 rows: 2, 2 and 0"


@pytest.mark.parametrize(("case", "told"), [("dies", "lost another rank"), ("hangs", "silent for")])
def test_the_others_end_when_a_rank_is_gone(
    case: str, told: str, directory: Path, batches: list[list[Trajectory]], tmp_path: Path
) -> None:
    """1. Two ranks train. 2. One is killed in an update, or stops in an exchange of rows. Result:
    the other says so and ends.
    """
    cases = {case: {"sequence_parallel": 2 if case == "hangs" else 1}}
    see_the_loss(start(directory, tmp_path, 2, cases, batches), told)


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
    """1. Rank 0 is busy for longer than `rank_timeout_s`. 2. It gives an order; or is killed, or
    stopped, while the others wait. Result: they get the order; or they end with a sentence.
    """
    ranks = launch(tmp_path, 2, [str(TESTS / "programs/patient_rank.py"), case])
    first, second = ranks
    try:
        if case == "works":
            errors = first.communicate(timeout=2 * WAIT_S)
            assert first.returncode == 0, errors
        errors = second.communicate(timeout=2 * WAIT_S)
        if case == "works":
            assert second.returncode == 0, errors
        else:
            assert second.returncode == PeerLostError.exit_code, errors
            assert re.search(told, errors)
    finally:
        end(ranks)


def with_routing(made: Trajectory, seed: int) -> Trajectory:
    """The same, its tokens routed to two random experts of four in each of two layers."""
    generator = torch.Generator().manual_seed(seed)
    tokens = len(made.prompt_ids) // 4 + made.response_tokens - 1
    chosen = torch.rand(tokens, 2, 4, generator=generator).argsort(-1)[..., :2].to(torch.uint8)
    routing = Routing(layers=2, choices=2, experts=4, chosen=chosen.numpy().tobytes())
    return msgspec.structs.replace(made, routing=routing)
