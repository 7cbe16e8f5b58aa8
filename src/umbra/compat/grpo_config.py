"""Fields of TRL's `GRPOConfig` as sections of a run file.

Fields that mean the same here are read, with TRL's defaults. Fields about logging, loading, saving
and memory are ignored with a warning. Any other that is not at its default is refused.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from umbra.proto.errors import UsageError

DEFAULTS: dict[str, Any] = {
    "output_dir": None,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": None,
    "generation_batch_size": None,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "learning_rate": 1e-6,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "optim": "adamw_torch_fused",
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "max_grad_norm": 1.0,
    "bf16": None,
    "fp16": False,
    "use_cpu": False,
    "seed": 42,
    "shuffle_dataset": True,
    "run_name": None,
    "eval_strategy": "no",
    "eval_steps": None,
    "num_generations": 8,
    "max_completion_length": 512,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": None,
    "use_vllm": False,
    "beta": 0.0,
    "num_iterations": 1,
    "epsilon": 0.2,
    "epsilon_high": None,
    "delta": None,
    "importance_sampling_level": "token",
    "scale_rewards": "group",
    "loss_type": "dapo",
    "mask_truncated_completions": False,
    "off_policy_mask_threshold": None,
    "use_bias_correction_kl": True,
    "entropy_coef": 0.0,
    "report_to": "none",
    "reward_weights": None,
    "chat_template_kwargs": None,
    "model_init_kwargs": None,
    "trust_remote_code": False,
    "max_tool_calling_iterations": None,
    "vllm_tensor_parallel_size": 1,
    "vllm_max_model_length": None,
    "push_to_hub": False,
    "hub_model_id": None,
    "hub_token": None,
    "hub_private_repo": None,
}
"""The fields of `GRPOConfig` that mean something here, with TRL's defaults (a test compares)."""

# They say how TRL computes, logs, loads and saves; Umbra has its own way, and results are the same.
OURS_TO_DECIDE = frozenset(
    {
        *("gradient_checkpointing", "gradient_checkpointing_kwargs", "tf32", "torch_compile"),
        *("torch_compile_backend", "torch_compile_mode", "use_liger_kernel", "liger_kernel_config"),
        *("use_cache", "torch_empty_cache_steps", "logging_strategy", "logging_steps"),
        *("logging_first_step", "log_on_each_node", "logging_nan_inf_filter", "log_level"),
        *("log_level_replica", "disable_tqdm", "project", "include_for_metrics"),
        *("include_num_input_tokens_seen", "per_device_eval_batch_size", "bf16_full_eval"),
        *("fp16_full_eval", "eval_accumulation_steps", "save_strategy", "save_steps"),
        *("save_only_model", "save_on_each_node", "save_total_limit", "enable_jit_checkpoint"),
        *("dataloader_drop_last", "dataloader_num_workers", "dataloader_pin_memory"),
        *("dataloader_persistent_workers", "dataloader_prefetch_factor", "dataloader_in_order"),
        *("dataloader_multiprocessing_context", "remove_unused_columns", "skip_memory_metrics"),
        *("pad_to_multiple_of", "ds3_gather_for_generation", "cache_implementation"),
        *("log_completions", "log_multimodal", "num_completions_to_print", "log_unique_prompts"),
        *("use_transformers_continuous_batching", "transformers_continuous_batching_config"),
        *("use_transformers_paged", "cast_lm_head_to_fp32", "average_tokens_across_devices"),
        *("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers"),
        *("ddp_static_graph", "ddp_backend", "ddp_timeout", "do_train", "do_eval", "local_rank"),
        *("vllm_mode", "vllm_model_impl", "vllm_enable_sleep_mode", "vllm_server_base_url"),
        *("vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port"),
        *("vllm_gpu_memory_utilization", "vllm_importance_sampling_correction"),
        *("vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max"),
        *("vllm_importance_sampling_clip_min", "vllm_importance_sampling_cap"),
        *("hub_strategy", "hub_always_push", "hub_revision", "disable_dropout"),
    }
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
    "ref_model_mixup_alpha": _ONE_REFERENCE,
    "ref_model_sync_steps": _ONE_REFERENCE,
    "use_adaptive_entropy": "use entropy_coef, which is constant",
    "multi_objective_aggregation": "use 'sum_then_normalize'",
    "load_best_model_at_end": _BEST,
    "metric_for_best_model": _BEST,
    "resume_from_checkpoint": "resume the run's folder with `umbra up output_dir/ID`",
    "deepspeed": _RANKS,
    "fsdp": _RANKS,
    "fsdp_config": _RANKS,
    "parallelism_config": _RANKS,
    "num_generations_eval": "set umbra={'eval': {'samples_per_prompt': N}}",
    "full_determinism": "set umbra={'trainer': {'deterministic': True}}",
    "router_aux_loss_coef": "set umbra={'trainer': {'router_aux_loss_coef': X}}",
    "optim_args": "set umbra={'trainer': {'optimizer': 'adamw8bit'}}, or leave it out",
}
"""What replaces fields of `GRPOConfig` that are refused."""

TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow", "swanlab")
# How a model is loaded, which has no influence on results.
_LOADING = (
    "attn_implementation",
    "device_map",
    "use_cache",
    "low_cpu_mem_usage",
    "use_safetensors",
)
_DTYPES = {"None": "float32", "float32": "float32", "bfloat16": "bf16"}

_AGGREGATIONS = {
    "grpo": "sequence_mean",
    "dapo": "token_mean",
    "dr_grpo": "constant",
    "cispo": "token_mean",
}
_SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
_EVALUATES = {"no": False, "steps": True}
_SCALES = {"group": "grpo", True: "grpo", "none": "dr_grpo", False: "dr_grpo"}


def values_of(args: Any) -> dict[str, Any]:
    """The fields that mean something, from a `GRPOConfig`.

    Raises:
        UsageError: a field that is not supported is not at its default; names what replaces it.
    """
    if args is None:
        return dict(DEFAULTS)
    # It derives some fields from the machine.
    machine = {name: getattr(args, name) for name in ("output_dir", "use_cpu", "bf16", "fp16")}
    usual, ignored = type(args)(**machine), list[str]()
    for field in fields(args):
        name, value = field.name, getattr(args, field.name, None)
        if name in DEFAULTS or not field.init or value == getattr(usual, name, None):
            continue
        if name not in OURS_TO_DECIDE:
            remedy = INSTEAD.get(name, "leave it out; docs/data.md lists the supported fields")
            raise UsageError(f"GRPOConfig.{name} = {value!r} is not supported: {remedy}")
        if name not in ("do_train", "do_eval"):  # which follow from others
            ignored.append(name)
    if ignored:
        warn(f"GRPOConfig: {', '.join(ignored)}: ignored, since Umbra decides these itself")
    return {name: getattr(args, name, default) for name, default in DEFAULTS.items()}


def warn(text: str) -> None:
    warnings.warn(text, stacklevel=4)  # the line that makes a GRPOTrainer


