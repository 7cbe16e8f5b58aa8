"""Ranks that share the tokens of each row (Ulysses over gloo), against one rank with whole rows."""

import json
from pathlib import Path
from typing import Any

import pytest
from fakes.architectures import ARCHITECTURES
from fakes.rank_bench import Alone, make_batches, narrow_model, train
from fakes.rank_processes import TESTS, launch, see_the_loss, see_through, start
from integration.test_trainer_ranks import assert_as_alone

from umbra.proto.records import Trajectory
from umbra.services.modeling.architectures import PROVEN
from umbra.services.trainer.distributed.ranks import Ranks

CASES: dict[str, dict[str, Any]] = {
    "token_mean": {
        "aggregation": "token_mean",
        "minibatches": 2,
        "epochs": 2,
        "objective": "decoupled",
    },
    "by_sequence": {"objective": "gspo", "aggregation": "sequence_mean", "entropy_coef": 0.01},
    "wide": {"pack_tokens": 128, "micro_tokens": 512, "share_prompts": False},
    "shared": {"pack_tokens": 128, "micro_tokens": 512},
    "recomputed": {"activation_checkpointing": True, "logits_mib": 0.002, "entropy_coef": 0.01},
    "selective": {"activation_checkpointing": "selective"},
    "lora": {"lora_rank": 4, "learning_rate": 1.0},
    "guarded": {"minibatches": 3, "max_ratio": 1.9},
    "compared": {"lag": 1, "max_mismatch": 1e9, "mismatch_every": 1, "learning_rate": 1.0},
    "critic": {
        "objective": "ppo_critic",
        "critic.learning_rate": 1e-3,
    },
    "value_head": {"objective": "ppo_critic", "critic.kind": "head", "critic.learning_rate": 1e-2},
}


RIGHT = [name for name, one in ARCHITECTURES.items() if one.config().model_type in PROVEN]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four query heads and two key heads: four ranks repeat key heads, two do not."""
    return narrow_model(tmp_path_factory)


@pytest.fixture(scope="module")
def batches() -> list[list[Trajectory]]:
    return make_batches(3)


@pytest.fixture(scope="module")
def alone(
    directory: Path, batches: list[list[Trajectory]], tmp_path_factory: pytest.TempPathFactory
) -> Alone:
    return Alone(directory, batches, CASES, tmp_path_factory.mktemp("alone"))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((2, 2), marks=pytest.mark.real),  # 2x2 is that, twice
        (4, 2),
        (4, 4),
    ],
    ids=["2", "2x2", "4"],
)
def shared(
    request: pytest.FixtureRequest,
    directory: Path,
    batches: list[list[Trajectory]],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[int, Path]:
    """The number of ranks, and the folder with what they left."""
    world, size = request.param
    folder = tmp_path_factory.mktemp("ranks")
    cases = {name: {**case, "sequence_parallel": size} for name, case in CASES.items()}
    see_through(start(directory, folder, world, cases, batches))
    return world, folder


@pytest.mark.parametrize("case", CASES)
def test_what_is_learned_does_not_depend_on_who_has_the_tokens(
    shared: tuple[int, Path], case: str, alone: Alone
) -> None:
    world, folder = shared
    found = assert_as_alone(folder, case, world, alone[case])
    for row, expected in zip(found[0]["rows"], alone[case].rows, strict=True):
        assert row["operations"] == pytest.approx(expected["operations"]), "counted once"


@pytest.mark.parametrize(
    ("case", "told"),
    # In the suite a rank hangs in an exchange of test_expert_parallel.py.
    [("dies", "lost another rank"), pytest.param("hangs", "silent for", marks=pytest.mark.real)],
)
def test_the_others_end_when_a_rank_is_gone(
    case: str, told: str, directory: Path, batches: list[list[Trajectory]], tmp_path: Path
) -> None:
    """1. Two ranks share rows. 2. One is killed in an exchange, or stops. Result: the other says so
    and ends.
    """
    cases = {case: {"sequence_parallel": 2}}
    see_the_loss(start(directory, tmp_path, 2, cases, batches), told)


# -- architectures ---------------------------------------------------------------------------------


def compare(folder: Path, names: list[str], size: int) -> dict[str, str]:
    """What `size` ranks found of the models of these names; see `sequence_rank.py`."""
    program = str(TESTS / "programs/sequence_rank.py")
    see_through(launch(folder, size, [program, ",".join(names), str(size)]))
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in names}


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of all architectures; two ranks have a head each, and both the only key head."""
    return compare(tmp_path_factory.mktemp("architectures"), [*RIGHT, "own"], 2)


@pytest.mark.parametrize("name", RIGHT)
def test_logprobs_entropies_and_gradients_are_those_of_whole_rows(
    of_two: dict[str, str], name: str
) -> None:
    assert of_two[name] == ""


def test_a_layer_that_attends_in_a_way_of_its_own_is_refused(of_two: dict[str, str]) -> None:
    assert of_two["own"] == (
        "trainer.sequence_parallel: 1 of the 2 layers of Qwen3ForCausalLM attend through "
        "Transformers' attention interface: set it to 1"
    )


def test_heads_that_cannot_be_divided_are_refused(tmp_path: Path) -> None:
    assert compare(tmp_path, ["qwen3"], 3)["qwen3"] == (
        "trainer.sequence_parallel = 3 cannot divide the 2 attention heads of a qwen3: use a "
        "divisor of 2"
    )


def test_a_sharded_model_with_sinks_windows_and_experts(
    batches: list[list[Trajectory]], tmp_path: Path
) -> None:
    """Each rank has the sinks of its heads; in bf16, queries and values may differ in dtype."""
    model = ARCHITECTURES["gpt-oss"].write(tmp_path / "model")
    for precision in ("no", "bf16"):  # which a process can't change
        case = {precision: {"precision": precision, "sequence_parallel": 2}}
        see_through(start(model, tmp_path, 2, case, batches[:2]))
    alone = train(model, batches[:2], Ranks())
    assert_as_alone(tmp_path, "no", 2, alone)
    rows = json.loads((tmp_path / "bf16.0.json").read_text())["rows"]
    for row, expected in zip(rows, alone.rows, strict=True):
        for key in ("loss", "entropy", "grad_norm"):
            assert row[key] == pytest.approx(expected[key], rel=0.05, abs=0.01), key
