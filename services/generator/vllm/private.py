"""Names of vLLM that are not part of its interface, as read in vLLM 0.32 and 0.33.

Its interface is what users of `AsyncLLM` and engines of `vllm.general_plugins` are given. One more
name is in `plugin.py`, which each of vLLM's processes imports.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import torch
from vllm.outputs import RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM

from umbra.proto.records import Sampling, Support, VersionSpan, pack_float32, pack_int32
from umbra.services.generator.engines.engine import (
    EngineOutput,
    EngineRequest,
    FinishReason,
    joined,
    spans_of,
    support_limit,
)
from umbra.services.generator.vllm.options import routing
from umbra.services.generator.vllm.plugin import ADAPTER
from umbra.services.modeling.experts import Routers
from umbra.services.process.child import describe_exit

_REASONS: dict[str | None, FinishReason] = {"stop": "stop", "length": "length"}


def requests(llm: AsyncLLM) -> dict[str, Any]:
    """Return vLLM's records of the requests under way, by the names that they were given."""
    # A list at once: the loop's thread adds and removes.
    states = list(llm.output_processor.request_states.values())
    return {state.external_req_id: state for state in states}


def tokens_of(record: Any) -> list[int]:
    return record.detokenizer.output_token_ids


def under_way(
    record: Any, request: EngineRequest, routers: Routers | None, head: int
) -> EngineOutput:
    """Return the output of a request so far, as aborted; `head` is as of `support_limit`."""
    tokens = list(tokens_of(record))
    starts = [(int(version), start) for version, start in record.weight_version_starts]
    return EngineOutput(
        request_id=request.request_id,
        token_ids=tokens,
        spans=spans_of(starts, len(tokens)),
        finish_reason="abort",
        routing=routers and routing(routers, *record.routed_experts_chunks),
        **_logprobs(record.logprobs_processor.logprobs, request.sampling, head),
    )


def finished(
    output: RequestOutput, request: EngineRequest, routers: Routers | None, head: int
) -> EngineOutput:
    """Return a whole output of vLLM as one of ours; `head` is as of `support_limit`."""
    made = output.outputs[0]
    spans = [span for span in made.weight_versions or () if span.end > span.start]
    return EngineOutput(
        request_id=request.request_id,
        token_ids=list(made.token_ids),
        spans=[VersionSpan(version=int(s.version), start=s.start, end=s.end) for s in spans],
        finish_reason=_REASONS.get(made.finish_reason, "abort"),
        routing=routers and routing(routers, made.routed_experts),
        **_logprobs(made.logprobs, request.sampling, head),
    )


def _logprobs(logprobs: Any, sampling: Sampling, head: int) -> dict[str, Any]:
    """Return the logprobs of sampled tokens, and the tokens that could have been drawn.

    After each sampled token come the likeliest, of which those with a finite logprob could.
    """
    if logprobs is None:
        return {"logprobs": []}
    sampled = [logprobs.logprobs[at] for at in logprobs.start_indices]
    supports: list[Support] = []
    places = zip(logprobs.start_indices, logprobs.end_indices, strict=True)
    for start, end in places if support_limit(sampling, head) else ():
        drawn, *likeliest = zip(
            logprobs.token_ids[start:end], logprobs.logprobs[start:end], strict=True
        )
        allowed = dict(candidate for candidate in likeliest if math.isfinite(candidate[1]))
        if sampling.cuts_off:
            allowed.setdefault(*drawn)
        values = pack_float32([*allowed.values()]) if head else None
        sizes = len(allowed).to_bytes(2, "little")
        supports.append(Support(sizes=sizes, ids=pack_int32([*allowed]), logprobs=values))
    return {"logprobs": sampled, "support": joined(supports)}


async def pause(llm: AsyncLLM, *, clear_cache: bool) -> None:
    """Stop decoding between two steps; the public form sleeps for 20 ms more."""
    await llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=clear_cache)


def exits(llm: AsyncLLM) -> str:
    """Return which processes of a dead core ended, and how."""
    manager = llm.engine_core.resources.engine_manager
    codes = manager.finished_procs() if manager is not None else {}
    return ", ".join(f"{name} {describe_exit(code)}" for name, code in codes.items())


def close_sockets(llm: AsyncLLM) -> None:
    """Close the ZeroMQ context that a shutdown leaves open: two objects, each with sockets."""
    with suppress(Exception):
        context = llm.engine_core.ctx
        for socket in list(context._sockets):
            socket.close(linger=0)
        context._shadow_obj.destroy(linger=0)


