"""Requests, versions and checks for tests of an engine whose weights change under way."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import DynamicCache

from umbra.proto.records import Manifest, Sampling
from umbra.services.generator.engines.engine import Engine, EngineOutput, EngineRequest
from umbra.services.modeling.weights import tensors_in
from umbra.services.weights.manifest import build_manifest
from umbra.services.weights.memory import shared_memory

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def other_weights(model: Any, seed: int) -> Any:
    """A copy of `model` whose weights differ, by `seed`."""
    changed = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return changed


def weights(models: dict[int, Any], version: int) -> Iterator[tuple[str, torch.Tensor]]:
    """As a trainer publishes them: tied ones once."""
    yield from ((name, tensor.detach()) for name, tensor in models[version].named_parameters())


def prompt(index: int) -> list[int]:
    return [5 + (index * 7 + k * 3) % 90 for k in range(4 + index % 30)]


def request(index: int, max_tokens: int = 100, **sampling: float) -> EngineRequest:
    how = Sampling(**{"max_tokens": max_tokens, **sampling})  # pyright: ignore[reportArgumentType]
    return EngineRequest(f"s{index}", prompt(index), how, max_tokens, watched=True)


def versions_of(output: EngineOutput) -> list[int]:
    """Return the versions of its tokens, each of which has one, and a logprob."""
    ends = [0, *(span.end for span in output.spans)]
    assert [span.start for span in output.spans] == ends[:-1]
    assert ends[-1] == len(output.token_ids) == len(output.logprobs)
    return [span.version for span in output.spans]


def finish(engine: Engine) -> list[EngineOutput]:
    outputs: list[EngineOutput] = []
    while engine.busy:
        outputs += engine.poll(0.05)
    return outputs


def go_on(
    engine: Engine, number: int, tokens: int, outputs: Iterable[EngineOutput] = ()
) -> dict[str, list[EngineOutput]]:
    """Finish requests of so many tokens; aborted ones go on from theirs, as rollouts do."""
    found: dict[str, list[EngineOutput]] = {}
    while True:
        for output in outputs:
            parts = found.setdefault(output.request_id, [])
            parts.append(output)
            number -= output.finish_reason != "abort"
            if output.finish_reason == "abort":
                made = [token for part in parts for token in part.token_ids]
                first, rest = request(int(output.request_id[1:]), tokens), tokens - len(made)
                ids = [*first.prompt_ids, *made]
                engine.submit([EngineRequest(output.request_id, ids, first.sampling, rest)])
        if not number:
            return found
        assert engine.busy
        outputs = engine.poll(0.05)


def decode(engine: Engine, tokens: int) -> list[EngineOutput]:
    until, outputs = engine.decoded_tokens + tokens, []
    while engine.decoded_tokens < until and engine.busy:
        outputs += engine.poll(0.002)
    return outputs


def worst(
    reference: Callable[..., list[float]], models: dict[int, Any], outputs: dict[int, EngineOutput]
) -> float:
    """The largest difference between a logprob and the same computed once more."""
    apart = [
        torch.tensor(output.logprobs) - torch.tensor(reference(models, prompt(index), output))
        for index, output in outputs.items()
    ]
    return float(torch.cat(apart).abs().max())


def in_memory(
    tensors: Mapping[str, torch.Tensor], bucket_bytes: int = 4096
) -> tuple[Manifest, memoryview]:
    """A version that is these tensors: its layout and its bytes."""
    layout = [(name, DTYPES[one.dtype], list(one.shape)) for name, one in tensors.items()]
    manifest = build_manifest(layout, bucket_bytes)
    data = shared_memory(manifest.total_bytes)
    for name, place in tensors_in(manifest, data):
        place.copy_(tensors[name])
    return manifest, data


_kept: list[memoryview] = []  # the newest version, as receivers keep it: servers may come back


def load(
    engine: Engine,
    tensors: Iterable[tuple[str, torch.Tensor]],
    version: int,
    kv_policy: Any = "keep",
) -> None:
    """Have `engine` serve these tensors, in one part."""
    manifest, data = in_memory({name: tensor.detach() for name, tensor in tensors})
    _kept[:] = [data]
    engine.load(manifest, data, version, kv_policy)


# -- logprobs once more, by plain Transformers, as an engine with a KV policy must have them -------


def logprobs_of(
    logits: torch.Tensor, tokens: Sequence[int], temperature: float = 1.0
) -> torch.Tensor:
    """Of `tokens` [T], from `logits` [T, V]."""
    index = torch.tensor(tokens)[:, None]
    return torch.log_softmax(logits / temperature, -1).gather(1, index)[:, 0]


@torch.inference_mode()
def logprobs_keeping_cache(
    models: Mapping[int, Any], prompt: Sequence[int], output: EngineOutput, temperature: float = 1.0
) -> list[float]:
    """Of each sampled token, where keys and values of earlier tokens stay what they were.

    A token's keys and values are computed when the next token is sampled, by the weights of then.
    """
    tokens, cache = [*prompt, *output.token_ids], DynamicCache()
    found: list[float] = []
    for span in output.spans:
        until = len(prompt) + span.end - 1  # the last token that was fed under these weights
        logits = models[span.version](
            input_ids=torch.tensor([tokens[cache.get_seq_length() : until]]),
            past_key_values=cache,
            use_cache=True,
        ).logits[0, -(span.end - span.start) :]
        new = output.token_ids[span.start : span.end]
        found += logprobs_of(logits, new, temperature).tolist()
    return found


@torch.inference_mode()
def logprobs_recomputing_cache(
    models: Mapping[int, Any], prompt: Sequence[int], output: EngineOutput, temperature: float = 1.0
) -> list[float]:
    """Of each sampled token, all of the sequence before it read by the token's own weights."""
    tokens = torch.tensor([[*prompt, *output.token_ids]])
    found: list[float] = []
    for span in output.spans:
        first, last = len(prompt) + span.start, len(prompt) + span.end
        logits = models[span.version](input_ids=tokens[:, :last]).logits[0, first - 1 : last - 1]
        new = output.token_ids[span.start : span.end]
        found += logprobs_of(logits, new, temperature).tolist()
    return found
