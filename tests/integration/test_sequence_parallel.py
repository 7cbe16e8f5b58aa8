"""Ranks that share the tokens of each row (Ulysses over gloo), against one rank with whole rows."""

import json
from pathlib import Path
from typing import Any

import pytest
from fakes.architectures import ARCHITECTURES
from fakes.rank_bench import Alone, train
from fakes.rank_processes import TESTS, launch, see_through, start
from integration.test_trainer_ranks import assert_as_alone

from umbra.proto.records import Trajectory
from umbra.services.modeling.architectures import PROVEN, RECURRENT
from umbra.services.trainer.distributed.ranks import Ranks

CASES: dict[str, dict[str, Any]] = {
    "token_mean": {
        "aggregation": "token_mean",
        "minibatches": 2,
        "epochs": 2,
        "objective": "decoupled",
        "max_ratio": 1.9,
    },
    "by_sequence": {
        "objective": "gspo",
        "aggregation": "sequence_mean",
        "entropy_coef": 0.01,
        "pack_tokens": 128,
        "micro_tokens": 512,
        "share_prompts": False,
    },
    "recomputed": {"activation_checkpointing": True, "logits_mib": 0.002},
    "selective": {"activation_checkpointing": "selective"},
    "lora": {"lora_rank": 4, "learning_rate": 1.0},
    "compared": {"lag": 1, "max_mismatch": 1e9, "mismatch_every": 1, "learning_rate": 1.0},
    "centered": {"objective": "tis", "score_centering": 2, "logits_mib": 0.002},
    "critic": {"objective": "ppo_critic", "critic.learning_rate": 1e-3},
}


RIGHT = [n for n, one in ARCHITECTURES.items() if one.config().model_type in PROVEN - RECURRENT]


@pytest.mark.parametrize(
    "together",
    [  # 2x2 is 2, twice
        pytest.param((2, {"sequence_parallel": 2}), marks=pytest.mark.real, id="2"),
        pytest.param((4, {"sequence_parallel": 2}), id="2x2"),
    ],
    indirect=True,
    scope="module",
)
@pytest.mark.parametrize("case", CASES)
def test_what_is_learned_does_not_depend_on_who_has_the_tokens(
    together: tuple[int, Path], case: str, alone: Alone
) -> None:
    world, folder = together
    assert_as_alone(folder, case, world, alone[case])


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the results of two ranks, a head each and both the only key head, by model."""
    folder, names = tmp_path_factory.mktemp("architectures"), [*RIGHT, "own"]
    see_through(launch(folder, 2, [str(TESTS / "programs/sequence_rank.py"), ",".join(names)]))
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in names}


@pytest.mark.parametrize("name", RIGHT)
def test_logprobs_entropies_and_gradients_are_those_of_whole_rows(
    of_two: dict[str, str], name: str
) -> None:
    assert of_two[name] == ""


def test_a_layer_that_attends_in_a_way_of_its_own_is_refused(of_two: dict[str, str]) -> None:
    assert of_two["own"] == (
        "trainer.sequence_parallel needs Transformers' attention interface, and only 1 of the 2 "
        "layers of Qwen3ForCausalLM use it: set it to 1"
    )


def test_a_sharded_model_with_sinks_windows_and_experts(
    batches: list[list[Trajectory]], tmp_path: Path
) -> None:
    """Each rank has the sinks of its heads; in bf16, queries and values may differ in dtype."""
    model = ARCHITECTURES["gpt-oss"].write(tmp_path / "model")
    cases = {name: {"precision": name, "sequence_parallel": 2} for name in ("no", "bf16")}
    see_through(start(model, tmp_path, 2, cases, batches[:2]))
    alone = train(model, batches[:2], Ranks())
    assert_as_alone(tmp_path, "no", 2, alone)
    rows = json.loads((tmp_path / "bf16.0.json").read_text())["rows"]
    for row, expected in zip(rows, alone.rows, strict=True):
        for key in ("loss", "entropy", "grad_norm"):
            assert row[key] == pytest.approx(expected[key], rel=0.05, abs=0.01), key
