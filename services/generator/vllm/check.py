"""vLLM against Transformers: logprobs of one model from disk, and after its weights were published.

Plain Transformers computes logprobs of what vLLM samples. Checksums of parameters in each worker
show whether all have a version: equal weights have equal ones, whichever way they came.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from umbra.proto.records import Manifest, Sampling
from umbra.services.config import GeneratorConfig, RunConfig, WeightHubConfig
from umbra.services.generator.engines.engine import Engine, EngineOutput, EngineRequest
from umbra.services.generator.vllm.options import require_vllm, set_environment
from umbra.services.modeling.models import outline_model
from umbra.services.modeling.reference import Reference

_REQUESTS = 8
_PROMPT_TOKENS = 96  # of the longest prompt
_TOKENS = 24  # sampled by each request
_CHANGE = 0.3  # standard deviation of the noise added to each tensor, in its own
_GPU_SHARE = 0.3  # of its memory, for vLLM

Publish = Callable[[Any, str], tuple[object, Manifest, memoryview]]
_Sums = Mapping[str, Mapping[str, str]]  # of parameters, by worker and name


@dataclass(frozen=True, slots=True)
class Differences:
    """Differences between the logprobs of vLLM and of Transformers, in nats.

    In float32 it is the largest difference, in bfloat16 the mean. `moved` is by how much the change
    of weights itself moved the logprobs of the same tokens: a publish that did nothing would show
    as `changed` of about that size. `stale` are parameters, by worker of vLLM, that a publish did
    not bring to what it should have.
    """

    from_disk: float
    same: float
    changed: float
    moved: float
    dtype: str = "float32"
    workers: int = 1
    stale: tuple[str, ...] = ()


def vllm_differences(
    directory: Path,
    publish: Publish,
    *,
    checked: Collection[str] = (),
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    threads: int = 1,
    tensor_parallel: int = 1,
    **engine_args: Any,
) -> Differences:
    """Compare vLLM with Transformers on the model in `directory`; starts and ends a vLLM.

    First the same weights go to vLLM as a receiver stages them, then changed ones, then the first.

    Args:
        directory: of the model, with its tokenizer.
        publish: makes a version of a model, in a dtype: its weights, their layout, the bytes.
        checked: see `check_architecture`.
        dtype: what vLLM computes in, by default as it is served: in bfloat16 on GPUs.
            Transformers computes in float32.
        threads: of vLLM and of this process.
        tensor_parallel: workers among which vLLM divides the model.
        engine_args: of vLLM, as in `generator.engine_args`.

    Raises:
        UsageError: vLLM refuses the model, or is not installed.
        EngineError: vLLM could not load the published weights.
    """
    require_vllm()
    config = GeneratorConfig(
        engine="vllm",
        threads=threads,
        slots=_REQUESTS,
        max_context=_PROMPT_TOKENS + _TOKENS,
        tensor_parallel=tensor_parallel,
    )
    set_environment(config)
    from umbra.services.generator.vllm.engine import VllmEngine  # brings vLLM

    if on_gpu():
        engine_args = {"gpu_memory_utilization": _GPU_SHARE} | engine_args
    outline = outline_model(directory, checked=checked)
    torch.set_num_threads(threads)
    reference = Reference(directory)
    model = reference.model
    own = msgspec.structs.replace(config, engine_args=engine_args)
    run = RunConfig(generator=own, weight_hub=WeightHubConfig(dtype=dtype))
    served = run.weight_hub.dtype_on("cuda" if on_gpu() else "cpu")
    computed: torch.dtype = getattr(torch, served)
    engine = VllmEngine(directory, outline, run, stop_ids=(), version=0)
    try:
        draw = torch.Generator().manual_seed(0)
        vocabulary = model.config.get_text_config().vocab_size
        lengths = [1 + n * (_PROMPT_TOKENS - 1) // (_REQUESTS - 1) for n in range(_REQUESTS)]
        prompts = [torch.randint(vocabulary, (n,), generator=draw).tolist() for n in lengths]
        seen = [engine.checksums()]
        from_disk, *_ = _compared(engine, reference, prompts, computed)
        first = publish(model, served)[1:]
        engine.load(*first, 1, "keep")
        seen.append(engine.checksums())
        same, outputs, before = _compared(engine, reference, prompts, computed)
        change(model, computed)
        moved = float((_logprobs(reference, prompts, outputs) - before).abs().mean())
        engine.load(*publish(model, served)[1:], 2, "keep")
        seen.append(engine.checksums())
        changed, *_ = _compared(engine, reference, prompts, computed)
        engine.load(*first, 3, "keep")
        seen.append(engine.checksums())
    finally:
        engine.close()
    return Differences(from_disk, same, changed, moved, served, len(seen[0]), stale(*seen))


def on_gpu() -> bool:
    """True if the installed vLLM computes on GPUs."""
    from umbra.services.generator.vllm.engine import platform  # brings vLLM

    return platform() != "cpu"


def stale(disk: _Sums, same: _Sums, changed: _Sums, again: _Sums) -> tuple[str, ...]:
    """Return parameters that differ from the published ones, as "worker name".

    `disk`, `same` and `again` are of equal weights, of which `changed` has no tensor. Parameters
    that are no weights (scales of vLLM's cache) change in no worker.
    """
    moved = {(w, n) for w, sums in same.items() for n, d in sums.items() if changed[w].get(n) != d}
    weights = {name for _, name in moved} or {name for sums in same.values() for name in sums}
    names = {
        f"{worker} {name}"
        for worker, sums in same.items()
        for name, digest in sums.items()
        if {disk[worker].get(name), again[worker].get(name)} != {digest}
        or (name in weights and (worker, name) not in moved)
    }
    return tuple(sorted(names))


def sample(
    engine: Engine, prompts: Sequence[Sequence[int]], then: Callable[[], list[EngineOutput]] = list
) -> list[EngineOutput]:
    """Return an output of each prompt, in order; call `then` first, which may return some."""
    sampling = Sampling(max_tokens=_TOKENS)
    engine.submit(EngineRequest(str(n), ids, sampling, _TOKENS) for n, ids in enumerate(prompts))
    outputs = then()
    while engine.busy:
        outputs += engine.poll(1.0)
    return sorted(outputs, key=lambda output: int(output.request_id))


def _compared(
    engine: Engine, reference: Reference, prompts: list[list[int]], computed: torch.dtype
) -> tuple[float, list[EngineOutput], torch.Tensor]:
    """Return how far vLLM is off, a sample of each prompt, and the reference's logprobs of them."""
    outputs = sample(engine, prompts)
    sampled = torch.tensor([logprob for output in outputs for logprob in output.logprobs])
    expected = _logprobs(reference, prompts, outputs)
    off = (sampled - expected).abs()
    return float(off.max() if computed == torch.float32 else off.mean()), outputs, expected


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
