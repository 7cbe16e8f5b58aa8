"""Fields of TRL's `GRPOConfig` as sections of a run file.

Fields that mean the same here are read, with TRL's defaults. Fields about logging, loading, saving
and memory are ignored with a warning. Any other that is not at its default is refused.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from umbra.proto.errors import UsageError
from umbra.services.config.training import TRACKERS

# Fields that mean the same as a key; None leaves the key at its default.
_SAME = {
    "output_dir": "run.dir",
    "run_name": "run.name",
    "seed": "run.seed",
    "shuffle_dataset": "data.shuffle",
    "max_completion_length": "sampling.max_tokens",
    **{name: f"sampling.{name}" for name in ("temperature", "top_p", "top_k", "min_p")},
    "num_generations": "buffer.group_size",
    "vllm_tensor_parallel_size": "generator.tensor_parallel",
    "vllm_max_model_length": "generator.max_context",
    **{n: f"trainer.{n}" for n in ("learning_rate", "weight_decay", "max_grad_norm")},
    "lr_scheduler_type": "trainer.schedule",
    "num_iterations": "trainer.epochs",
    "loss_type": "trainer.aggregation",
    "scale_rewards": "trainer.advantage",
    "beta": "trainer.kl_coef",
    "entropy_coef": "trainer.entropy_coef",
    "delta": "trainer.dual_clip",
    "mask_truncated_completions": "trainer.overlong_filter",
    "off_policy_mask_threshold": "trainer.mask_threshold",
}
_SCHEDULES = {name: name for name in ("linear", "cosine", "constant")}
_BY_TOKEN = dict.fromkeys(("dapo", "cispo"), "token_mean")
# Values of such fields that have another name here; the others have no counterpart.
_VALUES: dict[str, Mapping[Any, Any]] = {
    "lr_scheduler_type": _SCHEDULES | {"constant_with_warmup": "constant"},
    "loss_type": {"grpo": "sequence_mean", **_BY_TOKEN, "dr_grpo": "constant"},
    "scale_rewards": {"group": "grpo", True: "grpo", "none": "dr_grpo", False: "dr_grpo"},
    "optim": dict.fromkeys(("adamw_torch", "adamw_torch_fused")),
    "eval_strategy": {"no": False, "steps": True},
}
READ = {*_SAME, *_VALUES} | set(
    """
    per_device_train_batch_size gradient_accumulation_steps steps_per_generation
    generation_batch_size num_train_epochs max_steps warmup_steps adam_beta1 adam_beta2 bf16 fp16
    use_cpu eval_steps use_vllm epsilon epsilon_high importance_sampling_level
    use_bias_correction_kl report_to reward_weights chat_template_kwargs model_init_kwargs
    trust_remote_code max_tool_calling_iterations push_to_hub hub_model_id hub_token
    hub_private_repo do_train do_eval
    """.split()
)
"""Fields of `GRPOConfig` that mean something here."""

# Beginnings of fields about TRL's way to compute, log, load and save; results are the same.
IGNORED = tuple(
    """
    auto_find average_tokens bf16_full cache_impl cast_lm_head dataloader_ ddp_ disable_ ds3_
    enable_jit eval_accum fp16_full gradient_check hub_ include_ liger_ local_rank log_ logging_
    num_completions_to_print pad_to_ per_device_eval project remove_unused save_ skip_memory tf32
    torch_ transformers_continuous use_cache use_liger use_transformers vllm_
    """.split()
)

_RANKS = "set umbra={'trainer': {'ranks': N}}"
_ONE_REFERENCE = "leave it out: the reference is the first policy"
_BEST = "set umbra={'checkpoint': {'best_metric': 'reward/mean'}}"
_DRAWS = "temperature, top_p, top_k, min_p and umbra={'sampling': {'stop': [...]}} are supported"
INSTEAD = {
    "repetition_penalty": _DRAWS,
    "generation_kwargs": _DRAWS,
    "vllm_structured_outputs_regex": _DRAWS,
    "sync_ref_model": _ONE_REFERENCE,
    "use_adaptive_entropy": "use entropy_coef, which is constant",
    "multi_objective_aggregation": "use 'sum_then_normalize'",
    "load_best_model_at_end": _BEST,
    "metric_for_best_model": _BEST,
    "resume_from_checkpoint": "resume the run's folder with `umbra up output_dir/ID`",
    "deepspeed": _RANKS,
    "fsdp": _RANKS,
    "num_generations_eval": "set umbra={'eval': {'samples_per_prompt': N}}",
}
"""Replacements of fields of `GRPOConfig` that are refused."""

# How a model is loaded, which has no influence on results.
_LOADING = ("attn_implementation", "device_map", "use_cache", "low_cpu_mem_usage")


def check(args: Any) -> None:
    """Warn of the fields of a `GRPOConfig` that are ignored.

    Raises:
        UsageError: a field that is not supported is not at its default; names what replaces it.
    """
    # It derives some fields from the machine.
    machine = {name: getattr(args, name) for name in ("output_dir", "use_cpu", "bf16", "fp16")}
    defaults = type(args)(**machine)
    changed = [
        field.name
        for field in fields(args)
        if field.init and getattr(args, field.name, None) != getattr(defaults, field.name, None)
    ]
    unread = [name for name in changed if name not in READ]
    for name in unread:
        if name in INSTEAD or not name.startswith(IGNORED):
            remedy = INSTEAD.get(name, "leave it out; docs/start.md lists the supported fields")
            raise UsageError(
                f"GRPOConfig.{name} = {getattr(args, name)!r}: not supported: {remedy}"
            )
    if unread:
        warn(f"GRPOConfig: {', '.join(unread)}: ignored, since Umbra decides these itself")


def warn(text: str) -> None:
    warnings.warn(text, stacklevel=4)  # the line that makes a GRPOTrainer


def sections_of(args: Any, *, rows: int) -> dict[str, dict[str, Any]]:
    """Return the sections of a run file that say the same as a `GRPOConfig`, for so many `rows`.

    Raises UsageError for a value that has no counterpart here.
    """
    per_update = args.per_device_train_batch_size * args.gradient_accumulation_steps
    per_batch = args.generation_batch_size
    group = args.num_generations
    if per_batch % group or per_batch % per_update:
        raise UsageError(
            f"GRPOConfig: {per_batch} completions of a generation batch are not whole groups of "
            f"num_generations = {group}, or no multiple of the {per_update} of an optimizer step"
        )
    minibatches, groups = per_batch // per_update, per_batch // group
    updates = minibatches * args.num_iterations
    if args.max_steps > 0:
        steps = math.ceil(args.max_steps / updates)
    else:
        steps = math.ceil(args.num_train_epochs * rows / groups)
    sections: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for field, place in _SAME.items():
        if (value := _value(args, field)) is not None:
            section, key = place.split(".")
            sections[section][key] = value
    warmup = 0 if _text(args.lr_scheduler_type) == "constant" else args.warmup_steps
    warmup = math.ceil(warmup * steps if warmup < 1 else warmup / updates)  # TRL counts updates
    sections["run"]["steps"] = steps
    sections["buffer"] |= {"batch_groups": groups, "run_ahead": 1, "max_staleness": 2}
    sections["generator"]["engine"] = "vllm" if args.use_vllm else "torch"
    sections["trainer"] |= {**_trainer(args), "minibatches": minibatches, "warmup_steps": warmup}
    sections["metrics"]["also"] = _trackers(args.report_to)
    if rounds := args.max_tool_calling_iterations:
        sections["environment"]["options"] = {"tool_rounds": rounds}
    loaded = dict(args.model_init_kwargs or {})
    loaded.pop("revision", None)  # in the model's name
    dtype = str(loaded.pop("dtype", loaded.pop("torch_dtype", None))).removeprefix("torch.")
    if dtype == "bfloat16":
        sections["trainer"] |= {"weights": "bf16", "precision": "bf16"}
    elif dtype not in ("None", "float32"):
        raise UsageError(
            f"GRPOConfig.model_init_kwargs: dtype {dtype} is not supported: use 'float32' (TRL's "
            "default) or 'bfloat16'"
        )
    sections["model"] |= {
        "chat_template_kwargs": dict(args.chat_template_kwargs or {}),
        "trust_remote_code": bool(loaded.pop("trust_remote_code", args.trust_remote_code)),
    }
    if ignored := [name for name in _LOADING if loaded.pop(name, None) is not None]:
        warn(f"GRPOConfig.model_init_kwargs: {', '.join(ignored)}: ignored, Umbra loads the model")
    if loaded:
        raise UsageError(
            f"GRPOConfig.model_init_kwargs: {', '.join(loaded)} not supported: leave it out, only "
            "dtype, revision and trust_remote_code are read"
        )
    if args.beta:
        sections["buffer"]["stages"] = ["ref_logp"]
    if args.use_cpu:
        sections["generator"]["device"] = sections["trainer"]["device"] = "cpu"
    if _value(args, "eval_strategy"):
        if not args.eval_steps:
            raise UsageError("GRPOConfig.eval_strategy = 'steps' needs eval_steps here")
        sections["eval"]["every"] = math.ceil(args.eval_steps / updates)
    return dict(sections)


def _trainer(args: Any) -> dict[str, Any]:
    """Return the trainer's keys that several fields, or their absence, decide."""
    _value(args, "optim")
    low = args.epsilon
    high = low if args.epsilon_high is None else args.epsilon_high
    objective = "gspo" if args.importance_sampling_level == "sequence" else "grpo"
    if args.loss_type == "cispo":
        if objective == "gspo":
            raise UsageError(
                "GRPOConfig: loss_type cispo needs importance_sampling_level = 'token'"
            )
        # TRL's bound is the weight itself, ours what it may be above 1; below there is none.
        objective, low, high = "cispo", 1.0, high - 1.0
    betas = args.adam_beta1, args.adam_beta2
    keys = {"objective": objective, "clip_low": low, "clip_high": high, "betas": betas}
    if args.beta:
        keys["kl_unbiased"] = args.use_bias_correction_kl
    if args.off_policy_mask_threshold is not None:
        keys["mask"] = "opsm"
    if args.fp16:
        raise UsageError("GRPOConfig.fp16 is not supported; use bf16")
    if args.bf16 is False:  # True is what GRPOConfig has unless told otherwise: auto
        keys["precision"] = "no"
    return keys


