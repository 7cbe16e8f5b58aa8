"""The same peers as in `test_buffer_properties`, under every combination of policies, with scorers,
flushed partials and evaluations: the ledger balances, and honest peers can always end the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from fakes.broker_world import World, trajectory
from hypothesis import settings
from hypothesis.stateful import initialize, invariant, precondition, rule
from test_buffer_properties import LEASE_S, STEPS, BrokerMachine

from umbra.proto.messages import (
    BatchLease,
    CheckpointSaved,
    LeaseBatch,
    LeaseTasks,
    RenewLeases,
    RunFinished,
    SubmitResults,
    TaskLeases,
)
from umbra.proto.records import Score, Task, Trajectory, pack_float32
from umbra.services.buffer.endpoints.trainer import interrupt
from umbra.services.buffer.samples.groups import State
from umbra.services.config import EvalConfig, NamedEnvironment
from umbra.services.prompts.rows import Prompt

STAGES = st.lists(st.sampled_from(["reward", "ref_logp", "logp"]), unique=True, max_size=3)
SCORERS = ("x", "y")
RANKED = NamedEnvironment(name="ranked", kind="reward", reward_scope="group")
ALONE = NamedEnvironment(name="alone", kind="reward")
picks = st.integers(0, 1 << 16)


@pytest.fixture(autouse=True, scope="module")
def limit() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EvalConfig, "timeout_s", 60.0)
        yield


class PolicyMachine(BrokerMachine):
    """Adds the policies, and peers that make use of them."""

    @initialize(
        group_size=st.integers(1, 3),
        batch_groups=st.integers(1, 2),
        run_ahead=st.integers(0, 3),
        max_staleness=st.integers(0, 2),
        policies=st.fixed_dictionaries(
            {
                "max_attempts": st.integers(1, 4),
                "stages": STAGES,
                "stale_policy": st.sampled_from(["drop", "wait"]),
                "oversample": st.integers(0, 1),
                "on_batch": st.sampled_from(["continue", "interrupt"]),
                "straggler_s": st.sampled_from([0.0, 5.0, 40.0]),
                "dynamic_sampling": st.booleans(),
                "max_filtered": st.integers(1, 3),
            }
        ),
        every=st.integers(0, 3),
        mode=st.sampled_from(["pause", "concurrent"]),
        whole=st.sampled_from(["no", "yes", "some"]),
    )
    def start(
        self, policies: dict[str, Any], every: int, mode: Any, whole: str, **sizes: int
    ) -> None:
        self.whole = whole != "no"
        self.environments = (RANKED, ALONE) if whole == "some" else ()
        if self.whole:  # groups are scored at once
            policies["straggler_s"] = 0.0
            policies["stages"] = [*dict.fromkeys([*policies["stages"], "reward"])]
        self.judged: list[set[tuple[str, int]]] = []  # samples and attempts that were
        self.policies = policies
        self.groups = sizes["batch_groups"]
        self.eval = EvalConfig(
            every=every, mode=mode, samples=2 * max(1, len(self.environments)),
            samples_per_prompt=1 + self.whole, prompts="x",
        )  # fmt: skip
        self.scoring: list[tuple[str, str, Task]] = []  # all that was ever handed out
        self.uses: dict[int, list[str]] = {}  # by committed step: its samples
        super().start(**sizes)
        for name in SCORERS:
            self.come(name)

    def make_world(self, **buffer: Any) -> World:
        fixed = {"lease_s": LEASE_S, "dead_after_s": 25}
        return World(
            steps=STEPS,
            eval_config=self.eval,
            eval_prompts=[
                Prompt(name or "h", {"prompt": "held out", "environment": name})
                for name in ([one.name for one in self.environments] or [""])
            ],
            reward_scope="group" if self.whole else "sample",
            environments=self.environments,
            **fixed,
            **buffer,
            **self.policies,
        )

    def come(self, name: str) -> None:
        if name not in SCORERS:
            super().come(name)
            return
        self.lives += 1
        self.world.join("scorer", name, f"{name}-{self.lives}")
        self.collect()

    def collect(self) -> None:
        for messages in self.world.late.values():
            self.finished |= any(isinstance(message, RunFinished) for message in messages)
        super().collect()

    def got(self, batch: BatchLease) -> None:
        self.batch = batch
        assert batch.step == self.version + 1
        assert 0 < len(batch.trajectories) <= self.batch_size
        names = [made.sample_id for made in batch.trajectories]
        assert len(set(names)) == len(names)
        assert self.uses.get(batch.step, names) == names, "the same step, another batch"
        assert not self.used(batch.step) & set(names)
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
        if self.whole:
            self.were_judged_at_once(batch.scored())

    def were_judged_at_once(self, batch: list[Trajectory]) -> None:
        """The rewards of a group are of one message, and of these very responses."""
        groups: dict[str, list[Trajectory]] = {}
        for made in batch:
            if not made.prompt_id.startswith(f"{ALONE.name}/"):
                groups.setdefault(made.group_id, []).append(made)
        for group in groups.values():
            (number,) = {int(made.reward_parts["judged"]) for made in group}
            assert self.judged[number] == {(made.sample_id, made.attempt) for made in group}

    def judge(self, tasks: list[Task], reward: float, good: bool) -> list[Score]:
        """Scores for `tasks`, which name the message that they come in."""
        self.judged.append({(t.sample_id, t.made.attempt) for t in tasks})
        number = float(len(self.judged) - 1)
        return [
            msgspec.structs.replace(
                score(task, reward, good),
                reward_parts={"judged": number, "response": float(task.made.attempt)},
            )
            for task in tasks
        ]

    def used(self, before: int) -> set[str]:
        """The samples that were trained on in the steps before."""
        return {name for step, names in self.uses.items() if step < before for name in names}

    def commit(self) -> None:
        version = self.version
        super().commit()
        if self.version > version:
            assert self.batch is not None
            self.uses[self.version] = [made.sample_id for made in self.batch.trajectories]

    # -- scorers, partials, interruptions ----------------------------------------------------------

    @rule(name=st.sampled_from(SCORERS), stage=st.integers(0, 2), capacity=st.integers(1, 4))
    def lease_scoring(self, name: str, stage: int, capacity: int) -> None:
        stages = self.policies["stages"]
        if stages:
            stage_name = stages[stage % len(stages)]
            body = LeaseTasks(kind=stage_name, capacity=capacity, wait_s=0)
            reply = self.world.ask(name, body)
            if isinstance(reply, TaskLeases):
                self.to_score(name, stage_name, reply.tasks)
        self.collect()

    def to_score(self, name: str, stage: str, tasks: list[Task]) -> None:
        """`name` was given `tasks`; none is of an environment that rewards its samples itself."""
        self.scoring += [(name, stage, task) for task in tasks]
        if stage == "reward":
            assert all(task.row.get("environment") != ALONE.name for task in tasks)

    @precondition(lambda self: self.scoring)
    @rule(
        pick=picks,
        good=st.integers(0, 3),
        all_of_it=st.integers(0, 3),
        more=st.lists(st.tuples(picks, st.booleans()), max_size=3),
    )
    def submit_score(
        self, pick: int, good: int, all_of_it: int, more: list[tuple[int, bool]]
    ) -> None:
        """Answer anything that was ever handed out, in time or not, with a score or an error.

        Where groups are scored at once, mostly with the scores of all that came with it; else
        perhaps with `more` in the same message.
        """
        name, stage, task = self.scoring[pick % len(self.scoring)]
        tasks = [task]
        if self.whole and stage == "reward" and all_of_it:
            group = task.made.group_id
            same = {
                t.sample_id: t
                for n, s, t in self.scoring
                if (n, s, t.attempt, t.made.group_id) == (name, stage, task.attempt, group)
            }
            tasks = list(same.values())
        scores = self.judge(tasks, pick % 2, bool(good))
        own = [one for n, s, one in self.scoring if (n, s) == (name, stage)]
        for number, is_good in more if not (self.whole and stage == "reward") else ():
            scores += self.judge([own[number % len(own)]], number % 2, is_good)
        self.world.ask(name, SubmitResults(scores=scores))
        self.collect()

    @rule(name=st.sampled_from(SCORERS))
    def restart_scorer(self, name: str) -> None:
        self.come(name)

    @precondition(lambda self: self.tasks)
    @rule(pick=picks)
    def flush(self, pick: int) -> None:
        name, task = self.pick(pick)
        partial = trajectory(task, self.serving[name], finish_reason="partial")
        self.world.ask(name, RenewLeases(partials=[partial]))
        self.collect()

    @rule()
    def interrupt(self) -> None:
        interrupt(self.broker.run, "now")
        self.world.take(self.broker.run.outbox.take())
        self.collect()

    # -- what always holds ------------------------------------------------------------

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
    def ages_are_those_of_a_look_at_all_groups(self) -> None:
        pool = self.broker.pool
        assert (pool.ages is not None) == (self.policies["stale_policy"] == "wait")
        if pool.ages is None:
            return
        aged = [(group.oldest, group) for group in pool.groups.values()]
        aged.sort(key=lambda pair: pair[1].samples[0].serial)
        for version in range(self.version + 2):
            late = [group for oldest, group in aged if oldest is not None and oldest < version]
            for count in (1, len(aged)):
                found = pool.ages.first(count, lambda age, before=version: age < before)
                assert found == late[:count]

    @invariant()
    def only_live_samples_take_memory(self) -> None:
        """Live ones, and those of kept batches."""
        batches, store = self.broker.batches, self.world.store
        kept = {name for step in batches.archive.steps for name in self.uses[step]}
        assert {key[2:] for key in store.keys("t/s-")} <= set(self.broker.pool.samples) | kept

    @invariant()
    def evaluations_have_a_ledger_of_their_own(self) -> None:
        evals = self.broker.run.evals
        assert evals.pool.ledger.snapshot().balance == 0
        for report in evals.reports:
            assert report.answered + sum(report.ended.values()) == report.samples

    @invariant()
    def generation_is_not_too_far_ahead(self) -> None:
        gate = min(self.run_ahead + 1, STEPS - self.version) * self.groups
        assert self.broker.batches.untrained <= gate + self.policies["oversample"]

    def work_honestly(self) -> None:
        self.world.pass_time(0.5)
        for name in (*self.serving, "trainer", *SCORERS):
            self.world.beat(name)
        for name in self.serving:
            self.load_weights(name)
            self.tasks.clear()
            self.lease(name, 100, 0.0)
            for holder, task in self.tasks:
                oldest = [task.trajectory.oldest_version] if task.trajectory else []
                made = trajectory(task, *oldest, self.serving[holder], reward=len(self.tasks) % 2)
                self.world.ask(holder, SubmitResults(trajectories=[made]))
        for stage in self.policies["stages"]:
            ask = LeaseTasks(kind=stage, capacity=100, wait_s=0)
            reply = self.world.ask("x", ask)
            assert isinstance(reply, TaskLeases), reply
            self.to_score("x", stage, reply.tasks)
            by_group: dict[str, list[Task]] = {}
            for task in reply.tasks:
                by_group.setdefault(task.made.group_id, []).append(task)
            for number, tasks in enumerate(by_group.values()):
                scores = self.judge(tasks, number % 2, True)
                self.world.ask("x", SubmitResults(scores=scores))
        self.collect()
        if self.version < STEPS:
            self.lease_batch(0.0)
            if self.batch is not None and self.batch.step == self.version + 1:
                self.commit()

    def teardown(self) -> None:
        if hasattr(self, "world") and not self.finished:
            for name in SCORERS:
                self.come(name)
        super().teardown()


class RestartedPolicyMachine(PolicyMachine):
    """The same, a buffer that is killed now and then, and a trainer that goes on after its last
    checkpoint: the batches since then must be the same.
    """

    def make_world(self, **buffer: Any) -> World:
        self.forgotten: set[str] = set()
        return super().make_world(**buffer, durable=True)

    @rule()
    def kill_the_buffer(self) -> None:
        before = self.broker.pool
        ledger = before.ledger.snapshot()
        self.forgotten |= set(before.over)
        self.world.restart_broker()
        self.broker = self.world.broker
        assert self.broker.pool.ledger.snapshot() == ledger

    @rule()
    def save_a_checkpoint(self) -> None:
        self.world.ask("trainer", CheckpointSaved(step=self.version))

    @rule()
    def the_trainer_loses_its_steps_since_the_checkpoint(self) -> None:
        self.come("trainer")
        step = (self.broker.batches.checkpoint or 0) + 1
        if step > self.version or self.finished:
            return
        reply = self.world.ask("trainer", LeaseBatch(step=step, wait_s=0))
        assert isinstance(reply, BatchLease), reply
        self.version = step - 1
        self.batch = None
        self.got(reply)
        self.trained = self.used(step)
        self.collect()

    @invariant()
    def generation_is_not_too_far_ahead(self) -> None:
        """What waits to be trained on once more counts on top."""
        gate = min(self.run_ahead + 1, STEPS - self.version) * self.groups
        again = sum(len(batch.groups) for batch in self.broker.batches.formed.values())
        assert self.broker.batches.untrained <= gate + self.policies["oversample"] + again

    @invariant()
    def every_sample_is_in_exactly_one_place(self) -> None:
        pool, ledger = self.broker.pool, self.broker.pool.ledger
        assert ledger.snapshot().balance == 0
        issued = {f"s-{number}" for number in range(ledger.issued)}
        assert set(pool.samples) | set(pool.over) | self.forgotten == issued
        for state in ("queued", "generating", "scoring", "ready", "training"):
            assert ledger.count(state) == sum(s.state == state for s in pool.samples.values())

    @invariant()
    def the_ledger_is_what_the_trainer_knows(self) -> None:
        assert self.broker.pool.ledger.trained == len(self.trained)
        assert self.broker.batches.version == self.version


def logprobs_of(made: Trajectory) -> bytes:
    """What a model says of this very response."""
    return pack_float32([-float(made.attempt)] * made.response_tokens)


def score(task: Task, reward: float, good: bool) -> Score:
    """A score that fits any stage, or an error."""
    return Score(
        sample_id=task.sample_id,
        attempt=task.attempt,
        reward=float(reward),
        logprobs=logprobs_of(task.made),
        error="" if good else "did not work",
    )


TestPolicies = PolicyMachine.TestCase
TestPolicies.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
TestRestartedPolicies = RestartedPolicyMachine.TestCase
TestRestartedPolicies.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