def sections_of(values: Mapping[str, Any], *, rows: int) -> dict[str, dict[str, Any]]:
    """The sections of a run file that say the same as fields of `GRPOConfig`.

    Args:
        values: by the names of `DEFAULTS`.
        rows: of the data set.

    Raises:
        UsageError: a value has no counterpart here.
    """
    per_update = values["per_device_train_batch_size"] * values["gradient_accumulation_steps"]
    per_batch = values["generation_batch_size"] or values["per_device_train_batch_size"] * (
        values["steps_per_generation"] or values["gradient_accumulation_steps"]
    )
    group = values["num_generations"]
    if per_batch % group or per_batch % per_update:
        raise UsageError(
            f"GRPOConfig: {per_batch} completions of a generation batch are not whole groups of "
            f"num_generations = {group}, or no multiple of the {per_update} of an optimizer step"
        )
    minibatches, groups = per_batch // per_update, per_batch // group
    updates = minibatches * values["num_iterations"]
    if values["max_steps"] > 0:
        steps = math.ceil(values["max_steps"] / updates)
    else:
        steps = math.ceil(values["num_train_epochs"] * rows / groups)
    sections: dict[str, dict[str, Any]] = {
        "run": {"steps": steps, "seed": values["seed"]},
        "data": {"shuffle": values["shuffle_dataset"]},
        "sampling": {
            "max_tokens": values["max_completion_length"],
            "temperature": values["temperature"],
            "top_p": values["top_p"],
            "top_k": values["top_k"],
            "min_p": values["min_p"] or 0.0,
        },
        "buffer": {"group_size": group, "batch_groups": groups, "run_ahead": 1, "max_staleness": 2},
        "generator": {"engine": "vllm" if values["use_vllm"] else "torch"},
        "trainer": _trainer(values)
        | {
            "minibatches": minibatches,
            "epochs": values["num_iterations"],
            "warmup_steps": values["warmup_steps"],
        },
        "metrics": {"also": _trackers(values["report_to"])},
        "model": {"chat_template_kwargs": dict(values["chat_template_kwargs"] or {})},
    }
    if 0 < values["warmup_steps"] < 1:  # a share of all updates
        sections["trainer"]["warmup_steps"] = math.ceil(values["warmup_steps"] * steps * updates)
    if values["vllm_max_model_length"]:
        sections["generator"]["max_context"] = values["vllm_max_model_length"]
    if values["vllm_tensor_parallel_size"] > 1:
        sections["generator"]["tensor_parallel"] = values["vllm_tensor_parallel_size"]
    if values["max_tool_calling_iterations"]:
        sections["environment"] = {
            "options": {"tool_rounds": values["max_tool_calling_iterations"]}
        }
    loaded = dict(values["model_init_kwargs"] or {})
    sections["trainer"] |= _dtype(loaded)
    if loaded.pop("trust_remote_code", values["trust_remote_code"]):
        sections["model"]["trust_remote_code"] = True
    if revision := loaded.pop("revision", None):
        sections["model"]["revision"] = revision
    if ignored := [name for name in _LOADING if loaded.pop(name, None) is not None]:
        warn(f"GRPOConfig.model_init_kwargs: {', '.join(ignored)}: ignored, Umbra loads the model")
    if loaded:
        raise UsageError(
            f"GRPOConfig.model_init_kwargs: {', '.join(loaded)} not supported: leave it out, only "
            "dtype, revision and trust_remote_code are read"
        )
    if values["output_dir"]:
        sections["run"]["dir"] = str(values["output_dir"])
    if values["run_name"]:
        sections["run"]["name"] = str(values["run_name"])
    if values["beta"]:
        sections["buffer"]["stages"] = ["ref_logp"]
    if values["use_cpu"]:
        sections["generator"]["device"] = sections["trainer"]["device"] = "cpu"
    if _translated("eval_strategy", _text(values["eval_strategy"]), _EVALUATES):
        if not values["eval_steps"]:
            raise UsageError("GRPOConfig.eval_strategy = 'steps' needs eval_steps here")
        sections["eval"] = {"every": math.ceil(values["eval_steps"] / updates)}
    return sections


def _trainer(values: Mapping[str, Any]) -> dict[str, Any]:
    loss = values["loss_type"]
    optimizer = _text(values["optim"])
    if optimizer not in ("adamw_torch", "adamw_torch_fused"):
        raise UsageError(f"GRPOConfig.optim = {optimizer!r}: AdamW is what is the same here")
    epsilon, high = values["epsilon"], values["epsilon_high"]
    by_sequence = values["importance_sampling_level"] == "sequence"
    if by_sequence and loss == "cispo":
        raise UsageError("GRPOConfig: loss_type cispo needs importance_sampling_level = 'token'")
    objective = "gspo" if by_sequence else "cispo" if loss == "cispo" else "grpo"
    keys: dict[str, Any] = {
        "learning_rate": values["learning_rate"],
        "schedule": _translated(
            "lr_scheduler_type", _text(values["lr_scheduler_type"]), _SCHEDULES
        ),
        "weight_decay": values["weight_decay"],
        "betas": (values["adam_beta1"], values["adam_beta2"]),
        "max_grad_norm": values["max_grad_norm"],
        "objective": objective,
        "aggregation": _translated("loss_type", loss, _AGGREGATIONS),
        "advantage": _translated("scale_rewards", values["scale_rewards"], _SCALES),
        "clip_low": epsilon,
        "clip_high": epsilon if high is None else high,
        "kl_coef": values["beta"],
        "entropy_coef": values["entropy_coef"],
        "overlong_filter": values["mask_truncated_completions"],
    }
    if loss == "cispo":
        # TRL's bound is the weight itself, ours what it may be above 1; below there is none.
        keys |= {"clip_low": 1.0, "clip_high": (epsilon if high is None else high) - 1.0}
    if values["beta"]:
        keys["kl_unbiased"] = values["use_bias_correction_kl"]
    if values["delta"] is not None:
        keys["dual_clip"] = values["delta"]
    if values["off_policy_mask_threshold"] is not None:
        keys |= {"mask": "opsm", "mask_threshold": values["off_policy_mask_threshold"]}
    if values["fp16"]:
        raise UsageError("GRPOConfig.fp16 is not supported; use bf16")
    if values["bf16"] is False:  # True is what GRPOConfig has unless told otherwise: auto
        keys["precision"] = "no"
    return keys


