"""The buffer as a state machine: peers do anything, in any order, under all sets of policies.

No sample is lost or trained twice, none is too old, the ledger balances, and honest peers can
always end the run.
"""

from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from fakes.broker_world import World, trajectory
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from umbra.proto import messages as m
from umbra.proto.records import Score, Task, Trajectory, pack_float32
from umbra.services.buffer.endpoints.trainer import interrupt
from umbra.services.buffer.samples.groups import State
from umbra.services.buffer.state import pack_run
from umbra.services.config import EvalConfig, NamedEnvironment
from umbra.services.prompts import Prompt

GENERATORS = ("a", "b", "c")
SCORERS = ("x", "y")
STEPS = 6
STAGES = st.lists(st.sampled_from(["reward", "ref_logp", "logp"]), unique=True, max_size=3)
# Without stages and policies whole runs fit into a test.
PLAIN: st.SearchStrategy[Any] = st.just({"stages": [], "oversample": 0})
RANKED = NamedEnvironment(name="ranked", kind="reward", reward_scope="group")
ALONE = NamedEnvironment(name="alone", kind="reward")

names = st.sampled_from(GENERATORS)
scorers = st.sampled_from(SCORERS)
picks = st.integers(0, 1 << 16)


@pytest.fixture(autouse=True, scope="module")
def limit() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EvalConfig, "timeout_s", 60.0)
        yield


