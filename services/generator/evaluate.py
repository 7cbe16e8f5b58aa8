"""Measuring a model on held-out prompts: engine and environment, no run around them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from umbra.proto.errors import UmbraError, UsageError
from umbra.proto.records import Task, Trajectory
from umbra.services.config import EnvironmentConfig, RunConfig, TrainerConfig
from umbra.services.generator.engines.opening import open_torch
from umbra.services.generator.runner import RolloutRunner
from umbra.services.generator.service import open_environments, settings_for, with_environments
from umbra.services.reporting import eval_scores

_LOOK_S = 0.001


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Metrics of an evaluation. `accuracy` is the mean reward; a failed sample counts as 0."""

    accuracy: float
    samples: int
    failed: int
    mean_tokens: float  # sampled by the model, per finished sample
    mean_turns: float
    tokens_per_s: float
    seconds: float
    scores: dict[str, float]  # pass@k and mean@k, by name


def evaluate_model(
    path: str | Path,
    rows: Sequence[dict[str, Any]],
    config: RunConfig,
    *,
    samples: int,
    greedy: bool = False,
) -> EvalResult:
    """Let the model in `path` answer `samples` prompts, going round `rows` as often as it takes.

    `config` gives environment, sampling and generator; `greedy` takes the most likely token
    instead of sampling.

    Raises:
        UsageError: no model, tokenizer, environment or prompt, or one that rewards groups.
        UmbraError: every single sample failed.
    """
    if not rows:
        raise UsageError("there are no prompts to evaluate on")
    if groups := config.rewarded_by_groups:
        raise UsageError(
            f"{groups[0].where}.reward_scope = group needs the scorers of a run, which this "
            "command has not: set eval.prompts in the run"
        )
    model = replace(config.model, path=str(path))
    settings = replace(config, model=model, trainer=TrainerConfig())  # all of it is in `path`
    opened = open_torch(settings, config.run.seed, "MODEL")
    engine, chat = opened.engine, opened.chat
    engine.version = 0
    prompts = [number % len(rows) for number in range(samples)]  # of each sample

    def with_processes(environment: Any) -> Any:  # for agents left to `umbra run-agents` in a run
        return replace(environment, workers=environment.workers or EnvironmentConfig().workers)

    played = with_environments(config, with_processes)
    start = time.perf_counter()
    finished: list[Trajectory] = []
    failures: list[str] = []
    with closing(engine), closing(open_environments(played, played.environment, chat)) as pool:
        runner = RolloutRunner(engine, pool, settings_for(config, chat, greedy=greedy))
        runner.add(
            Task(
                sample_id=str(index),
                group_id=str(index),
                prompt_id=str(prompt),
                attempt=0,
                row=rows[prompt],
                lease_s=0.0,
            )
            for index, prompt in enumerate(prompts)
        )
        while len(finished) + len(failures) < samples:
            runner.poll(0.0)
            done, failed = runner.results()
            finished += done
            failures += [sample.reason for sample in failed]
            if runner.active and not engine.busy:
                time.sleep(_LOOK_S)  # all wait for their environments, each with a deadline
    seconds = time.perf_counter() - start
    if not finished:
        raise UmbraError(f"all {samples} samples failed; the first: {failures[0]}")
    counts = Counter(map(str, prompts))
    rewards: dict[str, list[float]] = {prompt: [] for prompt in counts}
    for trajectory in finished:
        rewards[trajectory.prompt_id].append(trajectory.reward)
    for prompt, count in counts.items():  # a missing sample is worth 0
        rewards[prompt] += [0.0] * (count - len(rewards[prompt]))
    return EvalResult(
        accuracy=sum(t.reward for t in finished) / samples,
        samples=samples,
        failed=len(failures),
        mean_tokens=sum(sum(t.loss_mask) for t in finished) / len(finished),
        mean_turns=sum(t.turns for t in finished) / len(finished),
        tokens_per_s=engine.decoded_tokens / seconds,
        seconds=seconds,
        scores=eval_scores(rewards, min(counts.values())),
    )
