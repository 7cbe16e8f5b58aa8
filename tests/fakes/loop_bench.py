"""A generator's loop with a channel, a session and a receiver that tests play."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec
from fakes.channel import FakeChannel
from fakes.engine import ScriptedEngine
from fakes.trajectories import sample

from umbra.proto.deadline import LEAST_RATE, Pace
from umbra.proto.errors import UmbraError
from umbra.proto.messages import LeaseTasks, Message, TaskLeases
from umbra.proto.net.task_client import TaskClient
from umbra.proto.records import Manifest, Sampling, TensorEntry
from umbra.services.config import GeneratorConfig
from umbra.services.environments.built_in import ExactMatch
from umbra.services.environments.pool import EnvironmentPool, InlinePool
from umbra.services.generator.activity import Activity, StallWatch
from umbra.services.generator.loop import GeneratorLoop
from umbra.services.generator.rollout import RolloutSettings
from umbra.services.generator.runner import RolloutRunner
from umbra.services.modeling.chat import Chat
from umbra.services.modeling.pretrained import load_tokenizer
from umbra.services.process.metrics import MetricsFile
from umbra.services.weights.receiver import StagedVersion

STOP = 3
LEASE_S = 30.0


@dataclass
class FakeSession:
    stopping: threading.Event = field(default_factory=threading.Event)
    stop_reason: str = "asked to"
    failure: UmbraError | None = None
    activities: list[str] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)

    def progress(self, activity: str, count: int = 1) -> None:
        del count
        self.activities.append(activity)

    def waits(self, activity: str) -> None:
        self.activities.append(f"{activity}: no progress")

    def stats(self, **values: float) -> None:
        self.figures |= values

    def emit(self, kind: str, **_fields: Any) -> None:
        self.events.append(kind)


@dataclass
class FakeReceiver:
    staged: StagedVersion | None = None
    answers: list[tuple[int, str]] = field(default_factory=list)
    failure: UmbraError | None = None

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def poll(self) -> StagedVersion | None:
        staged, self.staged = self.staged, None
        return staged

    def load(
        self,
        staged: StagedVersion,
        apply: Callable[[StagedVersion], None],
        timeout_s: float,
        stopping: threading.Event,
    ) -> StagedVersion:
        del timeout_s, stopping
        try:
            apply(staged)
        except UmbraError as error:
            self.answers.append((staged.version, str(error)))
            raise
        self.answers.append((staged.version, ""))
        return staged


def version(number: int) -> StagedVersion:
    entry = TensorEntry(name="w", dtype="F32", shape=[2], offset=0, nbytes=8)
    manifest = Manifest(tensors=[entry], buckets=[(0, 8)], total_bytes=8, digest="d")
    return StagedVersion(number, 1, manifest, memoryview(bytearray(8)))


@dataclass
class Bench:
    channel: FakeChannel
    session: FakeSession
    receiver: FakeReceiver
    engine: ScriptedEngine
    loop: GeneratorLoop
    metrics: Path
    now: list[float]
    wake: threading.Event

    def serve(self) -> None:
        self.receiver.staged = version(0)
        self.turns(1)

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.now[0] += 0.01
            self.loop.turn()

    def lease(self, *names: str, attempt: int = 1, pinned: int = -1) -> LeaseTasks:
        row, same = {"prompt": "1", "answer": "1"}, {"attempt": attempt, "pinned_version": pinned}
        tasks = [sample(row, sample_id=n, group_id=n, prompt_id=n, **same) for n in names]
        return self.channel.answer(LeaseTasks, TaskLeases(tasks=tasks))

    def answers(
        self, replies: Mapping[Any, Message], other: Message, monkeypatch: Any
    ) -> list[Message]:
        """Answer whatever is open each time that the loop waits, as the buffer's thread would."""
        answered: list[Message] = []

        def wait(timeout: float | None = None) -> bool:
            while self.channel.open:
                kind = type(self.channel.open[0][0])
                answered.append(self.channel.answer(kind, replies.get(kind, other)))
            return True

        monkeypatch.setattr(self.wake, "wait", wait)
        return answered

    def spans(self, name: str) -> list[dict[str, Any]]:
        lines = self.metrics.read_bytes().splitlines()
        rows = [msgspec.json.decode(line) for line in lines]
        return [row for row in rows if row["kind"] == "span" and row["name"] == name]


@contextmanager
def open_bench(
    folder: Path,
    model_dir: Path,
    *,
    drains: bool = False,
    sessions: int = 0,
    pool: EnvironmentPool | None = None,
) -> Iterator[Bench]:
    """A bench whose engine says "1", ten times, then ends."""
    tokenizer = load_tokenizer(model_dir)
    one = tokenizer("1", add_special_tokens=False)["input_ids"]
    engine = ScriptedEngine(lambda ids: one if len(ids) < 13 else [STOP], version=-1, slots=4)
    channel, session, receiver, now = FakeChannel(), FakeSession(), FakeReceiver(), [1000.0]
    wake = threading.Event()
    settings = RolloutSettings(
        Chat(tokenizer, {STOP}), Sampling(max_tokens=32), 256, clock=lambda: now[0]
    )
    path = folder / "metrics.jsonl"
    with closing(MetricsFile(path, "generator")) as metrics:
        loop = GeneratorLoop(
            session=cast(Any, session),
            receiver=cast(Any, receiver),
            buffer=TaskClient(cast(Any, channel), wake, clock=lambda: now[0]),
            runner=RolloutRunner(engine, pool or InlinePool(ExactMatch), settings, flush_tokens=4),
            config=GeneratorConfig(
                kv_policy="drain" if drains else "keep", slots=8, sessions=sessions
            ),
            watch=StallWatch("scripted", Pace(60.0, LEAST_RATE), clock=lambda: now[0]),
            activity=Activity(metrics, clock=lambda: now[0]),
        )
        yield Bench(channel, session, receiver, engine, loop, path, now, wake)
