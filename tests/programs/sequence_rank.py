"""One of several ranks that share rows, over models of many architectures.

Started as torchrun would. Arguments: names of architectures with commas between, how many ranks
share rows, and a folder. There rank 0 leaves `<name>.json`: how logprobs, entropies and gradients
differ from those of whole rows, or what was refused; empty if all is equal.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fakes.architectures import ARCHITECTURES
from fakes.closeness import assert_same_sums, model_terms
from fakes.rank_bench import make_batches
from fakes.slowness import seconds
from torch import Tensor
from transformers import PreTrainedModel

from umbra.proto.errors import UsageError
from umbra.services.modeling.models import attention_implementation
from umbra.services.modeling.packing import pack
from umbra.services.modeling.scorer import Scorer
from umbra.services.modeling.sequence_parallel import SequenceGroup
from umbra.services.runtime.config import TrainerConfig
from umbra.services.trainer.batch import TrainBatch, make_batch
from umbra.services.trainer.ranks import join_ranks

OWN = "own"  # a model whose second layer attends in a way of its own
LAYOUTS = {"rows of one sequence": (1, False), "packed": (96, False), "shared prompts": (96, True)}


def main(names: list[str], size: int, folder: Path) -> int:
    """Compare all of them; the exit code."""
    torch.set_num_threads(1)
    config = TrainerConfig(device="cpu", rank_timeout_s=seconds(30.0), sequence_parallel=size)
    with join_ranks(config) as ranks:
        assert ranks.sequence is not None
        for name in names:
            found = compare(name, ranks.sequence)
            if ranks.rank == 0:
                (folder / f"{name}.json").write_text(json.dumps(found))
    return 0


def compare(name: str, group: SequenceGroup) -> str:
    """What is different, or refused; empty if all is equal."""
    model: Any = ARCHITECTURES["qwen3" if name == OWN else name].model()
    model.config._attn_implementation = attention_implementation(model.config)
    if name == OWN:
        model.model.layers[1].self_attn.config = copy.deepcopy(model.config)
    batch = make_batch(make_batches(1, groups=2)[0], model.config.vocab_size)
    plain = Scorer(model, 1 << 30).eval()
    expected = {layout: run(plain, model, batch, *how) for layout, how in LAYOUTS.items()}
    for module in (model, model.get_output_embeddings()):  # the plain scorer's
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    try:
        shared = Scorer(model, 1 << 30, group).eval()
        for layout, how in LAYOUTS.items():
            logprobs, entropies, gradients = run(shared, model, batch, *how)
            for gradient in gradients.values():
                dist.all_reduce(gradient, group=group.group)
            alone = expected[layout]
            terms = model_terms(model.config, backward=True)
            assert_same_sums(logprobs, alone[0], terms=terms, what=f"{layout}: logprobs")
            assert_same_sums(entropies, alone[1], terms=terms, what=f"{layout}: entropies")
            for key, gradient in gradients.items():
                assert_same_sums(gradient, alone[2][key], terms=terms, what=f"{layout}: {key}")
    except (AssertionError, UsageError) as error:
        return str(error)
    return ""


def run(
    scorer: Scorer, model: PreTrainedModel, batch: TrainBatch, pack_tokens: int, share: bool
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Logprobs and entropies [M], and the gradients of a sum of both."""
    model.zero_grad()
    tokens = batch.tokens
    weights = torch.randn(len(tokens.learned), generator=torch.Generator().manual_seed(3))
    logprobs, entropies = torch.zeros_like(weights), torch.zeros_like(weights)
    for micro in pack(tokens, pack_tokens=pack_tokens, micro_tokens=192, share_prompts=share):
        here = micro.source
        one, other = scorer(micro, batch.temperature[here], entropy_gradient=True)
        ((one + 0.1 * other) * weights[here]).sum().backward()
        logprobs[here], entropies[here] = one.detach(), other.detach()
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }
    return logprobs, entropies, gradients


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1].split(","), int(sys.argv[2]), Path(sys.argv[3])))