def _trackers(report_to: str | list[str] | None) -> list[str]:
    """Return `metrics.also` for a `report_to`; a tracker that Umbra has not is warned of."""
    names = [report_to] if isinstance(report_to, str) else list(report_to or ())
    if others := [name for name in names if name not in ("none", "all", *TRACKERS)]:
        warn(f"GRPOConfig.report_to: {', '.join(others)}: ignored; use {', '.join(TRACKERS)}")
    return [name for name in names if name in TRACKERS]


def adapter_keys(peft_config: Any, kind: Callable[[], str]) -> dict[str, Any]:
    """Return the trainer's keys for a `peft.LoraConfig` and a model of `kind()`, its model_type.

    Raises UsageError for an adapter that is not plain LoRA.
    """
    if _text(peft_config.peft_type) != "LORA":
        raise UsageError(
            f"GRPOTrainer: peft_config is a {type(peft_config).__name__}: use LoraConfig"
        )
    defaults = type(peft_config)()
    scale = math.sqrt(peft_config.r) if peft_config.use_rslora else 1.0
    targets = peft_config.target_modules
    if targets is None:
        from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as KNOWN

        targets = KNOWN.get(kind(), "all-linear")
    if isinstance(targets, str) and targets != "all-linear":
        raise UsageError(
            f"GRPOTrainer: peft_config.target_modules = {targets!r} is a pattern: list names "
            "of layers, or give 'all-linear'"
        )
    if peft_config.lora_dropout:
        warn("GRPOTrainer: peft_config.lora_dropout: ignored, adapters have none")
    known = {"r", "lora_alpha", "target_modules", "use_rslora", "lora_dropout", "task_type"}
    known |= {"base_model_name_or_path", "revision", "inference_mode", "auto_mapping"}
    for field in fields(peft_config):
        value = getattr(peft_config, field.name)
        if field.name not in known and value != getattr(defaults, field.name):
            raise UsageError(
                f"GRPOTrainer: peft_config.{field.name} = {value!r} is not supported: leave it "
                "out; r, lora_alpha, target_modules and use_rslora are read"
            )
    layers = [] if isinstance(targets, str) else sorted(targets)
    alpha = peft_config.lora_alpha * scale
    return {"lora_rank": peft_config.r, "lora_alpha": alpha, "lora_targets": layers}


def _value(args: Any, field: str) -> Any:
    """Return the value of a field as it is called here; UsageError if it has no counterpart."""
    value = getattr(args, field)
    if field not in _VALUES:
        return value
    value, known = value if isinstance(value, bool) else _text(value), _VALUES[field]
    if value not in known:
        raise UsageError(
            f"GRPOConfig.{field} = {value!r} has no counterpart here; use "
            f"{', '.join(map(repr, known))}"
        )
    return known[value]


def _text(value: Any) -> str:
    return str(getattr(value, "value", value))
