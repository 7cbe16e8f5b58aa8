"""A broker with peers and a clock that tests turn by hand: no sockets, no threads, no time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import count, cycle
from typing import Any, Literal, TypeVar

import msgspec
from fakes import trajectories
from msgspec.structs import replace

from umbra.proto import messages as m
from umbra.proto.net.server import Request
from umbra.proto.records import Score, Task, Trajectory, VersionSpan
from umbra.services.buffer.broker import Broker
from umbra.services.buffer.effects import Effect, Measure, Notify, Reply
from umbra.services.buffer.prompts import PromptFeed
from umbra.services.buffer.state import RunState
from umbra.services.buffer.store import MemoryStore
from umbra.services.config import (
    BufferConfig,
    EnvironmentConfig,
    EvalConfig,
    NamedEnvironment,
    RunConfig,
    RunSection,
)
from umbra.services.config.generation import ENVIRONMENT, environment_prefix
from umbra.services.prompts import Prompt

M = TypeVar("M", bound=m.Message)


class EndlessPrompts(PromptFeed):
    """Rows 1, 2, 3, ...; of several environments in turn, if there are any."""

    def __init__(self, environments: Sequence[str] = ()) -> None:
        self.environments = environments
        self.drawn = 0

    def __next__(self) -> Prompt:
        self.drawn += 1
        row = {"prompt": f"row {self.drawn}"}
        if not self.environments:
            return Prompt(str(self.drawn), row)
        name = self.environments[(self.drawn - 1) % len(self.environments)]
        return Prompt(f"{environment_prefix(name)}{self.drawn}", {**row, ENVIRONMENT: name})

    def position(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def seek(self, position: dict[str, Any]) -> None:
        self.drawn = position["drawn"]


def as_sent(body: m.Message) -> m.Message:
    """`body` as it arrives: what the broker holds packed can be read again."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(body), type=type(body))


def trajectory(task: Task, *versions: int, **changes: Any) -> Trajectory:
    """A sound answer to `task` with two tokens per entry of `versions`."""
    spans = [
        VersionSpan(version=version, start=2 * i, end=2 * i + 2)
        for i, version in enumerate(versions)
    ]
    names = ("sample_id", "group_id", "prompt_id", "attempt")
    own = {name: getattr(task, name) for name in names} | {"spans": spans, "reward": 1.0}
    made = trajectories.trajectory([1, 2], [7] * 2 * len(versions), **own)
    return replace(made, **changes)