class BrokerMachine(RuleBasedStateMachine):
    """Generators and scorers that lease, answer, repeat themselves, come late, lie, fail and die; a
    trainer that crashes; a buffer that is killed. What peers know is kept apart from the broker's.
    """

    @initialize(
        sizes=st.fixed_dictionaries(
            {
                "group_size": st.integers(1, 3),
                "batch_groups": st.integers(1, 2),
                "run_ahead": st.integers(0, 3),
                "max_staleness": st.integers(0, 2),
                "max_attempts": st.integers(1, 4),
            }
        ),
        policies=PLAIN | st.fixed_dictionaries(
            {
                "stages": STAGES,
                "stale_policy": st.sampled_from(["drop", "wait"]),
                "oversample": st.integers(0, 1),
                "on_batch": st.sampled_from(["continue", "interrupt"]),
                "straggler_s": st.sampled_from([0.0, 5.0, 40.0]),
                "dynamic_sampling": st.booleans(),
                "max_filtered": st.integers(1, 3),
            }
        ),
        durable=st.booleans(),
        every=st.integers(0, 3),
        mode=st.sampled_from(["pause", "concurrent"]),
        whole=st.sampled_from(["no", "yes", "some"]),
    )  # fmt: skip
    def start(
        self, sizes: Any, policies: Any, durable: bool, every: int, mode: Any, whole: str
    ) -> None:
        if "on_batch" not in policies:
            whole, every = "no", 0
        self.whole = whole != "no"
        environments = (RANKED, ALONE) if whole == "some" else ()
        if self.whole:  # groups are scored at once
            stages = [*dict.fromkeys([*policies["stages"], "reward"])]
            policies = {**policies, "straggler_s": 0.0, "stages": stages}
        self.policies, self.groups = policies, sizes["batch_groups"]
        self.bound = sizes["max_staleness"] if sizes["run_ahead"] else 0
        self.run_ahead, self.durable = sizes["run_ahead"], durable
        self.batch_size = sizes["group_size"] * self.groups
        self.world = World(
            steps=STEPS,
            durable=durable,
            eval_config=EvalConfig(
                every=every, mode=mode, samples=2 * max(1, len(environments)),
                samples_per_prompt=1 + self.whole, prompts="x",
            ),
            eval_prompts=[
                Prompt(name or "h", {"prompt": "held out", "environment": name})
                for name in ([one.name for one in environments] or [""])
            ],
            reward_scope="group" if self.whole else "sample",
            environments=environments,
            lease_s=10.0,
            dead_after_s=25,
            **sizes,
            **policies,
        )  # fmt: skip
        self.lives = 0
        self.serving: dict[str, int] = dict.fromkeys(GENERATORS, 0)
        self.tasks: list[tuple[str, Task]] = []  # every task that was ever handed out
        self.sent: list[tuple[str, Trajectory]] = []
        self.scoring: list[tuple[str, str, Task]] = []
        self.judged: list[set[tuple[str, int]]] = []  # samples and attempts, by message
        self.batch: m.BatchLease | None = None
        self.version = 0
        self.uses: dict[int, list[str]] = {}  # by committed step: its samples
        self.finished = False
        for name in (*GENERATORS, *SCORERS, "trainer"):
            self.come(name)

    @property
    def broker(self) -> Any:
        return self.world.broker

    @rule(name=st.sampled_from([*GENERATORS, *SCORERS, "trainer"]))
    def come(self, name: str) -> None:
        self.lives += 1
        role: Any = "scorer" if name in SCORERS else "generator"
        role = "trainer" if name == "trainer" else role
        self.world.join(role, name, f"{name}-{self.lives}")
        self.collect()

    def ensure(self, name: str) -> None:
        """Let `name` take part if it does not."""
        if name not in self.broker.members.peers:
            self.come(name)

    def tell(self, name: str, body: m.Message) -> m.Message | None:
        """`name` sends `body`, and all take in what came for parked requests."""
        reply = self.world.ask(name, body)
        self.collect()
        return reply

    def collect(self) -> None:
        for name, messages in self.world.late.items():
            for message in messages:
                if isinstance(message, m.TaskLeases):
                    self.tasks += [(name, task) for task in message.tasks]
                elif isinstance(message, m.BatchLease):
                    self.got(message)
                self.finished |= isinstance(message, m.RunFinished)
            messages.clear()

    def got(self, batch: m.BatchLease) -> None:
        """An answer to the trainer, in full or not."""
        if not batch.trajectories:
            return
        if self.batch is not None and self.batch.step == batch.step:
            before = msgspec.structs.replace(self.batch, evals=batch.evals)  # one may be over since
            assert batch == before, "the same step, another batch"
        self.batch = batch
        assert batch.step == self.version + 1
        samples = [made.sample_id for made in batch.trajectories]
        assert len(set(samples)) == len(samples) <= self.batch_size
        if not self.policies.get("straggler_s"):
            assert len(samples) == self.batch_size
        assert self.uses.get(batch.step, samples) == samples, "the same step, another batch"
        assert not self.used(batch.step) & set(samples)
        for made, sent in zip(batch.scored(), batch.trajectories, strict=True):
            assert self.version - made.oldest_version <= self.bound
            assert made.oldest_version <= max(self.uses, default=0)
            assert made.scored == self.policies["stages"]
            assert ("ref_logp" in made.scored) == (made.ref_logprobs is not None)
            assert made.ref_logprobs in (None, logprobs_of(made))
            if made.prompt_id.startswith(f"{ALONE.name}/"):
                assert (made.reward, made.reward_parts) == (sent.reward, {})
            elif "reward" in made.scored:
                assert made.reward_parts["response"] == made.attempt
        if self.whole:  # the rewards of a group are of one message, and of these very responses
            groups: dict[str, list[Trajectory]] = {}
            for made in batch.scored():
                if not made.prompt_id.startswith(f"{ALONE.name}/"):
                    groups.setdefault(made.group_id, []).append(made)
            for group in groups.values():
                (number,) = {int(made.reward_parts["judged"]) for made in group}
                assert self.judged[number] == {(one.sample_id, one.attempt) for one in group}

    def used(self, before: int = STEPS + 1) -> set[str]:
        return {name for step, all_of in self.uses.items() if step < before for name in all_of}

    # -- generators -------------------------------------------------------------------------------

    @rule(name=names, capacity=st.integers(1, 8), wait_s=st.sampled_from([0.0, 7.0]))
    def lease(self, name: str, capacity: int, wait_s: float) -> None:
        body = m.LeaseTasks(capacity=capacity, version=self.serving[name], wait_s=wait_s)
        reply = self.tell(name, body)
        if isinstance(reply, m.TaskLeases):
            self.tasks += [(name, task) for task in reply.tasks]
            assert len(reply.tasks) <= capacity

    @rule(name=names, capacity=st.integers(1, 16), updated=st.booleans())
    def work(self, name: str, capacity: int, updated: bool) -> None:
        """Act as a sound generator: lease, and answer most of it."""
        self.ensure(name)
        known = len(self.tasks)
        self.serving[name] = self.version if updated else self.serving[name]
        self.lease(name, capacity, 0.0)
        own = [task for holder, task in self.tasks[known:] if holder == name]
        made = [self.answer(name, task, False) for task in own[:8]]
        self.sent += [(name, one) for one in made]
        self.tell(name, m.SubmitResults(trajectories=made))

    @rule(name=names)
    def load_weights(self, name: str) -> None:
        self.serving[name] = self.version

    @precondition(lambda self: self.tasks)
    @rule(pick=picks, newest=st.booleans(), updated=st.booleans(), sound=st.integers(0, 9))
    def submit(self, pick: int, newest: bool, updated: bool, sound: int) -> None:
        """Answer any task that was ever handed out, in time or not."""
        name, task = self.tasks[-1 - pick % min(8, len(self.tasks))] if newest else self.pick(pick)
        made = self.answer(name, task, updated, **({} if sound else {"loss_mask": b""}))
        self.sent.append((name, made))
        self.tell(name, m.SubmitResults(trajectories=[made]))

    @precondition(lambda self: self.sent)
    @rule(pick=picks)
    def submit_again(self, pick: int) -> None:
        name, made = self.sent[pick % len(self.sent)]
        self.tell(name, m.SubmitResults(trajectories=[made]))

    @precondition(lambda self: self.tasks)
    @rule(pick=picks, has_partial=st.booleans(), failed=st.booleans(), flush=st.booleans())
    def give_back(self, pick: int, has_partial: bool, failed: bool, flush: bool) -> None:
        name, task = self.pick(pick)
        partial = trajectory(task, self.serving[name], finish_reason="partial")
        if flush:
            self.tell(name, m.RenewLeases(partials=[partial]))
            return
        returned = m.ReturnedSample(
            sample_id=task.sample_id, attempt=task.attempt, reason="x", failed=failed,
            partial=partial if has_partial else None,
        )  # fmt: skip
        self.tell(name, m.ReturnTasks(samples=[returned]))

    @rule(name=names)
    def renew(self, name: str) -> None:
        own = [(task.sample_id, task.attempt) for holder, task in self.tasks if holder == name]
        self.tell(name, m.RenewLeases(leases=own))

    @rule(name=names)
    def leave(self, name: str) -> None:
        self.tell(name, m.Leave(reason="x"))

    @rule()
    def interrupt(self) -> None:
        interrupt(self.broker.run, "now")
        self.broker._moved = True  # as whatever is dispatched has it
        self.world.take(self.broker.run.outbox.take())
        self.broker.save()

    def answer(self, name: str, task: Task, updated: bool, **changes: object) -> Trajectory:
        versions = [self.serving[name]] + [self.version] * updated
        if task.trajectory is not None:
            versions.insert(0, task.trajectory.oldest_version)
        return trajectory(task, *versions, **changes)

    def pick(self, pick: int) -> tuple[str, Task]:
        return self.tasks[pick % len(self.tasks)]

    # -- scorers ----------------------------------------------------------------------------------

    @precondition(lambda self: self.policies["stages"])
    @rule(name=scorers, stage=st.integers(0, 2), capacity=st.integers(1, 4))
    def to_score(self, name: str, stage: int, capacity: int) -> None:
        stages = self.policies["stages"]
        kind = stages[stage % len(stages)]
        reply = self.tell(name, m.LeaseTasks(kind=kind, capacity=capacity, wait_s=0))
        for task in reply.tasks if isinstance(reply, m.TaskLeases) else ():
            self.scoring.append((name, kind, task))
            assert kind != "reward" or task.row.get("environment") != ALONE.name

    @precondition(lambda self: self.scoring)
    @rule(pick=picks, good=st.integers(0, 3), all_of_it=st.integers(0, 3))
    def submit_score(self, pick: int, good: int, all_of_it: int) -> None:
        """Answer anything that was ever handed out, in time or not, with a score or an error.

        Mostly with the scores of all of its group that came with it.
        """
        name, stage, task = self.scoring[pick % len(self.scoring)]
        same = {
            t.sample_id: t
            for n, s, t in self.scoring
            if (n, s, t.attempt, t.group_id) == (name, stage, task.attempt, task.group_id)
        }
        tasks = list(same.values()) if all_of_it else [task]
        self.tell(name, m.SubmitResults(scores=self.judge(tasks, pick % 2, bool(good))))

    def judge(self, tasks: list[Task], reward: float, good: bool) -> list[Score]:
        """Scores that fit any stage, or errors, which name the message that they come in."""
        self.judged.append({(t.sample_id, t.made.attempt) for t in tasks})
        number = float(len(self.judged) - 1)
        return [
            Score(
                sample_id=task.sample_id,
                attempt=task.attempt,
                reward=float(reward),
                reward_parts={"judged": number, "response": float(task.made.attempt)},
                logprobs=logprobs_of(task.made),
                error="" if good else "did not work",
            )
            for task in tasks
        ]

    # -- the trainer ------------------------------------------------------------------------------

    @rule(wait_s=st.sampled_from([0.0, 7.0]))
    def lease_batch(self, wait_s: float) -> None:
        self.ensure("trainer")
        reply = self.world.ask("trainer", m.LeaseBatch(step=self.version + 1, wait_s=wait_s))
        if isinstance(reply, m.BatchLease):
            self.got(reply)
        self.collect()

    @precondition(lambda self: self.batch is not None and self.batch.step == self.version + 1)
    @rule()
    def commit(self) -> None:
        assert self.batch is not None
        step, samples = self.batch.step, [made.sample_id for made in self.batch.trajectories]
        reply = self.world.ask("trainer", m.CommitBatch(step=step))
        if not isinstance(reply, m.Nack):
            self.version, self.uses[step] = step, samples
        self.collect()

    @precondition(lambda self: len(self.broker.pool.complete) > 0)
    @rule()
    def train(self) -> None:
        if self.version < STEPS:
            self.lease_batch(0.0)
        if self.batch is not None and self.batch.step == self.version + 1:
            self.commit()

    @rule(step=st.integers(-1, STEPS + 1))
    def commit_something_else(self, step: int) -> None:
        if step != self.version + 1 or step not in self.broker.batches.formed:
            self.tell("trainer", m.CommitBatch(step=step))

    @rule()
    def save_a_checkpoint(self) -> None:
        self.tell("trainer", m.CheckpointSaved(step=self.version))

    @precondition(lambda self: self.durable)
    @rule()
    def the_trainer_loses_its_steps_since_the_checkpoint(self) -> None:
        self.come("trainer")
        step = (self.broker.batches.checkpoint or 0) + 1
        if step > self.version or self.finished:
            return
        reply = self.world.ask("trainer", m.LeaseBatch(step=step, wait_s=0))
        assert isinstance(reply, m.BatchLease), reply
        self.version, self.batch = step - 1, None
        self.got(reply)
        self.collect()

    # -- time, the buffer's death and the end -----------------------------------------------------

    @rule(seconds=st.sampled_from([1.0, 10.0, 30.0]), alive=st.booleans())
    def wait(self, seconds: float, alive: bool) -> None:
        for name in (*GENERATORS, *SCORERS, "trainer") if alive else ():
            self.world.beat(name)
        self.world.pass_time(seconds)
        self.collect()

    @precondition(lambda self: self.durable)
    @rule()
    def kill_the_buffer(self) -> None:
        held, before = self.holders(), self.kept()
        self.world.restart_broker()
        assert self.kept() == before
        assert self.holders() == held

    def kept(self) -> tuple[bytes, object]:
        """All that is to be the same after a restart, but for the count of restarts."""
        run = self.broker.run
        run.counters["restarts"] = 0
        return pack_run(run), run.pool.ledger.snapshot()

    @precondition(lambda self: self.version >= STEPS - 1)
    @rule()
    def finish(self) -> None:
        reply = self.tell("trainer", m.FinishRun(reason="x"))
        if isinstance(reply, m.RunFinished):
            self.finished = True
            assert not any(reply.ledger.in_flight.values())

    def holders(self) -> dict[str, str]:
        return {s.sample_id: s.holder for s in self.broker.pool.samples.values() if s.holder}

    # -- what always holds ------------------------------------------------------------------------

    @invariant()
    def every_sample_is_in_exactly_one_place(self) -> None:
        pool, ledger = self.broker.pool, self.broker.pool.ledger
        assert ledger.snapshot().balance == 0
        issued = {f"s-{number}" for number in range(ledger.issued)}
        assert set(pool.samples) <= issued
        assert len(pool.samples) == sum(ledger.in_flight.values())
        for state in ("queued", "generating", "scoring", "ready", "training"):
            assert ledger.in_flight[state] == sum(s.state == state for s in pool.samples.values())

    @invariant()
    def leases_are_those_of_members(self) -> None:
        """Samples that have a holder are in the table, and no others; only members have any."""
        run = self.broker.run
        table = run.leases
        held = {s.sample_id: name for name, own in table.held.items() for s in own.values()}
        samples = [*run.pool.samples.values(), *run.evals.pool.samples.values()]
        assert held == {s.sample_id: s.holder for s in samples if s.holder}
        assert {s.sample_id for s in table.deadlines} == set(held)
        assert {s.state for s in samples if s.holder} <= {State.GENERATING, State.SCORING}
        assert all(s.holder for s in samples if s.state is State.GENERATING)
        assert set(held.values()) <= set(self.broker.members.peers)

    @invariant()
    def scoring_samples_are_scored_by_members_or_wait(self) -> None:
        pool = self.broker.pool
        for sample in pool.samples.values():
            if sample.state is State.SCORING:
                queue = pool.unscored[pool.stage_of(sample)]
                if pool.stage_of(sample) == "reward":
                    assert sample.group.prompt.row.get("environment") != ALONE.name
                assert sample in queue or sample.holder or not pool.scored_with(sample)

    @invariant()
    def the_ledger_is_what_the_trainer_knows(self) -> None:
        pool, trained = self.broker.pool, self.used(self.version + 1)
        assert not trained & set(pool.samples)
        stats = self.broker.batches.trained
        assert pool.ledger.trained == stats.samples == sum(stats.counts) == len(trained)
        assert self.broker.batches.version == self.version

    @invariant()
    def generation_is_not_too_far_ahead(self) -> None:
        """Batches that wait for another training count on top."""
        batches = self.broker.batches
        gate = min(self.run_ahead + 1, STEPS - self.version) * self.groups
        again = sum(len(batch.groups) for batch in batches.formed.values()) * self.durable
        assert batches.untrained <= gate + self.policies["oversample"] + again

    @invariant()
    def ages_are_those_of_a_look_at_all_samples(self) -> None:
        for group in self.broker.pool.groups.values():
            known = [one.oldest_possible for one in group.samples]
            assert group.oldest == min((one for one in known if one is not None), default=None)

    @invariant()
    def only_live_samples_take_memory(self) -> None:
        kept = {name for step in self.broker.batches.kept for name in self.uses[step]}
        stored = {key[2:] for key in self.world.store.keys("t/s-")}
        assert stored <= set(self.broker.pool.samples) | kept
        rows = {key[2:] for key in self.world.store.keys("r/")}
        assert self.broker.pool.journal._issued <= rows | self.broker.pool.journal.changed.keys()

    @invariant()
    def evaluations_have_a_ledger_of_their_own(self) -> None:
        evals = self.broker.run.evals
        assert evals.pool.ledger.snapshot().balance == 0
        for report in evals.reports:
            assert report.answered + sum(report.ended.values()) == report.samples
        for one in evals.pool.samples.values():
            if one.state is State.READY:
                assert one.oldest == one.newest == evals.open.pinned

    def teardown(self) -> None:
        """From any state, honest peers bring the run to its end: nothing can deadlock."""
        if not hasattr(self, "uses"):
            return
        if not self.finished:
            for name in (*GENERATORS, *SCORERS, "trainer"):
                self.come(name)
            for _ in range(10 * STEPS):
                if self.version < STEPS and not self.finished:
                    self.work_honestly()
            assert self.version == STEPS or self.finished
        self.every_sample_is_in_exactly_one_place()

    def work_honestly(self) -> None:
        self.world.pass_time(0.5)
        for name in (*GENERATORS, *SCORERS, "trainer"):
            self.world.beat(name)
        for name in GENERATORS:
            self.load_weights(name)
            self.tasks.clear()
            self.lease(name, 100, 0.0)
            for holder, task in self.tasks:
                made = self.answer(holder, task, False, reward=len(self.tasks) % 2)
                self.world.ask(holder, m.SubmitResults(trajectories=[made]))
        for number in range(len(self.policies["stages"])):
            by_group: dict[str, list[Task]] = {}
            known = len(self.scoring)
            self.to_score("x", number, 100)
            for _, _, task in self.scoring[known:]:
                by_group.setdefault(task.group_id, []).append(task)
            for index, tasks in enumerate(by_group.values()):
                self.world.ask("x", m.SubmitResults(scores=self.judge(tasks, index % 2, True)))
        self.collect()
        self.train()


def logprobs_of(made: Trajectory) -> bytes:
    return pack_float32([-float(made.attempt)] * made.response_tokens)


TestBroker = BrokerMachine.TestCase
TestBroker.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
