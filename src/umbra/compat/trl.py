"""TRL's `GRPOTrainer` over an asynchronous run: change the import, keep the script.

    from umbra.compat.trl import GRPOTrainer

Generation may be one batch ahead of training (`umbra={"buffer": {"run_ahead": 0}}` is TRL's order),
and ratios are to the policy that sampled. `grpo_config.py` reads the fields of `GRPOConfig`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.trainer_callback import TrainerControl, TrainerState
from transformers.trainer_utils import TrainOutput
from trl.trainer.grpo_config import GRPOConfig

from umbra.compat.grpo_config import adapter_keys, check, sections_of, warn
from umbra.deploy.python.run import Run
from umbra.deploy.python.train import see_through, train
from umbra.deploy.run_folder import Row, RunFolder, StepFollower, new_run_id
from umbra.proto.errors import UsageError
from umbra.services.modeling.architectures import read_config
from umbra.services.modeling.model_directory import directory_of
from umbra.services.modeling.pretrained import AS_IT_IS
from umbra.services.prompts import rows_of

INSTEAD = {
    "optimizers": "set optim, learning_rate and lr_scheduler_type of GRPOConfig",
    "quantization_config": "leave it out: a peft_config with model_init_kwargs={'dtype': "
    "'bfloat16'} trains an adapter of a bf16 model",
    "reward_processing_classes": "load the tokenizer in a reward function",
    "rollout_func": "give environment_factory, or lead the rollouts in an agent: umbra="
    "{'environment': {'kind': 'agent', 'agent': play}}",
}
"""Replacements of the arguments of TRL's trainer that are refused."""

_CALLBACKS = ("on_train_begin", "on_step_end", "on_log", "on_save", "on_evaluate", "on_train_end")
_LOGS = {  # TRL's name of a metric of a step
    "reward/mean": "reward",
    "reward/std": "reward_std",
    "response_length/mean": "completions/mean_length",
    "truncated": "completions/clipped_ratio",
    "lr": "learning_rate",
}


