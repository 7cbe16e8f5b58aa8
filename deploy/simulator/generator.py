"""A simulated generator: the replay engine's decoder, fed as the generator's loop does."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from umbra.deploy.simulator.answers import make_answer, size_of, versions_of
from umbra.deploy.simulator.desk import Client, SimulatedBroker
from umbra.deploy.simulator.hub import Hub
from umbra.deploy.simulator.rows import SimulatedEngine, SimulatedRow
from umbra.deploy.simulator.timeline import Shares, Timeline
from umbra.proto.messages import (
    Abort,
    Commit,
    Committed,
    FlushPartials,
    Interrupt,
    LeaseSamples,
    Message,
    Ok,
    Prepare,
    Ready,
    RenewAck,
    RenewLeases,
    ReturnedSample,
    ReturnSamples,
    SampleLeases,
    SubmitAck,
    SubmitTrajectories,
)
from umbra.proto.records import SampleTask, Trajectory
from umbra.services.generator.replay_model import ReplayDecoder
from umbra.services.weight_hub.effects import HubPeer

MOST_ACTIVE = 4  # samples per slot, those that wait for the environment included


class SimGenerator:
    """One engine and its process.

    Args:
        timeline: of the simulation.
        name: in the run.
        desk: of the broker.
        hub: of its node.
        engine: what all generators share.
        expelled: called when the broker took it for dead.
    """

    def __init__(
        self,
        timeline: Timeline,
        name: str,
        desk: SimulatedBroker,
        hub: Hub,
        engine: SimulatedEngine,
        expelled: Callable[[], object],
    ) -> None:
        self.name = name
        self.version = -1
        self.lost_tokens = 0  # decoded when it died, and not saved
        self.slot_seconds = 0.0  # of slots that were in use
        self.loads: list[tuple[int, float]] = []  # versions, and when it began to serve them
        self.shares = Shares(timeline)
        self.client = Client(desk, timeline, name, "generator", self._pushed, expelled)
        self._timeline = timeline
        self._hub = hub
        self._engine = engine
        self._rows: dict[str, SimulatedRow] = {}
        self._decoder = ReplayDecoder(engine.model, engine.config.slots)
        self._due = math.inf  # when something ends, for which an action is planned
        self._live, self._live_since = 0, 0.0
        self._tokens_before = 0  # decoded by earlier lives of it
        self._asked: set[int] = set()
        self._loading: Commit | None = None  # waits until all samples are done
        self._paused_until = 0.0
        self._renews = False

    # -- its life ---------------------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        return self.client.is_alive

    @property
    def peer(self) -> HubPeer:
        """Its name, and which start of it."""
        return HubPeer(self.name, self.client.incarnation)

    def start(self) -> None:
        """Join the run and subscribe to weights."""
        self.shares.to("weights")
        self.client.join(lambda: self._hub.subscribe(self))

    def die(self) -> None:
        """The process is gone; the broker keeps what was flushed before."""
        self._advance()
        self._flush()
        for row in self._rows.values():
            kept = max(self._flushed(row), row.kept_before)
            self.lost_tokens += self._progress(row) - kept
        self._count_live(0)
        self._tokens_before += self._decoder.tokens
        self._rows.clear()
        self._asked.clear()
        self._decoder = ReplayDecoder(self._engine.model, self._engine.config.slots)
        self._due, self._loading, self._renews, self.version = math.inf, None, False, -1
        self.client.die()
        self.shares.to("down")

    def count(self) -> tuple[int, float]:
        """Tokens decoded and seconds of slots in use, from the beginning until now."""
        self._count_live(self._live)
        return self._tokens_before + self._decoder.tokens, self.slot_seconds

    # -- weights ----------------------------------------------------------------------------------

    def told(self, message: Prepare | Commit | Abort) -> None:
        """The hub says what to do next."""
        match message:
            case Prepare(epoch=epoch, version=version):
                peer, stage_s = self.peer, self._engine.staging_s(self.name, version)
                ready = Ready(epoch=epoch, version=version, wire_s=0.0, stage_s=stage_s)
                self._timeline.after(stage_s, lambda: self._hub.ready(peer, ready))
            case Commit():
                self._loading = message
                self._advance()
                self._turn()
            case Abort(dropped=dropped):
                self._loading = None
                if dropped:
                    self._hub.subscribe(self)

    def _load(self) -> None:
        """Load what is committed, unless samples have to be finished before."""
        commit = self._loading
        if commit is None or (self._engine.drains and self._rows):
            return
        self._loading = None
        now, pause_s = self._timeline.now, self._engine.model.pause_s
        self._mark()
        self.version = commit.version
        self._decoder.pause(pause_s, now)
        policy = self._engine.config.kv_policy
        if policy == "recompute":
            self._decoder.reread()
        elif policy == "abort":
            self._restart_rows()
        self.loads.append((commit.version, now))
        self._paused_until = now + pause_s
        peer = self.peer
        done = Committed(epoch=commit.epoch, version=commit.version, commit_s=pause_s)

        def loaded() -> None:
            if self.is_alive and self.peer == peer:
                self._hub.committed(peer, done)
                self._turn()

        self._timeline.after(pause_s, loaded)

    def _restart_rows(self) -> None:
        """Every sequence under way goes on as a new request, which reads its tokens again."""
        for name in self._decoder.names():
            row = self._rows[name]
            row.done += self._decoder.remove(name) or 0
            row.marked = 0
            self._submit(row)

    # -- samples ----------------------------------------------------------------------------------

    def _turn(self) -> None:
        """What the generator's loop does after every step."""
        if not self.is_alive:
            return
        self._advance()
        self._load()
        self._ask()
        self._plan()
        self.shares.to(self._activity())

    def _activity(self) -> str:
        if self.version < 0:
            return "weights"
        if self._timeline.now < self._paused_until:
            return "loading weights"
        if self._decoder.live or self._decoder.queued:
            return "decoding"
        return "environment" if self._rows else "work"

    def _ask(self) -> None:
        config = self._engine.config
        wanting = self._decoder.live + self._decoder.queued
        room = min(
            config.slots + config.prefetch - wanting,
            (config.sessions or MOST_ACTIVE * config.slots + config.prefetch) - len(self._rows),
        )
        if room <= 0 or self.version < 0 or self.version in self._asked:
            return
        if self._loading or self._timeline.now < self._paused_until:
            return
        version = self.version
        self._asked.add(version)

        def granted(leases: SampleLeases) -> None:
            self._asked.discard(version)
            self._take(leases.tasks)
            self._turn()

        body = LeaseSamples(capacity=room, version=version, wait_s=self._engine.wait_s)
        self.client.ask(body, SampleLeases, granted)

    def _take(self, tasks: Sequence[SampleTask]) -> None:
        self._advance()
        if self._loading is not None:
            self._give_back(tasks)
            return
        for task in tasks:
            chance = self._engine.chance.of(task.sample_id)
            row = SimulatedRow(task, self._engine.model.length(chance))
            if task.partial is not None:
                row.done = int(size_of(task.partial)[0])
                row.versions = versions_of(task.partial)
            self._rows[task.sample_id] = row
            self._submit(row)
        if tasks and not self._renews:
            self._renews = True
            self._renew(self.client.incarnation, tasks[0].lease_s / 3)

    def _give_back(self, tasks: Sequence[SampleTask]) -> None:
        """Others may begin these sooner than we."""
        returned = [
            ReturnedSample(
                sample_id=task.sample_id,
                attempt=task.attempt,
                reason="new weights are waited for",
                partial=task.partial,
            )
            for task in tasks
        ]
        self._hand_back(returned)

    def _hand_back(self, samples: list[ReturnedSample]) -> None:
        if samples:
            self.client.ask(ReturnSamples(samples=samples), Ok, lambda _reply: None)

    def _submit(self, row: SimulatedRow) -> None:
        prompt = self._engine.prompt_tokens + row.done
        left = max(1, row.total - row.done)
        self._decoder.submit(row.name, prompt, left, self._timeline.now)

    def _renew(self, incarnation: str, period: float) -> None:
        def again() -> None:
            if self.client.incarnation != incarnation or not self.is_alive:
                return
            held = [(row.name, row.task.attempt) for row in self._rows.values()]
            if held:
                self.client.ask(RenewLeases(leases=held), RenewAck, self._lost)
            self._timeline.after(period, again)

        self._timeline.after(period, again)

    def _lost(self, answer: RenewAck) -> None:
        self._advance()
        for name in answer.lost:
            if self._rows.pop(name, None) is not None:
                self._decoder.remove(name)
        if answer.lost:
            self._turn()

    def _pushed(self, message: Message) -> None:
        if not isinstance(message, Interrupt):
            return  # the end of the run
        self._advance()
        self._mark()
        returned: list[ReturnedSample] = []
        for name, attempt in message.leases:
            row = self._rows.get(name)
            if row is None or row.task.attempt != attempt:
                continue
            tokens = self._progress(row)
            self._decoder.remove(name)
            del self._rows[name]
            partial = self._answer(row, tokens) if tokens else None
            returned.append(
                ReturnedSample(
                    sample_id=name, attempt=attempt, reason=message.reason, partial=partial
                )
            )
        self._hand_back(returned)
        self._turn()

    # -- the engine -------------------------------------------------------------------------------

    def _plan(self) -> None:
        """Come back when the next sequence ends."""
        at = self._decoder.next_at()
        self._count_live(self._decoder.live)
        if at is None:
            self._due = math.inf
            return
        at = max(at, self._timeline.now)
        if at != self._due:
            self._due = at

            def due() -> None:
                if self._due == at:
                    self._due = math.inf
                    self._turn()

            self._timeline.at(at, due)

    def _advance(self) -> None:
        """Decode until now; what is finished goes to its environment, or to the broker."""
        finished = self._decoder.advance(self._timeline.now)
        self._count_live(self._decoder.live)
        ready: list[SimulatedRow] = []
        for name in finished:
            row = self._rows[name]
            row.add_version(self.version)
            row.decoding = False
            if self._engine.environment_s:
                self._begin_environment(row)
            else:
                ready.append(row)
        self._deliver(ready)

    def _begin_environment(self, row: SimulatedRow) -> None:
        name, incarnation = row.name, self.client.incarnation
        chance = self._engine.chance.of(f"{name} environment")
        seconds = -self._engine.environment_s * math.log(1.0 - chance)

        def rewarded() -> None:
            if self.client.incarnation == incarnation and self._rows.get(name) is row:
                self._deliver([row])
                self._turn()

        self._timeline.after(seconds, rewarded)

    def _deliver(self, rows: Sequence[SimulatedRow]) -> None:
        if not rows:
            return
        for row in rows:
            del self._rows[row.name]
        answers = [self._answer(row, row.total) for row in rows]
        self.client.ask(SubmitTrajectories(trajectories=answers), SubmitAck, lambda _reply: None)

    def _answer(self, row: SimulatedRow, tokens: int) -> Trajectory:
        engine = self._engine
        reward = engine.reward(row.task)
        return make_answer(row.task, row.versions, tokens, engine.prompt_tokens, reward)

    def _mark(self) -> None:
        """The tokens that were decoded so far are of the version that is served."""
        for name in self._decoder.names():
            row = self._rows[name]
            if (made := self._decoder.made(name)) > row.marked:
                row.marked = made
                row.add_version(self.version)

    def _progress(self, row: SimulatedRow) -> int:
        """Tokens of a sample so far."""
        if not row.decoding:
            return row.total
        return row.done + self._decoder.made(row.name)

    def _flushed(self, row: SimulatedRow) -> int:
        """Tokens of it that were flushed last."""
        every = self._engine.config.partial_flush_tokens
        return self._progress(row) // every * every if every else 0

    def _flush(self) -> None:
        """Send what was flushed last of each sample; only now, as only a loss makes use of it."""
        if not self._engine.config.partial_flush_tokens:
            return
        self._mark()
        partials = [
            self._answer(row, kept)
            for row in self._rows.values()
            if (kept := self._flushed(row)) > row.kept_before
        ]
        if partials:
            self.client.ask(FlushPartials(partials=partials), RenewAck, lambda _reply: None)

    def _count_live(self, live: int) -> None:
        now = self._timeline.now
        self.slot_seconds += self._live * (now - self._live_since)
        self._live, self._live_since = live, now
