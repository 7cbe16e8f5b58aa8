"""One rank that looks at what its FSDP options do; started as torchrun would.

Argument: a folder with a model `model`. Ends with 0 if each option does what it says.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import torch
from fakes.rank_bench import make_batches
from torch.distributed.tensor import DTensor

from umbra.services.config import TrainerConfig
from umbra.services.modeling.packing import pack
from umbra.services.trainer.batch import make_batch
from umbra.services.trainer.distributed.ranks import join_ranks
from umbra.services.trainer.learner import Learner
from umbra.services.trainer.policy import open_policy


def main(folder: Path) -> int:
    """All options; the exit code."""
    plain = TrainerConfig(device="cpu", rank_timeout_s=120.0)
    expected: list[torch.Tensor] = []
    with join_ranks(plain) as ranks:
        kept = msgspec.structs.replace(
            plain, reduce_gradients="update", reshard_after_forward=False
        )
        for config in (plain, kept):
            model, _, files = open_policy(folder / "model")
            learner = Learner(model, config, 1, ranks, files=files)
            batch = make_batch(make_batches(1)[0], model.config.vocab_size)
            micro = pack(batch.tokens, pack_tokens=64, micro_tokens=64)[0]
            owned = list(learner.model.parameters())
            for last in (False, True):
                logprobs, _ = learner.score(micro, batch.temperature[micro.source])
                weight = learner.model.get_parameter("model.layers.0.mlp.up_proj.weight")
                assert isinstance(weight, DTensor) == (config is plain), (
                    "gathered until the backward pass"
                )
                learner.backward(-logprobs.mean(), last=last)
                summed = [p.grad is not None for p in owned]
                assert all(summed) if last or config is plain else not any(summed)
                weight = learner.model.get_parameter("model.layers.0.mlp.up_proj.weight")
                assert isinstance(weight, DTensor), "let go after it"
            gradients = [p.grad.full_tensor() for p in owned if isinstance(p.grad, DTensor)]
            assert len(gradients) == len(owned)
            if config is plain:
                expected = gradients
            else:
                for one, other in zip(gradients, expected, strict=True):
                    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
