"""How often flex_attention is compiled: each time takes ten seconds of a GPU that stands still."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fakes.packed_rows import samples
from torch import Tensor

from umbra.services.modeling import attention_backends
from umbra.services.modeling.attention_backends import attend
from umbra.services.modeling.micro_batch import MicroBatch
from umbra.services.modeling.packing import pack

BATCHES = 30
MOST = 4  # of each kind


def micro_batches() -> list[MicroBatch]:
    drawn, found = random.Random(0), list[MicroBatch]()
    while len(found) < BATCHES:
        sizes = [
            (drawn.randint(5, 150), drawn.randint(3, 300), drawn.randint(1, 3))
            for _ in range(drawn.randint(1, 5))
        ]
        found += pack(samples(sizes), pack_tokens=600, micro_tokens=1200, share_prompts=True)
    return found[:BATCHES]


def layer_inputs(micro: MicroBatch, grad: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as a layer of a model gives them: [R, L, H, D] in memory."""
    rows, width = micro.input_ids.shape
    drawn = torch.Generator().manual_seed(0)

    def made(heads: int) -> Tensor:
        laid = torch.randn(rows, width, heads, 16, generator=drawn)
        return laid.transpose(1, 2).requires_grad_(grad)

    return made(2), made(1), made(1)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Dynamo decides about recompilations; its graphs are run as they are, on the CPU."""
    compiled: Counter[str] = Counter()
    real = torch.compile

    def counting(function: Any, **how: Any) -> Any:
        def backend(graph: Any, _: Any) -> Any:
            compiled[function.__name__] += 1
            return graph.forward

        return real(function, backend=backend, **how)

    monkeypatch.setattr(torch, "compile", counting)
    monkeypatch.setattr(attention_backends, "_flex_on", lambda _: attention_backends._flex_kernel)
    # It refuses gradients on CPUs.
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    attention_backends._compiled.cache_clear()
    yield compiled
    attention_backends._compiled.cache_clear()
    torch.compiler.reset()


def test_past_the_limit_it_fails_and_never_computes_all_scores(compiled: Counter[str]) -> None:
    few = torch._dynamo.config.patch(recompile_limit=1)
    with few, torch.no_grad(), pytest.raises(Exception, match="fullgraph=True") as raised:
        for micro in micro_batches():
            attend(*layer_inputs(micro, False), micro.mask.blocks())
    assert type(raised.value).__name__ == "FailOnRecompileLimitHit"
    assert set(compiled.values()) == {1}


@pytest.mark.slow
def test_random_micro_batches_compile_each_kind_a_few_times(compiled: Counter[str]) -> None:
    for number, micro in enumerate(micro_batches()):
        for grad, window in ((False, None), (True, None), (True, 100)):
            mask = micro.mask.within(window)
            with torch.set_grad_enabled(grad):
                found = attend(*layer_inputs(micro, grad), mask.blocks())
            if number < 4:
                dense = attend(*layer_inputs(micro, False), mask.allowed().unsqueeze(1))
                torch.testing.assert_close(found.detach(), dense)
    assert max(compiled.values()) <= MOST, compiled
    # Of three kinds; of each, the one of as many rows as blocks.
    assert len(compiled) <= 6
