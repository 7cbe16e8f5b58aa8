"""vLLM against Transformers: logprobs of one model from disk, and after its weights were published.

Three times vLLM samples the same prompts and plain Transformers computes the logprobs of what was
sampled: with the weights that vLLM read from disk, after a publish of the very same weights, and
after one of others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from umbra.proto.records import Manifest, Sampling
from umbra.services.config import GeneratorConfig
from umbra.services.generator.engines.engine import Engine, EngineOutput, EngineRequest
from umbra.services.generator.vllm.options import require_vllm, set_environment
from umbra.services.modeling.models import outline_model
from umbra.services.modeling.reference import Reference
from umbra.services.modeling.weights import tensors_in
from umbra.services.weights.manifest import build_manifest

_REQUESTS = 8
_PROMPT_TOKENS = 96  # of the longest prompt
_TOKENS = 24  # sampled by each request
_CHANGE = 0.3  # standard deviation of what is added to each tensor, in its own
_BUCKET_BYTES = 1 << 20
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}

Publish = Callable[[Any], Iterable[tuple[str, torch.Tensor]]]


@dataclass(frozen=True, slots=True)
class Differences:
    """The largest difference between logprobs of vLLM and Transformers, in nats.

    `moved` is by how much the change of weights itself moved the logprobs of the same tokens: a
    publish that did nothing would show as `changed` of about that size.
    """

    from_disk: float
    same: float
    changed: float
    moved: float

    @property
    def worst(self) -> float:
        return max(self.from_disk, self.same, self.changed)


def vllm_differences(
    directory: Path,
    publish: Publish,
    *,
    checked: Collection[str] = (),
    dtype: str = "float32",
    threads: int = 1,
    **engine_args: Any,
) -> Differences:
    """Compare vLLM with Transformers on the model in `directory`; starts and ends a vLLM.

    First the same weights go to vLLM as a receiver stages them, then changed ones.

    Args:
        directory: of the model, with its tokenizer.
        publish: name and tensor of what the trainer publishes of a model.
        checked: see `check_architecture`.
        dtype: what vLLM computes in, "float32" or "bfloat16"; Transformers computes in float32.
        threads: of vLLM and of this process.
        engine_args: of vLLM, as in `generator.engine_args`.

    Raises:
        UsageError: vLLM refuses the model, or is not installed.
        EngineError: vLLM could not load what was published.
    """
    require_vllm()
    config = GeneratorConfig(
        engine="vllm",
        threads=threads,
        slots=_REQUESTS,
        max_context=_PROMPT_TOKENS + _TOKENS,
        engine_args=engine_args,
    )
    set_environment(config)
    from umbra.services.generator.vllm.engine import VllmEngine  # brings vLLM

    outline = outline_model(directory, checked=checked)
    torch.set_num_threads(threads)
    computed: torch.dtype = getattr(torch, dtype)
    reference = Reference(directory)
    model = reference.model
    engine = VllmEngine(directory, outline, config, dtype=dtype, stop_ids=(), version=0)
    try:
        prompts = _prompts(model.config.get_text_config().vocab_size)
        from_disk = _difference(engine, reference, prompts)
        engine.load(*_version(model, publish, computed), 1, "keep")
        same = _difference(engine, reference, prompts)
        outputs = _sample(engine, prompts)
        before = _logprobs(reference, prompts, outputs)
        change(model, computed)
        moved = float((_logprobs(reference, prompts, outputs) - before).abs().mean())
        engine.load(*_version(model, publish, computed), 2, "keep")
        changed = _difference(engine, reference, prompts)
    finally:
        engine.close()
    return Differences(from_disk=from_disk, same=same, changed=changed, moved=moved)


def _prompts(vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    lengths = [1 + index * (_PROMPT_TOKENS - 1) // (_REQUESTS - 1) for index in range(_REQUESTS)]
    return [torch.randint(vocabulary, (n,), generator=generator).tolist() for n in lengths]


def _difference(engine: Engine, reference: Reference, prompts: list[list[int]]) -> float:
    outputs = _sample(engine, prompts)
    theirs = torch.tensor([logprob for output in outputs for logprob in output.logprobs])
    return float((theirs - _logprobs(reference, prompts, outputs)).abs().max())


def _sample(engine: Engine, prompts: list[list[int]]) -> list[EngineOutput]:
    sampling = Sampling(max_tokens=_TOKENS)
    engine.submit(
        EngineRequest(str(index), prompt, sampling, _TOKENS) for index, prompt in enumerate(prompts)
    )
    outputs: list[EngineOutput] = []
    while engine.busy:
        outputs += engine.poll(1.0)
    return sorted(outputs, key=lambda output: int(output.request_id))


@torch.inference_mode()
def _logprobs(
    reference: Reference, prompts: list[list[int]], outputs: list[EngineOutput]
) -> torch.Tensor:
    return torch.cat(
        [
            reference.logprobs([*prompt, *output.token_ids], len(prompt)).logprobs
            for prompt, output in zip(prompts, outputs, strict=True)
        ]
    )


@torch.no_grad()
def change(model: Any, dtype: torch.dtype) -> None:
    """Move every weight of `model` to other numbers of `dtype`, the same each time."""
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        spread = weight.std() if weight.numel() > 1 else weight.abs().mean()
        noise = torch.randn(weight.shape, generator=generator)
        weight.add_(noise * _CHANGE * spread).copy_(weight.to(dtype))


def _version(model: Any, publish: Publish, dtype: torch.dtype) -> tuple[Manifest, memoryview]:
    """Return a version as in a slot of the trainer: weights in `dtype`, buffers as they are."""
    weights = {name for name, _ in model.named_parameters()}
    given = {
        name: tensor.detach().to(dtype if name in weights else tensor.dtype)
        for name, tensor in publish(model)
    }
    manifest = build_manifest(
        ((name, _NAMES[tensor.dtype], tensor.shape) for name, tensor in given.items()),
        _BUCKET_BYTES,
    )
    memory = memoryview(bytearray(manifest.total_bytes))
    for name, place in tensors_in(manifest, memory):
        place.copy_(given[name])
    return manifest, memory