def cpu_head_sizes(*, latent: bool) -> list[int]:
    """Return the dimensions of heads that attention on CPUs serves."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

    return (CPUMLABackend if latent else CPUAttentionBackend).get_supported_head_sizes()


async def checksums(llm: Any) -> dict[str, dict[str, str]]:
    """Return a checksum of each parameter, as it lies in a worker, by worker and name."""
    sums: dict[str, dict[str, str]] = {}
    for answer in await llm.compute_weight_checksums():
        for key, digest in answer.items():  # "dp0:pp0:pcp0:tp1:model.norm.weight"
            worker, _, name = key.rpartition(":")
            sums.setdefault(worker, {})[name] = digest
    return sums


# -- inside of workers; imported there, since frontends need none of it ----------------------------


def not_reached(model: torch.nn.Module, tied: bool) -> list[str]:
    """Return the parameters of incomplete layers that got no weights.

    vLLM would put their old weights back. So it is where a model's loader copies weights itself,
    past what takes note of them for a later load, and yet says that they were loaded. If `tied`,
    the output layer reads the embedding's weights where they lie.
    """
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

    missing: list[str] = []
    for prefix, layer in model.named_modules():
        info: Any = get_layerwise_info(layer)
        is_alias = tied and isinstance(layer, ParallelLMHead)
        if info.can_load() and not is_alias and not is_deferred_attention_layer(layer):
            loaded = {name for name, _ in info.loaded_weights} | SKIP_TENSORS
            own = (name for name, _ in layer.named_parameters(recurse=False))
            missing += [f"{prefix}.{name}" for name in own if name not in loaded]
    return missing


def forget_broken_off(model: torch.nn.Module) -> None:
    """Forget the elements of an update that broke off; they would count twice."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer in model.modules():
        info: Any = get_layerwise_info(layer)
        if info.can_load():
            info.loaded_weights.clear()
            info.load_numel = 0


def not_loaded(model: torch.nn.Module, loaded: set[str], quantized: bool) -> list[str]:
    """Return the names of parameters of `model` that its loader should have filled but did not.

    vLLM asks for all of them where nothing is quantized, and else for none. Quantization adds
    scales, which it computes from the weights of the same layer: so we ask for one of each layer
    then. Scales of the KV cache are the attention's own and come from no trainer.
    """
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    named = list(model.named_parameters(remove_duplicate=False))
    # A router's correction belongs to its experts as well, and came under one of its names.
    filled = {id(parameter) for name, parameter in named if name in loaded}
    if quantized:
        for layer in model.modules():
            own = {id(parameter) for parameter in layer.parameters(recurse=False)}
            if is_deferred_attention_layer(layer) or own & filled:
                filled |= own
    return sorted({name for name, parameter in named if id(parameter) not in filled})


def pack_experts_again(model: torch.nn.Module) -> None:
    """Have experts packed for the kernel at every load, before they are copied to their places.

    vLLM 0.32 packs experts on CPUs at the first load only
    (`UnquantizedFusedMoEMethod._setup_kernel`); later ones would be copied unpacked into what the
    kernel reads as packed. To be called after the first load.
    """
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )

    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if (
            isinstance(method, UnquantizedFusedMoEMethod)
            and method.unquantized_backend is UnquantizedMoeBackend.CPU
            and method.moe_kernel is not None
        ):
            # In place of vLLM's whole step, so that a version that packs does not do it twice.
            experts = method.moe_kernel.fused_experts
            method.process_weights_after_loading = experts.process_weights_after_loading


def adapter_places(model: Any) -> set[str]:
    """Return the names in checkpoints of the layers that have an adapter in vLLM."""
    packed, layers = model.lora_manager.packed_modules, model.lora_manager.modules
    return {name for layer in layers for name in packed.get(layer, [layer])}


def load_adapter(model: Any, tensors: dict[str, torch.Tensor], rank: int, alpha: float) -> None:
    """Put these factors, by peft's names, in the place of those before."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    # Scales are any number, whatever the annotation says.
    config = PEFTHelper(r=rank, lora_alpha=alpha, target_modules=[])  # pyright: ignore[reportArgumentType]
    manager = model.lora_manager
    adapter = LoRAModel.from_lora_tensors(
        ADAPTER, tensors, config, device="cpu", dtype=manager.lora_config.lora_dtype
    )
    manager.remove_adapter(ADAPTER)
    manager.add_adapter(adapter)
    manager.activate_adapter(ADAPTER)
