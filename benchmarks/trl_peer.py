"""TRL's GRPOTrainer on the tasks of `end_to_end.py`.

Model, prompts, batches, precision, optimizer and schedule are the task's; the clock starts with the
first generation. On the guess task `Games` calls its generation once a turn for all games that are
not over (`rollout_func`). The loss is the mean over all tokens of a batch, not over those with an
advantage: it has no setting for that. TRL's AsyncGRPOTrainer (1.16) needs CUDA.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from end_to_end import GOALS, program_row, reached
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from whole_runs import base_model, read_prompts, reward_of, run_file

from umbra.services.config import RunConfig
from umbra.services.config.loader import load_config
from umbra.services.environments.built_in import Guess
from umbra.services.modeling.chat import Chat
from umbra.services.modeling.pretrained import stop_ids
from umbra.services.trainer.learner import learning_rate
from umbra.services.trainer.policy import load_policy

LIMIT_S = 800.0


class Watch(TrainerCallback):
    """Notes reward and time of each step; stops at the task's reward, or after LIMIT_S."""

    def __init__(self, task: str) -> None:
        self._goal = GOALS[task]
        self.rewards: list[float] = []
        self.lengths: list[float] = []
        self.clocks: list[tuple[float, float]] = []  # wall and CPU, at the start and each step

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Start the clock."""
        self.clocks.append((time.monotonic(), time.process_time()))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        if not logs or "reward" not in logs:
            return
        self.rewards.append(float(logs["reward"]))
        self.lengths.append(float(logs["completions/mean_length"]))
        self.clocks.append((time.monotonic(), time.process_time()))
        seconds = self.clocks[-1][0] - self.clocks[0][0]
        if reached(self.rewards, self._goal) is not None or seconds > LIMIT_S:
            control.should_training_stop = True


def judged(reward: Callable[[str, str], float]) -> Callable[..., list[float | None]]:
    """Return TRL's form of a task's reward."""

    def judge(completions: list[Any], answer: list[str], **_: Any) -> list[float | None]:
        pairs = zip(completions, answer, strict=True)
        return [reward(said[0]["content"], right) for said, right in pairs]

    return judge


class Games:
    """Plays the guess task turn by turn, all games of a batch at once: TRL's `rollout_func`.

    TRL passes it the prompts alone, so their messages have the answers too.
    """

    def __init__(self, chat: Chat, tries: int) -> None:
        self._chat = chat
        self._tries = tries

    def __call__(self, prompts: Any, trainer: Any) -> dict[str, Any]:
        """Tokens of each game, which of them the model said, and rewards."""
        games = [Guess(self._tries) for _ in prompts]
        said: list[list[int]] = [[] for _ in prompts]
        own: list[list[int]] = [[] for _ in prompts]
        won = [0.0] * len(prompts)
        openings = [
            self._chat.prompt_ids(game.reset({"prompt": told["content"], "answer": told["answer"]}))
            for game, (told,) in zip(games, prompts, strict=True)
        ]
        live = list(range(len(prompts)))
        while live:
            contexts = [openings[at] + said[at] for at in live]
            turns, _ = trainer._generate_single_turn(contexts, None, {}, trainer.num_generations)
            going: list[int] = []
            for at, turn in zip(live, turns, strict=True):
                said[at] += turn
                own[at] += [1] * len(turn)
                ended = turn[-1] in self._chat.stop_ids
                result = games[at].step(self._chat.text(turn[:-1] if ended else turn))
                won[at] += result.reward
                if result.done or not ended:
                    continue
                more = self._chat.turn_ids(result.messages, turn[-1])
                said[at] += more
                own[at] += [0] * len(more)
                going.append(at)
            live = going
        return {
            "prompt_ids": openings,
            "completion_ids": said,
            "logprobs": None,
            "env_mask": own,
            "won": won,
        }


def winnings(completions: list[Any], won: list[float], **_: Any) -> list[float | None]:
    """Return the rewards that `Games` gave."""
    return list(won)


def train_task(task: str, seed: int, work: Path, steps: int, threads: int) -> dict[str, Any]:
    """Train until the accuracy, or for `steps` steps (0 = the task's own); return the row."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    warnings.simplefilter("ignore")
    base = base_model(work, task, seed)
    config = load_config(run_file(task))
    watch = Watch(task)
    model, tokenizer = load_policy(str(base / "base"))
    games = None
    if config.environment.kind == "guess":
        chat = Chat(tokenizer, stop_ids(model, tokenizer))
        games = Games(chat, config.environment.options["tries"])
    data = [{"prompt": row["prompt"], "answer": row["answer"]} for row in read_prompts(base)]
    if games:
        for row in data:
            row["prompt"][0]["answer"] = row["answer"]
    samples = config.buffer.batch_groups * config.buffer.group_size
    trainer: Any = GRPOTrainer(
        model,
        reward_funcs=winnings if games else judged(reward_of(task, config)),
        args=grpo_config(config, work / "trl", samples, seed, steps),
        train_dataset=Dataset.from_list(data),
        processing_class=tokenizer,
        callbacks=[watch],
        rollout_func=games,
        optimizers=optimizer_of(model, config, steps),
    )
    trainer.train()
    return program_row(task, watch.rewards, watch.lengths, watch.clocks, samples)


def grpo_config(config: RunConfig, out: Path, samples: int, seed: int, steps: int) -> GRPOConfig:
    """Return the demo's settings, by TRL's names."""
    return GRPOConfig(
        output_dir=str(out),
        use_cpu=True,
        bf16=config.trainer.precision == "bf16",
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        seed=seed,
        max_steps=steps or config.run.steps,
        per_device_train_batch_size=samples,
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        num_iterations=1,
        num_generations=config.buffer.group_size,
        max_completion_length=config.sampling.max_tokens,
        temperature=config.sampling.temperature,
        top_k=0,
        beta=0.0,
        epsilon=0.2,
        scale_rewards="none",
        loss_type="bnpo",
        max_grad_norm=config.trainer.max_grad_norm,
        gradient_checkpointing=False,
    )


def optimizer_of(
    model: torch.nn.Module, config: RunConfig, steps: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    """AdamW and the schedule of the demo's trainer."""
    trainer = config.trainer
    adam = torch.optim.AdamW(
        model.parameters(),
        lr=1.0,
        betas=trainer.betas,
        weight_decay=trainer.weight_decay,
        fused=True,
    )
    total = steps or config.run.steps
    return adam, torch.optim.lr_scheduler.LambdaLR(
        adam, lambda step: learning_rate(trainer, step, total)
    )
