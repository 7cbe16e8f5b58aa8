"""What has to be known of a run's model to estimate it: its sizes, and what passes over it take."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from umbra.deploy.check.items import Facts, ModelSizes, PassPeaks, RowShape, kind_of
from umbra.deploy.check.needs import fullest
from umbra.deploy.check.trace import Outline, pass_peaks
from umbra.proto.errors import UsageError
from umbra.services.config import RunConfig, TrainerConfig
from umbra.services.modeling.architectures import check_architecture
from umbra.services.modeling.model_directory import directory_of
from umbra.services.modeling.models import loading, read_transformers_config
from umbra.services.modeling.row_sizes import rows_within, scoring_rows
from umbra.services.process.host_memory import host_bytes
from umbra.services.trainer.flops import fitting_tokens

_UNKNOWN = ("expert_parallel", "replicas")  # keys of trainer, above 1
UNKNOWN_GPU = 80 * 10**9  # bytes
PREFILL_TOKENS = 16384  # that the torch engine reads in a pass
_COMPUTE = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NOTHING = PassPeaks(0, 0, 0, 0, 0)


def gather_facts(config: RunConfig, *, gpu: int, host: int | None = None) -> Facts:
    """By the `config.json` in `model.path`; no weights are read.

    Args:
        gpu: bytes of memory of a GPU, by which `auto` sizes rows; 0: devices that are "auto" are
            the CPU, and a GPU that is asked for by name is taken to have 80 GB.
        host: bytes of the host's memory; None: this machine's.

    Raises:
        UsageError: there is no such model, it is refused, or a setting is not known here.
    """
    if not config.model.path:
        raise UsageError("model.path is empty: name a directory with the model's config.json")
    for key in _UNKNOWN:
        if (value := getattr(config.trainer, key)) > 1:
            raise UsageError(
                f"trainer.{key} = {value}: the estimate does not know yet what it takes; "
                f"estimate the run with {key} = 1"
            )
    directory = directory_of(config.model.name, weights=False)
    check_architecture(directory, checked=config.model.checked)
    with loading(directory, "model.path"):
        model = read_transformers_config(directory)
    try:
        return _facts(config, model, gpu=gpu, host=host)
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        first = str(error).partition("\n")[0]
        raise UsageError(
            f"model.path: a step of a {model.model_type} cannot be tried without memory, so it "
            f"cannot be estimated: {first}"
        ) from error


def _facts(config: RunConfig, model: Any, *, gpu: int, host: int | None) -> Facts:
    trainer = config.trainer
    kind = kind_of(trainer.device, gpu=bool(gpu))
    compute = _COMPUTE[trainer.precision_on(kind)]
    # Several ranks gather parameters in what they compute in; one has autocast cast float32 ones.
    stored = compute if trainer.ranks > 1 or trainer.weights == "bf16" else torch.float32
    autocast = compute if compute != torch.float32 else None

    def make(of: Any) -> Outline:
        return Outline(of, trainer, stored, kind)

    text: Any = model.get_text_config()
    sizes = make(model).sizes(kv_numbers(text, latent=config.generator.engine == "vllm"))
    memory = _memory(kind, gpu, host, trainer.ranks)
    fits = fitting_tokens(trainer, model, sizes.parameters // trainer.ranks, memory, kind)
    chosen = rows_within(trainer, fits, kind, config.longest_turn)._asdict()
    config = msgspec.structs.replace(config, trainer=msgspec.structs.replace(trainer, **chosen))
    like = None if str(trainer.recomputes_on(kind)).startswith("every") else sizes
    passes = [
        (pass_peaks(model, like, make, rows=rows, autocast=autocast), rows)
        for rows in fullest(config)
    ]
    training, rows = max(passes, key=lambda found: found[0].peak)
    return Facts(
        sizes=sizes,
        training=training,
        scoring=_scoring(config, model, sizes, gpu=gpu, host=host),
        prefill=_prefill(config, model, sizes, gpu=bool(gpu)),
        rows=rows,
    )


def kv_numbers(config: Any, *, latent: bool) -> int:
    """Numbers that are kept of a token in all layers; windows are not taken into account.

    Args:
        config: Transformers', of the text model.
        latent: multi-head latent attention keeps what it has compressed, as vLLM does.
    """
    layers = config.num_hidden_layers
    heads = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):
        if latent:
            return layers * (config.kv_lora_rank + config.qk_rope_head_dim)
        key = config.qk_nope_head_dim + config.qk_rope_head_dim
        return layers * heads * (key + config.v_head_dim)
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    return layers * 2 * (getattr(config, "num_key_value_heads", None) or heads) * head


def _memory(kind: str, gpu: int, host: int | None, processes: int = 1) -> int:
    if kind == "cuda":
        return gpu or UNKNOWN_GPU
    return (host_bytes() if host is None else host) // processes


def _scoring(
    config: RunConfig, model: Any, sizes: ModelSizes, *, gpu: int, host: int | None
) -> PassPeaks:
    scorer = config.scorer
    if not {"ref_logp", "logp"} & set(config.buffer.stages):
        return _NOTHING
    kind = kind_of(scorer.device, gpu=bool(gpu))
    settings = TrainerConfig(logits_mib=config.trainer.logits_mib)
    each, memory = _served(config, kind).itemsize, _memory(kind, gpu, host)
    longest = config.longest_turn
    keys = scoring_rows(
        config.trainer, model, sizes.parameters, each, memory, kind, longest
    )._asdict()
    trainer = msgspec.structs.replace(config.trainer, **keys)
    rows = fullest(msgspec.structs.replace(config, trainer=trainer))

    def make(of: Any) -> Outline:
        return Outline(of, settings, _served(config, kind), kind)

    peaks = [pass_peaks(model, sizes, make, rows=r, train=False) for r in rows]
    return max(peaks, key=lambda found: found.peak)


def _prefill(config: RunConfig, model: Any, sizes: ModelSizes, *, gpu: bool) -> PassPeaks:
    """Of the torch engine, over as many prompts as long as a context as fit into a pass."""
    generator = config.generator
    if generator.engine != "torch":
        return _NOTHING
    kind = kind_of(generator.device, gpu=gpu)
    count = max(1, min(generator.slots, PREFILL_TOKENS // generator.max_context))
    rows = RowShape(count, generator.max_context, packed=True)

    def make(of: Any) -> Outline:
        return Outline(of, TrainerConfig(), _served(config, kind), kind)

    return pass_peaks(model, sizes, make, rows=rows, train=False, last=True)


def _served(config: RunConfig, kind: str) -> torch.dtype:
    return getattr(torch, config.weight_hub.dtype_on(kind))