def _trackers(given: str | list[str] | None) -> list[str]:
    """Return `metrics.also` for a `report_to`; a tracker that Umbra has not is warned of."""
    names = [given] if isinstance(given, str) else list(given or ())
    names = [name for name in names if name not in ("none", "all")]
    if others := [name for name in names if name not in TRACKERS]:
        warn(f"GRPOConfig.report_to: {', '.join(others)}: ignored; use {', '.join(TRACKERS)}")
    return [name for name in names if name in TRACKERS]


def _dtype(loaded: dict[str, Any]) -> dict[str, Any]:
    """Remove the dtype from keywords of `from_pretrained`; return the trainer's keys for it."""
    given = loaded.pop("torch_dtype", None)
    name = str(loaded.pop("dtype", given)).removeprefix("torch.")
    if name not in _DTYPES:
        raise UsageError(
            f"GRPOConfig.model_init_kwargs: dtype {name} is not supported: use 'float32' (TRL's "
            "default) or 'bfloat16'"
        )
    bf16 = _DTYPES[name] == "bf16"
    return {"weights": "bf16", "precision": "bf16"} if bf16 else {}


def adapter_keys(peft_config: Any, kind: Callable[[], str]) -> dict[str, Any]:
    """Return the trainer's keys for a `peft.LoraConfig` and a model of `kind()`, its model_type.

    Raises:
        UsageError: it asks for an adapter that is not plain LoRA.
    """
    if _text(peft_config.peft_type) != "LORA":
        raise UsageError(
            f"GRPOTrainer: peft_config is a {type(peft_config).__name__}: use LoraConfig"
        )
    usual = type(peft_config)()
    scale, targets = float(peft_config.lora_alpha), peft_config.target_modules
    if peft_config.use_rslora:
        scale *= math.sqrt(peft_config.r)
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
    read = {"r", "lora_alpha", "target_modules", "use_rslora", "lora_dropout", "task_type"}
    unread = {"base_model_name_or_path", "revision", "inference_mode", "auto_mapping"}
    for field in fields(peft_config):
        value = getattr(peft_config, field.name)
        if field.name not in read | unread and value != getattr(usual, field.name):
            raise UsageError(
                f"GRPOTrainer: peft_config.{field.name} = {value!r} is not supported: leave it "
                "out; r, lora_alpha, target_modules and use_rslora are read"
            )
    layers = [] if isinstance(targets, str) else sorted(targets)
    return {"lora_rank": peft_config.r, "lora_alpha": scale, "lora_targets": layers}


def _translated(name: str, value: Any, table: Mapping[Any, Any]) -> Any:
    """What field `name` with `value` is here.

    Raises:
        UsageError: `table` has no such value.
    """
    if value not in table:
        raise UsageError(
            f"GRPOConfig.{name} = {value!r} has no counterpart here; use "
            f"{', '.join(repr(one) for one in table)}"
        )
    return table[value]


def _text(value: Any) -> str:
    return str(getattr(value, "value", value))
