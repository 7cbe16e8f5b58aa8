"""Ranks that share the tokens of each row (Ulysses over gloo), against one rank with whole rows."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fakes.architectures import ARCHITECTURES
from fakes.closeness import assert_same_sums, model_terms
from fakes.rank_bench import Trained, learn, make_batches, train
from fakes.rank_processes import on_ranks
from fakes.slowness import limit
from integration import test_trainer_ranks as plain
from torch import Tensor

from umbra.proto.errors import UsageError
from umbra.proto.records import Trajectory
from umbra.services.config import TrainerConfig
from umbra.services.modeling.architectures import PROVEN, RECURRENT
from umbra.services.modeling.models import attention_implementation
from umbra.services.modeling.packing import pack
from umbra.services.modeling.scorer import Scorer
from umbra.services.modeling.sequence_parallel import SequenceGroup
from umbra.services.trainer.batch import TrainBatch, make_batch
from umbra.services.trainer.distributed.ranks import join_ranks

RANKS = 4, {"sequence_parallel": 2}
CASES: dict[str, dict[str, Any]] = {
    **{name: plain.CASES[name] for name in ("token_mean", "lora", "compared", "critic")},
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
    "centered": {"objective": "tis", "score_centering": 2, "logits_mib": 0.002},
}
RIGHT = [n for n, one in ARCHITECTURES.items() if one.config().model_type in PROVEN - RECURRENT]
OWN = "own"  # a model whose second layer attends in a way of its own
# Tokens of a row, whether prompts are shared, whether routers are told what to choose.
LAYOUTS = {
    "rows of one sequence": (1, False, False),
    "packed": (96, False, False),
    "shared prompts": (96, True, True),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_learned_does_not_depend_on_who_has_the_tokens(
    together: list[dict[str, Trained]], case: str, alone: Any
) -> None:
    plain.assert_as_alone([one[case] for one in together], alone(case))


def compare_all(names: list[str]) -> dict[str, str]:
    """As one of two ranks, return how each model differs from whole rows, or why it is refused."""
    torch.set_num_threads(1)
    config = TrainerConfig(device="cpu", rank_timeout_s=limit(30.0), sequence_parallel=2)
    with join_ranks(config) as ranks:
        assert ranks.sequence is not None
        return {name: compare(name, ranks.sequence) for name in names}


def compare(name: str, group: SequenceGroup) -> str:
    model = make(name)
    batch = make_batch(make_batches(1, groups=2)[0], model.config.vocab_size)
    scorer = Scorer(model, 1 << 30).eval()
    expected = {layout: run(scorer, batch, *how) for layout, how in LAYOUTS.items()}
    terms = model_terms(model.config, backward=True)
    try:
        shared = Scorer(make(name), 1 << 30, group=group).eval()
        for layout, how in LAYOUTS.items():
            found = run(shared, batch, *how)
            for key, alone in expected[layout].items():
                if key not in ("logprobs", "entropies"):
                    dist.all_reduce(found[key], group=group.group)
                assert_same_sums(found[key], alone, terms=terms, what=f"{layout}: {key}")
    except (AssertionError, UsageError) as error:
        return str(error)
    return ""


def make(name: str) -> Any:
    """The model of this name, always the same, with the attention that it would be loaded with."""
    model: Any = ARCHITECTURES["qwen3" if name == OWN else name].model()
    model.config._attn_implementation = attention_implementation(model.config)
    if name == OWN:
        model.model.layers[1].self_attn.config = copy.deepcopy(model.config)
    return model


def run(
    scorer: Scorer, batch: TrainBatch, pack_tokens: int, share: bool, told: bool
) -> dict[str, Tensor]:
    """Logprobs and entropies [M]; gradients of a sum of both, and the load of experts, of here."""
    scorer.zero_grad()
    tokens = batch.tokens
    if told and scorer.routers is not None:
        layers, choices, experts = scorer.routers.kind
        at = np.arange(layers)[:, None] + np.arange(choices)
        kinds = [np.arange(int(length))[:, None, None] + at for length in tokens.lengths]
        tokens = replace(tokens, routing=[(one % experts).astype(np.int16) for one in kinds])
    weights = torch.randn(len(tokens.learned), generator=torch.Generator().manual_seed(3))
    logprobs, entropies = torch.zeros_like(weights), torch.zeros_like(weights)
    for micro in pack(tokens, pack_tokens=pack_tokens, micro_tokens=192, share_prompts=share):
        here = micro.source
        one, other = scorer(micro, batch.temperature[here], entropy_gradient=True)
        ((one + 0.1 * other) * weights[here]).sum().backward()
        logprobs[here], entropies[here] = one.detach(), other.detach()
    found = {"logprobs": logprobs, "entropies": entropies}
    if scorer.routers is not None:
        found["load"] = scorer.routers.take_load().double()
    for name, parameter in scorer.named_parameters():
        gradient = parameter.grad
        found[name] = torch.zeros_like(parameter) if gradient is None else gradient.clone()
    return found


def test_logprobs_entropies_and_gradients_are_those_of_whole_rows(tmp_path: Path) -> None:
    """Two ranks have a head each, and both the only key head."""
    found, _ = on_ranks(tmp_path, 2, compare_all, [*RIGHT, OWN])
    refusal = found.pop(OWN)
    assert found == dict.fromkeys(RIGHT, "")
    assert "only 1 of the 2 layers of Qwen3ForCausalLM use it: set it to 1" in refusal


def test_a_sharded_model_with_sinks_windows_and_experts(
    batches: list[list[Trajectory]], tmp_path: Path
) -> None:
    """Each rank has the sinks of its heads; in bf16, queries and values may differ in dtype."""
    model = ARCHITECTURES["gpt-oss"].write(tmp_path / "model")
    cases = {name: {"precision": name, "sequence_parallel": 2} for name in ("no", "bf16")}
    found = on_ranks(tmp_path, 2, learn, model, batches[:2], cases)
    alone = train(model, batches[:2])
    plain.assert_as_alone([one["no"] for one in found], alone)
    for row, expected in zip(found[0]["bf16"].rows, alone.rows, strict=True):
        for key in ("loss", "entropy", "grad_norm"):
            assert row[key] == pytest.approx(expected[key], rel=0.05, abs=0.01), key
