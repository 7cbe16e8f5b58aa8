"""TRL's `GRPOTrainer` over an asynchronous run: change the import, keep the script.

    from umbra.compat.trl import GRPOTrainer

What `GRPOConfig` says is taken where it means the same here, TRL's defaults included; what only
concerns logging, loading and memory is left to Umbra; everything else is refused by name when it is
not as TRL has it by default. Generation may be one batch ahead of training (`umbra={"buffer":
{"run_ahead": 0}}` is TRL's order), and ratios are to the policy that sampled.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from umbra.deploy.python.run import Run
from umbra.deploy.python.train import train
from umbra.proto.errors import UsageError
from umbra.services.prompts.rows import rows_of

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
}
"""The fields of `GRPOConfig` that mean something here, with TRL's defaults (a test compares)."""

# They say how TRL computes, logs, loads and saves; Umbra has its own way, and results are the same.
OURS_TO_DECIDE = frozenset(
    {
        *("gradient_checkpointing", "gradient_checkpointing_kwargs", "tf32", "torch_compile"),
        *("torch_compile_backend", "torch_compile_mode", "use_liger_kernel", "liger_kernel_config"),
        *("use_cache", "torch_empty_cache_steps", "logging_strategy", "logging_steps"),
        *("logging_first_step", "log_on_each_node", "logging_nan_inf_filter", "log_level"),
        *("log_level_replica", "disable_tqdm", "report_to", "project", "include_for_metrics"),
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
    }
)

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


class TrainOutput(NamedTuple):
    """As Transformers' trainers return it."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class GRPOTrainer:
    """TRL's trainer, with the arguments that mean the same here.

    Args:
        model: a model directory.
        reward_funcs: a function `(prompts, completions, **columns)`, or several.
        args: a `GRPOConfig`; TRL's defaults if not given.
        train_dataset: rows with a "prompt", text or messages.
        eval_dataset: held-out rows; the model is measured on them before and after.
        processing_class: the model's own tokenizer, or nothing.
        umbra: sections of a run file, which go before everything else.

    Raises:
        UsageError: an argument means nothing here, or means something else than in TRL.
    """

    def __init__(
        self,
        model: str,
        reward_funcs: Callable[..., Any],
        args: Any = None,
        train_dataset: Iterable[Any] | None = None,
        eval_dataset: Iterable[Any] | None = None,
        processing_class: Any = None,
        *,
        umbra: Mapping[str, Mapping[str, Any]] | None = None,
        **others: Any,
    ) -> None:
        for name, value in others.items():
            if value is not None and value != (None, None):
                raise UsageError(f"GRPOTrainer: {name} means nothing here yet: leave it out")
        if not isinstance(model, str | Path):
            raise UsageError(
                f"GRPOTrainer: model is a {type(model).__name__}: give its directory, since the "
                "run's processes load it themselves"
            )
        tokenizer = getattr(processing_class, "name_or_path", None)
        if processing_class is not None and tokenizer != str(model):
            raise UsageError(
                f"GRPOTrainer: processing_class is that of {tokenizer!r}: save it into the "
                "directory of the model, whose tokenizer is used"
            )
        if train_dataset is None:
            raise UsageError("GRPOTrainer: train_dataset is missing")
        self._rows = rows_of(train_dataset, "train_dataset")
        self._held_out = None if eval_dataset is None else rows_of(eval_dataset, "eval_dataset")
        self._model = str(model)
        self._rewards = reward_funcs
        self._sections = sections_of(values_of(args), rows=len(self._rows))
        for section, keys in (umbra or {}).items():
            self._sections.setdefault(section, {}).update(keys)
        self.run: Run | None = None

    def train(self) -> TrainOutput:
        """Start the run and see it through.

        Raises:
            UmbraError: see `umbra.train`.
        """
        self.run = train(
            self._model,
            self._rows,
            self._rewards,
            eval_prompts=self._held_out,
            config=self._sections,
        )
        steps = list(self.run)
        losses = [float(step.metrics.get("loss") or 0.0) for step in steps]
        mean = sum(losses) / len(losses) if losses else 0.0
        updates = sum(int(step.metrics.get("updates") or 1) for step in steps)
        return TrainOutput(updates, mean, {"reward": steps[-1].reward if steps else 0.0})

    def save_model(self, output_dir: str | Path) -> None:
        """Copy the trained model to `output_dir`.

        Raises:
            UsageError: it was not trained yet.
        """
        if self.run is None:
            raise UsageError("GRPOTrainer: train() comes before save_model()")
        shutil.copytree(self.run.model, output_dir, dirs_exist_ok=True)

    def evaluate(self) -> dict[str, float]:
        """Accuracy of the trained model on `eval_dataset`.

        Raises:
            UsageError: it was not trained yet, or there is no `eval_dataset`.
        """
        if self.run is None:
            raise UsageError("GRPOTrainer: train() comes before evaluate()")
        return {"eval_reward": float(self.run.evaluate()["accuracy"])}

    @property
    def log_history(self) -> list[dict[str, Any]]:
        return [] if self.run is None else [step.metrics for step in self.run]


def values_of(args: Any) -> dict[str, Any]:
    """The fields that mean something, from a `GRPOConfig`.

    Raises:
        UsageError: another field is not as TRL has it by default.
    """
    if args is None:
        return dict(DEFAULTS)
    # It derives some fields from the machine.
    machine = {name: getattr(args, name) for name in ("output_dir", "use_cpu", "bf16", "fp16")}
    usual = type(args)(**machine)
    for field in fields(args):
        name, value = field.name, getattr(args, field.name, None)
        if name in DEFAULTS or name in OURS_TO_DECIDE or not field.init:
            continue
        if value != getattr(usual, name, None):
            raise UsageError(
                f"GRPOConfig.{name} = {value!r} means nothing here, or something else: leave it "
                "out; docs/data.md lists what is taken"
            )
    return {name: getattr(args, name, default) for name, default in DEFAULTS.items()}


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
        },
    }
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
        "warmup_steps": values["warmup_steps"],
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
