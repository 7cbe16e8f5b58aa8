"""Whatever peers do, in whatever order: no sample is lost or trained twice, and none is too old."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from fakes.broker_world import World, trajectory
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from umbra.proto.messages import (
    BatchLease,
    CommitBatch,
    FinishRun,
    LeaseBatch,
    LeaseTasks,
    Leave,
    Nack,
    RenewLeases,
    ReturnedSample,
    ReturnTasks,
    RunFinished,
    SubmitResults,
    TaskLeases,
)
from umbra.proto.records import Task, Trajectory
from umbra.services.buffer.samples.pool import State

GENERATORS: tuple[str, ...] = ("a", "b", "c")
LEASE_S = 10.0
STEPS = 6

names = st.sampled_from(GENERATORS)
picks = st.integers(0, 1 << 16)


class BrokerMachine(RuleBasedStateMachine):
    """Generators that lease, answer, repeat themselves, come late, lie, fail and die; a trainer
    that crashes. What the peers know is kept apart from what the broker knows.
    """

    @initialize(
        group_size=st.integers(1, 3),
        batch_groups=st.integers(1, 2),
        run_ahead=st.integers(0, 3),
        max_staleness=st.integers(0, 2),
        max_attempts=st.integers(1, 4),
    )
    def start(self, **buffer: int) -> None:
        self.world = self.make_world(**buffer)
        self.broker = self.world.broker
        self.batch_size = buffer["group_size"] * buffer["batch_groups"]
        self.bound = buffer["max_staleness"] if buffer["run_ahead"] else 0
        self.run_ahead = buffer["run_ahead"]
        self.lives = 0
        self.serving: dict[str, int] = dict.fromkeys(GENERATORS, 0)
        self.tasks: list[tuple[str, Task]] = []  # every task that was ever handed out
        self.sent: list[tuple[str, Trajectory]] = []
        self.batch: BatchLease | None = None
        self.version = 0
        self.trained: set[str] = set()
        self.finished = False
        for name in (*GENERATORS, "trainer"):
            self.come(name)

    def make_world(self, **buffer: Any) -> World:
        return World(steps=STEPS, lease_s=LEASE_S, dead_after_s=25, **buffer)

    def come(self, name: str) -> None:
        self.lives += 1
        self.world.join(
            "trainer" if name == "trainer" else "generator", name, f"{name}-{self.lives}"
        )
        self.collect()

    def ensure(self, name: str) -> None:
        """Let `name` take part if it does not."""
        if name not in self.broker.members.peers:
            self.come(name)

    def collect(self) -> None:
        """Take in what came for parked requests."""
        for name, messages in self.world.late.items():
            for message in messages:
                if isinstance(message, TaskLeases):
                    self.tasks += [(name, task) for task in message.tasks]
                elif isinstance(message, BatchLease):
                    self.leased(message)
            messages.clear()

    def leased(self, lease: BatchLease) -> None:
        """An answer to the trainer, in full or not."""
        if lease.trajectories:
            self.got(lease)

    def got(self, batch: BatchLease) -> None:
        if self.batch is not None and self.batch.step == batch.step:
            assert batch == self.batch, "the same step, another batch"
        self.batch = batch
        assert batch.step == self.version + 1
        assert len(batch.trajectories) == self.batch_size
        for made in batch.trajectories:
            assert 0 <= self.version - made.oldest_version <= self.bound
            assert made.sample_id not in self.trained

    # -- generators -------------------------------------------------------------------------------

    @rule(name=names, capacity=st.integers(1, 8), wait_s=st.sampled_from([0.0, 7.0]))
    def lease(self, name: str, capacity: int, wait_s: float) -> None:
        body = LeaseTasks(capacity=capacity, version=self.serving[name], wait_s=wait_s)
        reply = self.world.ask(name, body)
        if isinstance(reply, TaskLeases):
            self.tasks += [(name, task) for task in reply.tasks]
            assert len(reply.tasks) <= capacity
        self.collect()

    @rule(name=names, capacity=st.integers(1, 16), updated=st.booleans())
    def work(self, name: str, capacity: int, updated: bool) -> None:
        """What a sound generator does: lease, and answer most of it."""
        self.ensure(name)
        known = len(self.tasks)
        self.serving[name] = self.version if updated else self.serving[name]
        self.lease(name, capacity, 0.0)
        own = [task for holder, task in self.tasks[known:] if holder == name]
        made = [self.answer(name, task, False) for task in own[:8]]
        self.world.ask(name, SubmitResults(trajectories=made))
        self.sent += [(name, one) for one in made]
        self.collect()

    @rule(name=names)
    def load_weights(self, name: str) -> None:
        self.serving[name] = self.version

    @precondition(lambda self: self.tasks)
    @rule(pick=picks, newest=st.booleans(), updated=st.booleans(), sound=st.integers(0, 9))
    def submit(self, pick: int, newest: bool, updated: bool, sound: int) -> None:
        """Answer any task that was ever handed out, in time or not."""
        name, task = self.tasks[-1 - pick % min(8, len(self.tasks))] if newest else self.pick(pick)
        made = self.answer(name, task, updated, **({} if sound else {"loss_mask": b""}))
        self.world.ask(name, SubmitResults(trajectories=[made]))
        self.sent.append((name, made))
        self.collect()

    @precondition(lambda self: self.sent)
    @rule(pick=picks)
    def submit_again(self, pick: int) -> None:
        name, made = self.sent[pick % len(self.sent)]
        self.world.ask(name, SubmitResults(trajectories=[made]))
        self.collect()

    @precondition(lambda self: self.tasks)
    @rule(pick=picks, has_partial=st.booleans(), failed=st.booleans())
    def give_back(self, pick: int, has_partial: bool, failed: bool) -> None:
        name, task = self.pick(pick)
        partial = trajectory(task, self.serving[name], finish_reason="partial")
        returned = ReturnedSample(
            sample_id=task.sample_id,
            attempt=task.attempt,
            reason="x",
            failed=failed,
            partial=partial if has_partial else None,
        )
        self.world.ask(name, ReturnTasks(samples=[returned]))
        self.collect()

    @rule(name=names)
    def renew(self, name: str) -> None:
        own = [(task.sample_id, task.attempt) for holder, task in self.tasks if holder == name]
        self.world.ask(name, RenewLeases(leases=own))

    @rule(name=names)
    def restart(self, name: str) -> None:
        self.come(name)

    @rule(name=names)
    def leave(self, name: str) -> None:
        self.world.ask(name, Leave(reason="x"))
        self.collect()

    def answer(self, name: str, task: Task, updated: bool, **changes: object) -> Trajectory:
        versions = [self.serving[name]] + [self.version] * updated
        if task.trajectory is not None:
            versions.insert(0, task.trajectory.oldest_version)
        return trajectory(task, *versions, **changes)

    def pick(self, pick: int) -> tuple[str, Task]:
        return self.tasks[pick % len(self.tasks)]

    # -- the trainer ------------------------------------------------------------------------------

    @rule(wait_s=st.sampled_from([0.0, 7.0]))
    def lease_batch(self, wait_s: float) -> None:
        self.ensure("trainer")
        reply = self.world.ask("trainer", LeaseBatch(step=self.version + 1, wait_s=wait_s))
        if isinstance(reply, BatchLease):
            self.leased(reply)
        self.collect()

    @precondition(lambda self: self.batch is not None and self.batch.step == self.version + 1)
    @rule()
    def commit(self) -> None:
        assert self.batch is not None
        reply = self.world.ask("trainer", CommitBatch(step=self.batch.step))
        if not isinstance(reply, Nack):
            self.version = self.batch.step
            self.trained |= {made.sample_id for made in self.batch.trajectories}
        self.collect()

    @precondition(lambda self: len(self.broker.pool.complete) > 0)
    @rule()
    def train(self) -> None:
        """What a sound trainer does."""
        self.lease_batch(0.0)
        if self.batch is not None and self.batch.step == self.version + 1:
            self.commit()

    @rule(step=st.integers(-1, STEPS + 1))
    def commit_something_else(self, step: int) -> None:
        if self.batch is None or step != self.batch.step or step <= self.version:
            self.world.ask("trainer", CommitBatch(step=step))
            self.collect()

    @rule()
    def restart_trainer(self) -> None:
        self.come("trainer")

    # -- time and the end -------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([1.0, LEASE_S, 30.0]), alive=st.booleans())
    def wait(self, seconds: float, alive: bool) -> None:
        if alive:
            for name in (*GENERATORS, "trainer"):
                self.world.beat(name)
        self.world.pass_time(seconds)
        self.collect()

    @precondition(lambda self: self.version >= STEPS - 1)
    @rule()
    def finish(self) -> None:
        reply = self.world.ask("trainer", FinishRun(reason="x"))
        if isinstance(reply, RunFinished):
            self.finished = True
            assert not any(reply.ledger.in_flight.values())
        self.collect()

    # -- what always holds ------------------------------------------------------------------------

    @invariant()
    def every_sample_is_in_exactly_one_place(self) -> None:
        pool, ledger = self.broker.pool, self.broker.pool.ledger
        assert ledger.snapshot().balance == 0
        issued = {f"s-{number}" for number in range(ledger.issued)}
        assert set(pool.samples) | set(pool.over) == issued
        assert not set(pool.samples) & set(pool.over)
        for state in ("queued", "generating", "ready", "training"):
            assert ledger.count(state) == sum(s.state == state for s in pool.samples.values())

    @invariant()
    def leases_are_those_of_members(self) -> None:
        """Samples that have a holder are in the table, and no others; only members have any."""
        run = self.broker.run
        table = run.leases
        held = {s.sample_id: name for name, own in table.held.items() for s in own.values()}
        samples = [*run.pool.samples.values(), *run.evals.pool.samples.values()]
        assert held == {s.sample_id: s.holder for s in samples if s.holder}
        assert len(table) == len(held)
        assert {s.state for s in samples if s.holder} <= {State.GENERATING, State.SCORING}
        assert all(s.holder for s in samples if s.state is State.GENERATING)
        assert set(held.values()) <= set(self.broker.members.peers)

    @invariant()
    def the_ledger_is_what_the_trainer_knows(self) -> None:
        over = self.broker.pool.over
        assert {name for name, outcome in over.items() if outcome.end == "trained"} == self.trained
        assert self.broker.pool.ledger.trained == len(self.trained)
        assert self.broker.batches.version == self.version

    @invariant()
    def generation_is_not_too_far_ahead(self) -> None:
        gate = (min(self.version + self.run_ahead, STEPS - 1) + 1) * self.batch_size
        assert self.broker.pool.ledger.live <= gate

    @invariant()
    def only_live_samples_take_memory(self) -> None:
        assert len(self.world.store.keys("t/s-")) <= len(self.broker.pool.samples)

    def teardown(self) -> None:
        """From any state, honest peers bring the run to its end: nothing can deadlock."""
        if not hasattr(self, "world"):
            return
        if not self.finished:
            for name in (*GENERATORS, "trainer"):
                self.come(name)
            for _ in range(10 * STEPS):
                self.work_honestly()
            assert self.version == STEPS or self.finished
        self.every_sample_is_in_exactly_one_place()

    def work_honestly(self) -> None:
        for name in GENERATORS:
            self.load_weights(name)
            self.tasks.clear()
            self.lease(name, 100, 0.0)
            for holder, task in self.tasks:
                made = self.answer(holder, task, False)
                self.world.ask(holder, SubmitResults(trajectories=[made]))
        if self.version < STEPS:
            self.lease_batch(0.0)
            if self.batch is not None and self.batch.step == self.version + 1:
                self.commit()


TestBroker = BrokerMachine.TestCase
TestBroker.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
