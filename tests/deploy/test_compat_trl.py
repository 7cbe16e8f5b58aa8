"""`umbra.compat.trl`: TRL's arguments as settings, and refusals by name."""

import dataclasses
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, PromptTuningConfig
from transformers.trainer_callback import TrainerCallback
from trl.trainer.grpo_config import GRPOConfig

from umbra.compat.grpo_config import IGNORED, INSTEAD, READ
from umbra.compat.trl import GRPOTrainer
from umbra.deploy.python.source import CopiedSource
from umbra.deploy.python.train import _named, _with_tools
from umbra.proto.errors import UsageError
from umbra.services.config.loader import config_of
from umbra.services.config.rules import check_feasible
from umbra.services.environments.rewards import RewardFunction, Rewards
from umbra.services.environments.trl import trl_program

ROWS = [{"prompt": "2 + 2 ="}] * 20


def config(tmp_path: Path, **changes: Any) -> GRPOConfig:
    given = {"report_to": "none", **changes}
    return GRPOConfig(output_dir=str(tmp_path), use_cpu=True, **given)


def test_fields_are_named_as_in_trl() -> None:
    theirs = {field.name for field in dataclasses.fields(GRPOConfig)}
    assert READ | set(INSTEAD) <= theirs
    assert all(any(name.startswith(begin) for name in theirs - READ) for begin in IGNORED)


def score(prompts: list[str], completions: list[str]) -> list[float]:
    return [0.0 for _ in completions]


def brevity(completions: list[str], **_columns: Any) -> list[float]:
    return [1.0 for _ in completions]


def multiply(a: int, b: int) -> int:
    """Multiply two integers.

    Args:
        a: the first one.
        b: the second one.
    """
    return a * b


class Echo:
    """An environment as TRL's pages for OpenEnv have it."""

    def reset(self, **_row: Any) -> str:
        return "say something"

    def echo(self, message: str) -> str:
        """Echo a message.

        Args:
            message: it.
        """
        return message


def echoed(environments: list[Echo], **_columns: Any) -> list[float]:
    return [0.5 for _ in environments]


def trainer(model: Any = "m", rewards: Any = score, **changes: Any) -> GRPOTrainer:
    return GRPOTrainer(model, rewards, **{"train_dataset": ROWS, **changes})


TOKENIZER = type("Tokenizer", (), {"name_or_path": "o"})()


def lora(**changes: Any) -> LoraConfig:
    return LoraConfig(r=16, target_modules=["v_proj", "q_proj"], **changes)


