"""`umbra scorer`: leases trajectories of one stage, scores them, sends the scores.

Stage "reward" is the environment's last step, run here instead of in the generator, of single
samples or of whole groups at once (`environment.reward_scope`). `logprobs.py` has the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from umbra.proto.net.session import Session
from umbra.proto.net.task_client import TaskClient
from umbra.proto.records import Score, Task, unpack_int32
from umbra.services.config import RunConfig
from umbra.services.config.trajectory_rules import reward_fault
from umbra.services.environments.pool import EnvironmentPool, open_rewards, outcomes_of
from umbra.services.environments.protocol import EpisodeOutcome, ParsedTurn, Row, StepResult
from umbra.services.modeling.model_directory import weights_bytes
from umbra.services.modeling.run_file import load_service
from umbra.services.process.command import ServiceContext, service_command
from umbra.services.weights.planes.receiving import open_planes
from umbra.services.weights.receiver import Receiver, StagedVersion

if TYPE_CHECKING:
    from umbra.services.modeling.chat import Chat

WAIT_S = 1.0  # for work, so that a stop is noticed
GATHER_S = 0.2  # scores that get ready within this time travel together
DRAIN_S = 10.0  # to deliver the last scores
OUTCOME_S = 0.05  # for an outcome of the environments, until leases are renewed


# Yields a score for each task, in any order; those in one list are of one message. Calls its second
# argument every now and then, at least between two lists.
Scorer: TypeAlias = Callable[[Sequence[Task], Callable[[], None]], Iterator[list[Score]]]


def score_stage(
    context: ServiceContext,
    session: Session,
    scorer: Scorer,
    refresh: Callable[[], object] = lambda: None,
) -> None:
    """Score until asked to stop; others get the unfinished tasks when this process leaves.

    `refresh` is called before each turn, also while there is nothing to score.
    """
    stage, grace_s = context.options["stage"], context.config.run.broker_grace_s
    wake = threading.Event()
    client = TaskClient(session.data, wake, grace_s=grace_s, kind=stage, gather_s=GATHER_S)
    while not session.stopping.is_set():
        refresh()
        session.progress(f"waiting for {stage}", 0)
        client.ask(context.config.scorer.capacity)
        tasks, _ = client.poll()
        if tasks:
            with context.metrics.span("score"):
                _score(tasks, session, client, scorer)
        else:
            with context.metrics.span("wait_work"):
                client.wait(WAIT_S)
    client.flush(DRAIN_S)


def _score(tasks: Sequence[Task], session: Session, client: TaskClient, scorer: Scorer) -> None:
    pending = {task.sample_id: task.attempt for task in tasks}

    def alive(count: int = 0) -> None:
        client.submit(())  # what has been gathered for long enough
        client.renew(lambda: list(pending.items()))
        client.poll()
        session.progress(f"scoring {client.kind}", count)
        session.stats(scored=float(client.accepted))

    for ready in scorer(tasks, alive):
        if session.stopping.is_set():
            break
        for score in ready:
            del pending[score.sample_id]
        # The scores of a group are taken as a whole.
        (client.deliver_together if len(ready) > 1 else client.submit)(ready)
        alive(len(ready))
    client.deliver()


@dataclass(frozen=True)
class RewardWorker:
    """A worker that rewards responses of one turn, several at once, each with a deadline."""

    chat: Chat
    pool: EnvironmentPool
    wake: threading.Event  # set when there may be an outcome
    stops: Callable[[Row], Sequence[str]] = lambda _: ()  # texts that end a turn
    whole: bool = False  # the environments reward groups; the tasks of one come together

    def score(self, tasks: Sequence[Task], alive: Callable[[], None]) -> Iterator[list[Score]]:
        """Return a reward for each of `tasks`, as the environments answer."""
        groups: dict[str, list[Task]] = {}  # by what the environment calls a sample
        plays: dict[str, tuple[Row, list[ParsedTurn | str]]] = {}
        for task in tasks:
            key = task.group_id if self.whole else task.sample_id
            groups.setdefault(key, []).append(task)
            prompt, response = task.made.prompt_ids, unpack_int32(task.made.response_ids)
            turn = self.chat.parse(response, unpack_int32(prompt), stops=self.stops(task.row))
            plays.setdefault(key, (task.row, []))[1].append(turn)

        def wait() -> None:
            alive()
            self.wake.wait(OUTCOME_S)
            self.wake.clear()

        for outcome in outcomes_of(self.pool, plays, wait):
            yield _scores(groups[outcome.key], outcome)


def _scores(tasks: Sequence[Task], outcome: EpisodeOutcome) -> list[Score]:
    """Return the scores of `tasks`, which were played at once, by `outcome`."""
    value, error = outcome.value, outcome.error
    values = value if isinstance(value, list) else [value]
    results = [result for result in values if isinstance(result, StepResult)]
    if len(results) != len(tasks) and not error:
        answers = f"{len(results)} rewards for {len(tasks)} samples"
        error = f"the environment returned {answers}: it must return one for each"
    for result in results:
        error = error or reward_fault(result.reward, result.reward_parts) or ""
    found = [{"reward": r.reward, "reward_parts": r.reward_parts} for r in results]
    each: list[dict[str, Any]] = [{"error": error}] * len(tasks) if error else found
    return [
        Score(sample_id=task.sample_id, attempt=task.attempt, **own)
        for task, own in zip(tasks, each, strict=True)
    ]


def run(context: ServiceContext) -> int:
    """Score until the run ends or this process has to stop.

    Raises:
        UsageError: no model or reward where the configuration says.
        UmbraError: a peer was lost.
    """
    stage = context.options["stage"]
    with ExitStack() as held:
        reward = None
        if stage == "reward":
            context.begin("stage reward, without a model")
            reward = reward_worker(context.config)
            held.enter_context(closing(reward.pool))
        session = held.enter_context(context.join())
        if reward is not None:
            context.ready({"stage": stage})
            score_stage(context, session, reward.score)
        else:
            _score_logprobs(context, session)
        if session.failure is not None:
            raise session.failure
    return 0


def reward_worker(config: RunConfig) -> RewardWorker:
    """Return the worker of stage "reward". Needs a tokenizer, but no model."""
    from umbra.services.modeling.chat import Chat
    from umbra.services.modeling.pretrained import load_tokenizer, named_tokens

    tokenizer = load_tokenizer(config.model.path, trust=config.model.trust_remote_code)
    stops = named_tokens(tokenizer, config.sampling.stop_tokens) | {tokenizer.eos_token_id} - {None}
    wake = threading.Event()
    return RewardWorker(
        Chat.configured(config.model, tokenizer, stops),
        open_rewards(config, wake=wake.set),
        wake,
        stops=lambda row: config.sampling_for(config.environment_of(row)).stop,
        whole=bool(config.rewarded_by_groups),
    )


def _score_logprobs(context: ServiceContext, session: Session) -> None:
    import torch

    from umbra.services.modeling.models import load_model, pick_device
    from umbra.services.modeling.weights import weight_table
    from umbra.services.scorer.logprobs import LogprobWorker, check_tokens, score_by_model

    config, scorer, stage = context.config, context.config.scorer, context.options["stage"]
    device = pick_device(scorer.device, "scorer.device")
    dtype = config.weight_hub.dtype_on(device.type)
    longest = config.longest_turn
    context.begin(f"stage {stage} on {device} ({dtype})", f"plane {config.weight_hub.plane}")

    def model_of(path: str, source: str) -> Any:
        return load_model(path, device, getattr(torch, dtype), source, config.model.checked)

    if stage == "ref_logp":

        @cache
        def reference(path: str) -> LogprobWorker:
            source = "scorer.model" if scorer.models else "model.path"
            check_tokens(config, path)
            return LogprobWorker(model_of(path, source), config.trainer, max_tokens=longest)

        models = scorer.models or {"": config.model.path}
        workers = {name: reference(path) for name, path in models.items()}
        context.ready({"stage": stage, "model": ", ".join(dict.fromkeys(models.values()))})
        score_stage(context, session, partial(score_by_model, workers))
        return
    path = config.model.path
    model = model_of(path, "model.path")
    limit_s = config.weight_hub.first_version_s(weights_bytes(path))
    channel = session.weights(deadline_s=limit_s)
    table = weight_table(model, config)
    version = -1
    planes = open_planes(config.weight_hub, str(device))
    expected = config.weight_hub.expected_on(device.type)
    with closing(Receiver(channel, planes, dtype=expected)) as receiver:
        waiting = partial(session.progress, "waiting for the trainer's model", 0)
        if not receiver.subscribe_unless(session.stopping, limit_s, waiting):
            return

        def apply(staged: StagedVersion) -> None:
            table.load(staged.manifest, staged.data)

        def refresh(staged: StagedVersion | None = None) -> int:
            nonlocal version
            if (staged := staged or receiver.poll()) is not None:
                loaded = receiver.load(staged, apply, limit_s, session.stopping)
                version = loaded.version if loaded is not None else version
            return version

        while version < 0 and not session.stopping.is_set():
            refresh(receiver.wait_first(limit_s, session.stopping))
        context.ready({"stage": stage, "version": version})
        replay = config.trainer.router_replay  # as the policy that it stands for
        worker = LogprobWorker(model, config.trainer, refresh, replay=replay, max_tokens=longest)
        # Also while there is nothing to score, so that the hub need not wait.
        score_stage(context, session, worker.score, refresh)


command = service_command(
    "scorer",
    run,
    load=load_service,
    options=[
        click.Option(
            ["--stage"],
            type=click.Choice(["reward", "ref_logp", "logp"]),
            default="reward",
            show_default=True,
            help="What this process computes.",
        )
    ],
)
