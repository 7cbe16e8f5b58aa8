"""One of several ranks that share rows, over models of many architectures.

Started as torchrun would. Arguments: names of architectures with commas between, and a folder,
where rank 0 leaves `<name>.json`: how logprobs, entropies and gradients differ from whole
rows, or what was refused; empty if all is equal.
"""

from __future__ import annotations

import copy
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fakes.architectures import ARCHITECTURES
from fakes.closeness import assert_same_sums, model_terms
from fakes.rank_bench import make_batches
from fakes.slowness import limit
from numpy.typing import NDArray
from torch import Tensor

from umbra.proto.errors import UsageError
from umbra.services.config import TrainerConfig
from umbra.services.modeling.experts import Routers
from umbra.services.modeling.models import attention_implementation
from umbra.services.modeling.packing import pack
from umbra.services.modeling.scorer import Scorer
from umbra.services.modeling.sequence_parallel import SequenceGroup
from umbra.services.trainer.batch import TrainBatch, make_batch
from umbra.services.trainer.distributed.ranks import join_ranks

OWN = "own"  # a model whose second layer attends in a way of its own
# Tokens of a row, whether prompts are shared, whether routers are told what to choose.
LAYOUTS = {
    "rows of one sequence": (1, False, False),
    "packed": (96, False, False),
    "shared prompts": (96, True, True),
}


def main(names: list[str], folder: Path) -> int:
    """Compare all of them; the exit code."""
    torch.set_num_threads(1)
    config = TrainerConfig(device="cpu", rank_timeout_s=limit(30.0), sequence_parallel=2)
    with join_ranks(config) as ranks:
        assert ranks.sequence is not None
        for name in names:
            found = compare(name, ranks.sequence)
            if ranks.rank == 0:
                (folder / f"{name}.json").write_text(json.dumps(found))
    return 0


def compare(name: str, group: SequenceGroup) -> str:
    """Return the difference or refusal; empty if all is equal."""
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
        tokens = replace(tokens, routing=[routing(int(n), scorer.routers) for n in tokens.lengths])
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


def routing(length: int, routers: Routers) -> NDArray[np.int16]:
    layers, choices, experts = routers.kind
    at = np.arange(length)[:, None, None] + np.arange(layers)[:, None] + np.arange(choices)
    return (at % experts).astype(np.int16)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1].split(","), Path(sys.argv[2])))