P = "trainer.pieces."


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {f"{P}clip_low": 0.2, f"{P}aggregation": "token_mean", f"{P}denominator": "all"}),
        ({"lr_scheduler_type": "constant", "warmup_steps": 9}, {"trainer.warmup_steps": 0}),
        ({"epsilon_high": 0.28}, {f"{P}clip_high": 0.28, f"{P}advantage": "grpo"}),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, {f"{P}clip": "cispo", f"{P}clip_high": 4.0}),
        (
            {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
            {f"{P}ratio_level": "sequence", f"{P}clip": "ppo", f"{P}clip_high": 4e-4},
        ),
        (
            {"loss_type": "dr_grpo", "scale_rewards": False},
            {f"{P}aggregation": "constant", f"{P}advantage": "dr_grpo", "buffer.stages": ()},
        ),
        (
            {"loss_type": "grpo", "beta": 0.04},
            {f"{P}kl_coef": 0.04, f"{P}kl_unbiased": True, "buffer.stages": ("ref_logp",)},
        ),
        (
            {"mask_truncated_completions": True, "entropy_coef": 0.01, "delta": 4.0},
            {f"{P}overlong_filter": True, f"{P}entropy_coef": 0.01, f"{P}dual_clip": 4.0},
        ),
        (  # 32 completions of an update, 8 of a prompt; 3 epochs of 20 rows
            {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 2},
            {"buffer.batch_groups": 4, "run.steps": 3 * 20 / 4},
        ),
        (  # batches of two updates each
            {"per_device_train_batch_size": 16, "steps_per_generation": 2, "max_steps": 9},
            {"buffer.batch_groups": 4, "trainer.minibatches": 2, "run.steps": 5},
        ),
        (
            {"num_iterations": 3, "max_steps": 9, "warmup_steps": 0.2},
            {"trainer.epochs": 3, "run.steps": 3, "trainer.warmup_steps": 1},
        ),
        (
            {"use_vllm": True, "vllm_tensor_parallel_size": 2, "vllm_max_model_length": 4096},
            {"generator.engine": "vllm", "generator.tensor_parallel": 2},
        ),
        (
            {"report_to": ["wandb"], "chat_template_kwargs": {"enable_thinking": False}},
            {"metrics.also": ("wandb",), "model.chat_template_kwargs": {"enable_thinking": False}},
        ),
    ],
)
def test_fields_become_keys(
    tmp_path: Path, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    made = trainer(args=config(tmp_path, **fields))._sections
    run = config_of(made | {"data": {"prompts": "p.jsonl"}}, "GRPOConfig")
    check_feasible(run)
    found = {key: attrgetter(key)(run) for key in expected}
    assert {key: tuple(v) if isinstance(v, list) else v for key, v in found.items()} == expected


def test_arguments_become_keys(tmp_path: Path) -> None:
    bf16 = config(tmp_path, model_init_kwargs={"dtype": "bfloat16", "revision": "main"})
    adapter = lora(lora_alpha=64, task_type="CAUSAL_LM")
    keys = trainer("acme/tiny", args=bf16, peft_config=adapter)
    assert keys._path == "acme/tiny@main"
    made = type("Made", (), {"save_pretrained": print})()  # is another one in the next script
    assert trainer(made, args=bf16)._path != trainer(made, args=bf16)._path
    assert keys._sections["trainer"].items() >= {"lora_rank": 16, "weights": "bf16"}.items()
    assert keys._sections["trainer"]["lora_targets"] == ["q_proj", "v_proj"]
    scaled = trainer(peft_config=lora(use_rslora=True))._sections["trainer"]
    assert scaled["lora_alpha"] == 8 * 16**0.5
    tools = trainer(args=config(tmp_path, max_tool_calling_iterations=3), tools=[multiply])
    assert tools._sections["environment"] == {"options": {"tool_rounds": 3}}
    ten = config(tmp_path, max_steps=10)
    played = trainer("m", echoed, args=ten, environment_factory=Echo, train_dataset=None)
    assert played._sections["environment"] == {"kind": "trl", "id": Echo, "reward": echoed}


def test_several_rewards_have_weights(tmp_path: Path) -> None:
    both = [score, brevity]
    assert trainer(rewards=both)._reward == {score: 1.0, brevity: 1.0}
    weighted = config(tmp_path, reward_weights=[1.0, 0.1])
    assert trainer(rewards=both, args=weighted)._reward == {score: 1.0, brevity: 0.1}


def test_functions_and_classes_are_named_in_the_run(tmp_path: Path) -> None:
    source = CopiedSource()
    own = _named({"id": Echo, "reward": {score: 1.0, "m:f": 0.5}}, source)
    here = __name__
    assert own == {"id": f"{here}:Echo", "reward": {f"{here}:score": 1.0, "m:f": 0.5}}
    # Tools become a class as of TRL's environments, which workers import.
    given = _with_tools({"kind": "reward", "reward": f"{here}:score"}, [multiply], source)
    space: dict[str, Any] = {}
    exec(source.text, space)
    made = space[given["id"].partition(":")[2]]
    program = trl_program(made, Rewards([RewardFunction(echoed, "echoed")]), "tools")
    assert callable(program) and made().reset(prompt="") is None and made().multiply(6, b=7) == 42


@pytest.mark.parametrize(
    ("fields", "arguments", "named"),
    [
        ({"loss_type": "bnpo"}, {}, "loss_type = 'bnpo' has no counterpart"),
        ({"scale_rewards": "batch"}, {}, "scale_rewards = 'batch' has no counterpart"),
        ({"optim": "adafactor"}, {}, "optim = 'adafactor'"),
        ({"top_entropy_quantile": 0.2}, {}, "top_entropy_quantile = 0.2"),
        ({"repetition_penalty": 1.2}, {}, "repetition_penalty = 1.2: not supported: temperature"),
        ({"model_init_kwargs": {"dtype": "float16"}}, {}, "dtype float16 is not supported: use"),
        ({"model_init_kwargs": {"load_in_4bit": True}}, {}, "load_in_4bit not supported"),
        ({"loss_type": "cispo", "importance_sampling_level": "sequence"}, {}, "cispo needs imp"),
        ({"reward_weights": [1.0, 0.1]}, {}, "reward_weights has 2 weights for 1 functions"),
        ({}, {"model": object()}, "model is a object: give its directory"),
        ({}, {"train_dataset": None}, "train_dataset is missing"),
        ({}, {"rewards": None}, "reward_funcs is missing"),
        ({}, {"rewards": "org/reward-model"}, "names a reward model: write a function"),
        ({}, {"processing_class": TOKENIZER}, "that of 'o': save it into"),
        ({}, {"optimizers": (object(), None)}, "optimizers is not supported: set optim"),
        ({}, {"environment_factory": {"a": Echo}}, "several .*environments"),
        ({}, {"peft_config": lora(use_dora=True)}, "peft_config.use_dora = True is not supported"),
        ({}, {"peft_config": LoraConfig(target_modules="a.*b")}, "is a pattern: list names of lay"),
        ({}, {"peft_config": PromptTuningConfig()}, "is a PromptTuningConfig: use LoraConfig"),
    ],
)
def test_what_means_something_else_is_refused_with_what_replaces_it(
    tmp_path: Path, fields: dict[str, Any], arguments: dict[str, Any], named: str
) -> None:
    with pytest.raises(UsageError, match=named):
        trainer(args=config(tmp_path, **fields), **arguments)


class Asks(TrainerCallback):
    def on_log(self, args: Any, state: Any, control: Any, **_given: Any) -> None:
        control.should_training_stop = True

    def on_epoch_end(self, *_given: Any, **_more: Any) -> None:
        raise AssertionError


def test_what_is_ignored_is_warned_of(tmp_path: Path) -> None:
    server = config(tmp_path, use_vllm=True, vllm_mode="server", save_steps=7)
    with pytest.warns(UserWarning, match="GRPOConfig: save_steps, vllm_mode: ignored"):
        trainer(args=server)
    with pytest.warns(UserWarning, match="report_to: comet_ml: ignored; use tensorboard"):
        trainer(args=config(tmp_path, report_to="comet_ml"))
    with pytest.warns(UserWarning, match="lora_dropout: ignored"):
        trainer(peft_config=lora(lora_dropout=0.1))
    with pytest.warns(UserWarning, match="Asks: on_epoch_end: never called"):
        made = trainer(callbacks=[Asks])
    with pytest.warns(UserWarning, match="TrainerControl is ignored"):
        made._take({"kind": "step", "step": 1, "loss": 0.5, "reward/mean": 1.0})
    assert made.state.log_history == [{"loss": 0.5, "reward": 1.0, "epoch": 0.05, "step": 1}]


def test_methods_of_a_trained_model_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer(optimizers=(None, None), callbacks=None)
    for method in (made.save_model, made.evaluate, made.push_to_hub):
        with pytest.raises(UsageError, match=r"call train\(\) before"):
            method()
    with pytest.raises(UsageError, match="resume the run's folder with `umbra up m-GRPO/ID`"):
        made.train(resume_from_checkpoint=True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="start it with python"):
        trainer()
