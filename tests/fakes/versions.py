"""Requests, versions and checks for tests of an engine whose weights change under way."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from umbra.proto.errors import PeerLostError
from umbra.proto.records import Sampling
from umbra.services.generator.engine import EngineOutput, EngineRequest, StreamingEngine
from umbra.services.runtime.weights.manifest import build_manifest


def weights(models: dict[int, Any], version: int) -> Iterator[tuple[str, torch.Tensor]]:
    """As a trainer publishes them: tied ones once."""
    yield from ((name, tensor.detach()) for name, tensor in models[version].named_parameters())


def prompt(index: int) -> list[int]:
    return [5 + (index * 7 + k * 3) % 90 for k in range(4 + index % 30)]


def request(index: int, max_tokens: int = 100, **sampling: float) -> EngineRequest:
    how = Sampling(**{"max_tokens": max_tokens, **sampling})  # pyright: ignore[reportArgumentType]
    return EngineRequest(f"s{index}", prompt(index), how, max_tokens)


def finish(engine: StreamingEngine) -> list[EngineOutput]:
    outputs: list[EngineOutput] = []
    while engine.busy:
        outputs += engine.poll(0.05)
    return outputs


def decode(engine: StreamingEngine, tokens: int) -> list[EngineOutput]:
    """Go on until so many more tokens were sampled."""
    until, outputs = engine.decoded_tokens + tokens, []
    while engine.decoded_tokens < until:
        outputs += engine.poll(0.002)
    return outputs


def worst(
    reference: Callable[..., list[float]], models: dict[int, Any], outputs: dict[int, EngineOutput]
) -> float:
    """The largest difference between a logprob and the same computed once more."""
    return max(
        float(
            (torch.tensor(o.logprobs) - torch.tensor(reference(models, prompt(i), o))).abs().max()
        )
        for i, o in outputs.items()
    )


def write(manifest: Any, tensors: dict[str, torch.Tensor], memory: memoryview) -> dict[str, Any]:
    views: dict[str, torch.Tensor] = {}
    for entry in manifest.tensors:
        view = torch.frombuffer(
            memory, dtype=torch.float32, count=entry.nbytes // 4, offset=entry.offset
        ).view(entry.shape)
        view.copy_(tensors[entry.name])
        views[entry.name] = view
    return views


class Hub:
    """Versions in buckets that cut tensors; after `good` of them the source is gone."""

    def __init__(self, models: dict[int, Any]) -> None:
        self._models = models
        tensors = dict(weights(models, 0))
        layout = [(name, "F32", list(t.shape)) for name, t in tensors.items()]
        self.manifest = build_manifest(layout, 4096)
        assert len(self.manifest.buckets) > len(self.manifest.tensors)

    def buckets(self, version: int, good: int = 1_000_000) -> Iterator[tuple[int, memoryview]]:
        memory = memoryview(bytearray(self.manifest.total_bytes))
        write(self.manifest, dict(weights(self._models, version)), memory)
        lane = memoryview(bytearray(4096))
        for index, (start, end) in enumerate(self.manifest.buckets):
            if index == good:
                raise PeerLostError("the hub is gone")
            lane[: end - start] = memory[start:end]
            yield start, lane[: end - start]