class GRPOTrainer:
    """TRL's trainer, with the arguments that mean the same here.

    Args:
        model: a model directory, a name on the hub, or a model, which `train` saves first.
        processing_class: the model's own tokenizer, or nothing.
        callbacks: they are called while other processes train, so they read only.
        peft_config: a `LoraConfig`.
        tools: functions that the model may call.
        environment_factory: a class with `reset`, whose other methods are tools.
        umbra: sections of a run file, which override everything else.

    Raises:
        UsageError: an argument means nothing here, or means something else than in TRL.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Iterable[Any] | None = None,
        eval_dataset: Iterable[Any] | None = None,
        processing_class: Any = None,
        *,
        callbacks: Sequence[Any] | None = None,
        peft_config: Any = None,
        tools: Sequence[Callable[..., Any]] | None = None,
        environment_factory: Any = None,
        umbra: Mapping[str, Mapping[str, Any]] | None = None,
        **others: Any,
    ) -> None:
        for name, value in others.items():
            if value is not None and value != (None, None):
                remedy = INSTEAD.get(name, "leave it out")
                raise UsageError(f"GRPOTrainer: {name} is not supported: {remedy}")
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise UsageError(
                "GRPOTrainer: several processes run this script: start it with python, since Umbra "
                "starts its own; umbra={'trainer': {'ranks': N}} shards the policy over N GPUs"
            )
        self._saved = isinstance(model, str | Path)
        name = model if self._saved else type(model).__name__
        self.args = args or GRPOConfig(
            f"{Path(name).name}-GRPO", use_cpu=not torch.cuda.is_available()
        )
        check(self.args)
        self._given, self._path = model, _path_of(model, self.args)
        tokenizer = getattr(processing_class, "name_or_path", None)
        if processing_class is not None and self._saved and tokenizer != str(model):
            raise UsageError(
                f"GRPOTrainer: processing_class is that of {tokenizer!r}: save it into the "
                "directory of the model, whose tokenizer is used"
            )
        self._tokenizer = processing_class
        if train_dataset is None and environment_factory is None:
            raise UsageError("GRPOTrainer: train_dataset is missing")
        if train_dataset is None:  # reset() returns the prompts
            train_dataset = [{"prompt": [{"role": "user", "content": ""}]}]
        elif not hasattr(train_dataset, "__len__") and self.args.max_steps > 0:  # maybe endless
            sizes: Any = self.args.generation_batch_size, self.args.num_generations
            groups = sizes[0] // sizes[1]
            train_dataset = islice(train_dataset, self.args.max_steps * groups)
        self._rows = rows_of(train_dataset, "train_dataset")
        self._held_out = None if eval_dataset is None else rows_of(eval_dataset, "eval_dataset")
        self._sections = sections_of(self.args, rows=len(self._rows))
        if peft_config is not None:
            self._sections["trainer"] |= adapter_keys(peft_config, self._kind)
        self._reward = _reward_of(reward_funcs, self.args.reward_weights)
        self._tools = list(tools) if tools else None
        environment = self._sections.pop("environment", {})  # TRL's limit of tool calls
        if isinstance(environment_factory, Mapping) or (environment_factory and self._tools):
            raise UsageError(
                "GRPOTrainer: environment_factory must be one class, without tools; several "
                "environments need a run file ([[environments]], docs/environments.md)"
            )
        if environment_factory is not None:
            environment |= {"kind": "trl", "id": environment_factory}
            environment |= {"reward": self._reward} if self._reward else {}
            self._reward = None
        if environment_factory is not None or self._tools:
            self._sections["environment"] = environment
        for section, keys in (umbra or {}).items():
            self._sections.setdefault(section, {}).update(keys)
        if not self._reward and "kind" not in self._sections.get("environment", {}):
            raise UsageError("GRPOTrainer: reward_funcs is missing")
        self.run: Run | None = None
        self.control = TrainerControl()
        self.state = TrainerState(max_steps=self._sections["run"]["steps"] * self._updates)
        self.callbacks: list[Any] = []
        for callback in callbacks or ():
            self.add_callback(callback)

    @property
    def _updates(self) -> int:
        """Return the optimizer updates of a step, which TRL counts."""
        trainer = self._sections["trainer"]
        return int(trainer["minibatches"]) * int(trainer["epochs"])

    def _kind(self) -> str:
        if self._saved:
            return str(read_config(directory_of(self._path, weights=False))["model_type"])
        return str(self._given.config.model_type)

    @property
    def model(self) -> Any:
        """Return the trained model, loaded from the run; before that the one that was given."""
        over = self.run is not None and self.run.summary is not None
        if not over and not self._saved:
            return self._given
        directory = directory_of(self._after("model").model if over else self._path)
        return AutoModelForCausalLM.from_pretrained(directory, **AS_IT_IS, use_safetensors=True)

    @property
    def processing_class(self) -> Any:
        """Return the model's tokenizer."""
        if self._tokenizer is not None:
            return self._tokenizer
        name = self._path if self._saved else self._given.config.name_or_path
        return AutoTokenizer.from_pretrained(directory_of(name, weights=False), **AS_IT_IS)

    def add_callback(self, callback: Any) -> None:
        """Call `callback` in `train`; its methods read, and cannot stop or save."""
        callback = callback() if isinstance(callback, type) else callback
        methods = [name for name in vars(type(callback)) if name.startswith("on_")]
        if unheard := sorted(set(methods) - set(_CALLBACKS)):
            warn(f"GRPOTrainer: {type(callback).__name__}: {', '.join(unheard)}: never called")
        self.callbacks.append(callback)

    def train(self, resume_from_checkpoint: Any = None) -> TrainOutput:
        """Start the run and see it through.

        Raises:
            UmbraError: see `umbra.train`.
        """
        if resume_from_checkpoint:
            raise UsageError(
                "GRPOTrainer: resume_from_checkpoint is not supported: resume the run's folder "
                f"with `umbra up {self._sections['run'].get('dir', 'runs')}/ID`"
            )
        if not self._saved:
            self._given.save_pretrained(self._path)
            self.processing_class.save_pretrained(self._path)
        self.run = train(
            self._path,
            self._rows,
            self._reward,
            tools=self._tools,
            eval_prompts=self._held_out,
            config=self._sections,
            wait=False,
        )
        folder = RunFolder(self.run.path)
        follower, saved = StepFollower(folder.metrics, "step", "eval"), set[str]()

        def look() -> None:
            for row in follower.new():
                self._take(row)
            steps = {entry.name for entry in folder.checkpoints.glob("step-*")}
            for _ in steps - saved:
                self._call("on_save")
            saved.update(steps)

        self._call("on_train_begin")
        see_through(self.run, look=look)
        self._call("on_train_end")
        losses, rewards = (
            [log[name] for log in self.state.log_history if name in log] or [0.0]
            for name in ("loss", "reward")
        )
        mean = sum(losses) / len(losses)
        return TrainOutput(self.state.global_step, mean, {"reward": rewards[-1]})

    def _take(self, row: Row) -> None:
        """Tell the callbacks of a row of metrics."""
        if row["kind"] == "eval":
            logs = {"eval_reward": float(row["accuracy"])}
        elif (step := int(row["step"]) * self._updates) <= self.state.global_step:
            return  # repeated by a trainer that was started again
        else:
            self.state.global_step = step
            groups = int(row["step"]) * self._sections["buffer"]["batch_groups"]
            self.state.epoch = groups / len(self._rows)
            self._call("on_step_end")
            logs = {_name(key): n for key, n in row.items() if isinstance(n, int | float)}
        logs["epoch"] = self.state.epoch
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self._call("on_log", logs=logs)
        if row["kind"] == "eval":
            self._call("on_evaluate", metrics=logs)

    def _call(self, event: str, **extra: Any) -> None:
        for callback in self.callbacks:
            if method := getattr(callback, event, None):
                method(self.args, self.state, self.control, model=None, **extra)
        if self.control != TrainerControl():
            warn("GRPOTrainer: TrainerControl is ignored: trainer.run.stop() ends the run")
            self.control = TrainerControl()

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Copy the trained model to `output_dir`; push it too if `push_to_hub` is set.

        Raises:
            UsageError: it was not trained yet.
        """
        trained = self._after("save_model").model
        shutil.copytree(trained, str(output_dir or self.args.output_dir), dirs_exist_ok=True)
        if self.args.push_to_hub:
            self.push_to_hub()

    def push_to_hub(self, commit_message: str = "End of training", **_ignored: Any) -> Any:
        """Upload the trained model to `hub_model_id`; UsageError if it was not trained yet."""
        from huggingface_hub import HfApi

        model, api = self._after("push_to_hub").model, HfApi(token=self.args.hub_token)
        name = self.args.hub_model_id or Path(str(self.args.output_dir)).name
        repo = api.create_repo(name, private=self.args.hub_private_repo, exist_ok=True).repo_id
        return api.upload_folder(repo_id=repo, folder_path=model, commit_message=commit_message)

    def evaluate(self) -> dict[str, float]:
        """Return the accuracy of the trained model on `eval_dataset`.

        Raises:
            UsageError: it was not trained yet, or there is no `eval_dataset`.
        """
        return {"eval_reward": float(self._after("evaluate").evaluate()["accuracy"])}

    def _after(self, method: str) -> Run:
        if self.run is None:
            raise UsageError(f"GRPOTrainer: call train() before {method}()")
        return self.run


def _name(metric: str) -> str:
    part = metric.removeprefix("reward_part/")
    return _LOGS.get(metric, metric if part == metric else f"rewards/{part}/mean")


def _path_of(model: Any, args: Any) -> str:
    """Return where the run's processes load `model` from."""
    if isinstance(model, str | Path):
        revision = (args.model_init_kwargs or {}).get("revision")
        return f"{model}@{revision}" if revision else str(model)
    if not callable(getattr(model, "save_pretrained", None)):
        raise UsageError(
            f"GRPOTrainer: model is a {type(model).__name__}: give its directory, its name on the "
            "hub, or a model of transformers"
        )
    if hasattr(model, "peft_config"):
        raise UsageError(
            "GRPOTrainer: model has an adapter already: give model.merge_and_unload(), and a "
            "peft_config for a new adapter"
        )
    return str(Path(args.output_dir or "runs").resolve() / new_run_id("initial-model"))


def _reward_of(funcs: Any, weights: Sequence[float] | None) -> Any:
    """Return `reward` of `umbra.train` for `reward_funcs` with their weights."""
    functions = list(funcs) if isinstance(funcs, list | tuple) else [funcs] if funcs else []
    for function in functions:
        if hasattr(function, "state_dict") or (isinstance(function, str) and ":" not in function):
            raise UsageError(
                f"GRPOTrainer: reward_funcs: {type(function).__name__} names a reward model: write "
                "a function that loads it at its first call and returns its scores"
            )
    if weights is not None and len(weights) != len(functions):
        raise UsageError(
            f"GRPOConfig.reward_weights has {len(weights)} weights for {len(functions)} functions"
        )
    if weights is None and len(functions) < 2:
        return functions[0] if functions else None
    return dict(zip(functions, map(float, weights or [1.0] * len(functions)), strict=True))