class World:
    def __init__(
        self,
        *,
        steps: int = 100,
        durable: bool = False,
        eval_config: EvalConfig | None = None,
        eval_prompts: Sequence[Prompt] = (),
        reward_scope: Literal["sample", "group"] = "sample",
        environments: Sequence[NamedEnvironment] = (),
        **buffer: Any,
    ) -> None:
        sizes = {"group_size": 2, "batch_groups": 2, "stale_policy": "drop", **buffer}
        self.config = RunConfig(
            run=RunSection(steps=steps),
            buffer=BufferConfig(**sizes),
            eval=eval_config or EvalConfig(),
            environment=EnvironmentConfig()
            if environments
            else EnvironmentConfig(kind="reward", reward_scope=reward_scope),
            environments=tuple(environments),
        )
        self.eval_prompts = eval_prompts
        self.now = 0.0
        self.run_id = "run-1"
        self.store = MemoryStore(durable=durable)
        self.broker = self._make_broker()
        self.late: defaultdict[str, list[m.Message]] = defaultdict(list)  # to parked requests
        self.pushes: list[tuple[str, m.Message]] = []
        self.rows: list[Measure] = []
        self.incarnations: dict[str, str] = {}
        self._ids = count(1)

    def restart_broker(self, **buffer: Any) -> None:
        """The buffer is killed and starts again, with changes; parked requests are forgotten."""
        self.config = replace(self.config, buffer=replace(self.config.buffer, **buffer))
        self.broker = self._make_broker()
        self.broker.save()

    def _make_broker(self) -> Broker:
        prompts = EndlessPrompts([one.name for one in self.config.environments])
        return Broker(
            RunState(self.config, self.store, prompts, self.eval_prompts),
            m.Welcome(run_id=self.run_id, heartbeat_s=1.0, data="tcp://h:1"),
            now=self.now,
        )

    @property
    def pool(self):  # noqa: ANN201 - a shortcut
        return self.broker.pool

    def ask(self, name: str, body: m.Message, **sent: Any) -> m.Message | None:
        """The reply to `body` from `name`; None while it is parked."""
        request = self.request(name, body, **sent)
        own: m.Message | None = None
        for effect in self.broker.handle_all([request], self.now):
            if isinstance(effect, Reply) and effect.request.header is request.header:
                assert own is None, "answered twice"
                own = as_sent(effect.body)
            else:
                self.take([effect])
        self.broker.save()
        return own

    def request(
        self, name: str, body: m.Message, *, incarnation: str = "", number: int = 0,
        frame: bytes = b"", reply_to: int | None = None,
    ) -> Request:  # fmt: skip
        header = m.Header(
            major=1,
            minor=0,
            type=type(body).__name__,
            id=number or next(self._ids),
            sender=name,
            incarnation=incarnation or self.incarnations.get(name, f"{name}-1"),
            reply_to=reply_to,
        )
        return Request("any", name.encode(), header, body, frame=frame)

    def get(self, name: str, body: m.Message, kind: type[M], **sent: Any) -> M:
        """The reply to `body`, which must be a `kind`."""
        reply = self.ask(name, body, **sent)
        assert isinstance(reply, kind), reply
        return reply

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.take(self.broker.tick(self.now))
        self.broker.save()

    def take(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Reply(request, body):
                    self.late[request.header.sender].append(as_sent(body))
                case Notify(identity, body, _channel):
                    self.pushes.append((identity.decode(), body))
                case Measure():
                    self.rows.append(effect)

    def join(
        self, role: m.Role, name: str, incarnation: str | None = None, **facts: Any
    ) -> m.Message | None:
        """A process joins; its later messages carry this incarnation."""
        number = incarnation or f"{name}-1"
        facts.setdefault("replaces", 1)  # as a supervisor says whose process has died
        body = m.Join(role=role, name=name, pid=1, host="h1", endpoints={}, **facts)
        reply = self.ask(name, body, incarnation=number)
        if isinstance(reply, m.Welcome):
            self.incarnations[name] = number
        return reply

    def beat(self, name: str, state: Any = "ready", idle_s: float = 0.0) -> m.Message | None:
        return self.ask(name, m.Heartbeat(state=state, activity="x", progress=1, idle_s=idle_s))

    def lease(self, name: str, capacity: int, version: int) -> list[Task]:
        body = m.LeaseTasks(capacity=capacity, version=version, wait_s=0)
        return self.get(name, body, m.TaskLeases).tasks

    def submit(self, name: str, *trajectories: Trajectory) -> m.TaskLeases:
        return self.get(name, m.SubmitResults(trajectories=list(trajectories)), m.TaskLeases)

    def answer(self, name: str, tasks: Sequence[Task], version: int, *rewards: float) -> None:
        """Complete `tasks` with `rewards` in turn, 1.0 if none are given."""
        pairs = zip(tasks, cycle(rewards or (1.0,)))
        made = [trajectory(task, version, reward=reward) for task, reward in pairs]
        assert not self.submit(name, *made).refused

    def leased(self, name: str) -> list[Task]:
        """Return the tasks of the one answer to a parked request of `name`."""
        (lease,) = self.late[name]
        assert isinstance(lease, m.TaskLeases)
        return lease.tasks

    def deliver(
        self, name: str, tasks: Sequence[Task], capacity: int = 0, version: int = 0, number: int = 0
    ) -> m.TaskLeases:
        """Complete `tasks` and ask for `capacity` more in one message."""
        made = [trajectory(task, 0) for task in tasks]
        body = m.SubmitResults(trajectories=made, capacity=capacity, version=version)
        return self.get(name, body, m.TaskLeases, number=number)

    def to_score(self, name: str, stage: str = "reward", capacity: int = 100) -> list[Task]:
        body = m.LeaseTasks(kind=stage, capacity=capacity, wait_s=0)
        return self.get(name, body, m.TaskLeases).tasks

    def give(self, name: str, tasks: Sequence[Task], *rewards: float, **said: Any) -> m.TaskLeases:
        """Scores of `tasks`: of each its reward, if any are given, and what all have."""
        each = [{"reward": reward} for reward in rewards] or [{}] * len(tasks)
        scores = [
            Score(sample_id=task.sample_id, attempt=task.attempt, **own, **said)
            for task, own in zip(tasks, each, strict=True)
        ]
        return self.get(name, m.SubmitResults(scores=scores), m.TaskLeases)

    def produce(self, name: str, version: int, capacity: int = 1000) -> list[Task]:
        """`name` leases all it can and answers all with tokens of `version`."""
        tasks = self.lease(name, capacity, version)
        self.answer(name, tasks, version)
        return tasks

    def batch(self, step: int) -> m.BatchLease:
        return self.get("trainer", m.LeaseBatch(step=step, wait_s=0), m.BatchLease)

    def commit(self, step: int) -> m.CommitAck:
        return self.get("trainer", m.CommitBatch(step=step), m.CommitAck)

    def train(self, step: int) -> m.BatchLease:
        batch = self.batch(step)
        assert batch.trajectories
        self.commit(step)
        return batch

    def steps(self, name: str, *steps: int) -> list[m.BatchLease]:
        """Train `steps`, each after `name` has answered all it gets with weights of then."""
        batches: list[m.BatchLease] = []
        for step in steps:
            self.produce(name, step - 1)
            batches.append(self.train(step))
        return batches

    def back(self, name: str, task: Task, reason: str = "x", **said: Any) -> None:
        """`name` hands back the sample of `task`; `said` are fields of `ReturnedSample`."""
        sample = m.ReturnedSample(
            sample_id=task.sample_id, attempt=task.attempt, reason=reason, **said
        )
        assert self.ask(name, m.ReturnTasks(samples=[sample])) == m.Ok()

    @property
    def status(self) -> m.Status:
        return self.broker.status(self.now)


def world(**options: Any) -> World:
    """A world with generators `a` and `b` and a trainer."""
    made = World(**options)
    made.join("generator", "a")
    made.join("generator", "b")
    made.join("trainer", "trainer")
    return made
