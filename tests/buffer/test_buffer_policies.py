"""The broker's policies beyond the plain life of a sample; B = 2 groups of 2 if nothing is said."""

from typing import Any

import pytest
from fakes.broker_world import World, trajectory, world
from msgspec.structs import replace

from umbra.proto import messages as m
from umbra.proto.net.session import FAILED
from umbra.proto.records import pack_float32
from umbra.services.buffer.samples.ledger import REASONS_KEPT
from umbra.services.buffer.samples.staleness import StalenessPolicy, split
from umbra.services.config import GeneratorConfig


def test_a_flushed_partial_is_kept_and_its_lease_goes_on() -> None:
    run = world(lease_s=10, dead_after_s=1000)
    (task,) = run.lease("a", 1, 0)
    partial = trajectory(task, 0, finish_reason="partial")
    run.pass_time(8)
    flushed = m.RenewLeases(partials=[partial, trajectory(task, 0, sample_id="s-99")])
    assert run.ask("a", flushed) == m.TaskLeases(lost=["s-99"])
    assert (run.broker.counters["flushed"], run.broker.counters["late_flushes"]) == (1, 1)
    run.pass_time(8)
    assert run.pool.samples[task.sample_id].holder == "a"  # the flush counts as a renewal
    run.pass_time(10)
    assert run.lease("b", 1, 0)[0].trajectory == partial  # lost with "a", but for what was flushed


def test_a_full_batch_interrupts_the_rest_that_is_generated() -> None:
    """Scoring goes on."""
    run = world(on_batch="interrupt", stages=["reward"])
    run.join("scorer", "r")
    tasks = run.lease("a", 1000, 0)
    run.answer("a", tasks[:5], 0)
    run.give("r", run.to_score("r", capacity=4), 1.0, 0.0, 1.0, 0.0)
    assert len(run.to_score("r")) == 1
    run.batch(1)
    ((_, interrupt),) = run.pushes
    assert isinstance(interrupt, m.Interrupt)
    assert interrupt.leases == [(task.sample_id, 1) for task in tasks[5:]]
    assert run.broker.counters["interrupted"] == len(tasks) - 5


def test_training_waits_for_what_would_be_stale() -> None:
    """With K = 2 six groups of version 0 are batches 1 to 3, which leaves no room for others."""
    run = world(run_ahead=2, max_staleness=2, stale_policy="wait")
    tasks = run.lease("a", 12, 0)
    run.answer("a", tasks[:4], 0, 1.0, 0.0)
    run.train(1)
    run.produce("b", 1)
    for step, made in ((2, tasks[4:8]), (3, tasks[8:])):
        reply = run.batch(step)
        assert not reply.trajectories and "stale_policy = wait" in reply.waiting_for
        run.answer("a", made, 0, 1.0, 0.0)
        assert {t.sample_id for t in run.train(step).trajectories} == {t.sample_id for t in made}
    assert not run.pool.ledger.ended


def test_survivors_are_trained_without_their_stragglers() -> None:
    run = world(group_size=3, batch_groups=1, straggler_s=20,
                lease_s=500, dead_after_s=1000)  # fmt: skip
    tasks = run.lease("a", 3, 0)
    run.answer("a", tasks[:1], 0, 1.0, 0.0)
    run.pass_time(30)
    assert not run.batch(1).trajectories  # min_survivors = 2
    run.answer("a", tasks[1:2], 0, 1.0, 0.0)
    run.pass_time(0.1)
    assert [t.sample_id for t in run.batch(1).trajectories] == ["s-0", "s-1"]
    assert run.commit(1).ledger.ended == {"cancelled": 1}
    assert "has ended" in run.submit("a", trajectory(tasks[2], 0)).refused["s-2"]


@pytest.mark.parametrize(("size", "ended"), [(3, {"failed": 1}), (2, {"failed": 2})])
def test_a_failure_ends_only_a_group_that_cannot_survive(size: int, ended: dict[str, int]) -> None:
    """Two are to be left (min_survivors)."""
    run = world(group_size=size, batch_groups=1, straggler_s=20)
    *answered, failed = run.lease("a", size, 0)
    run.answer("a", answered, 0, 1.0, 0.0)
    run.back("a", failed, failed=True)
    assert len(run.batch(1).trajectories) == (2 if size == 3 else 0)
    assert run.pool.ledger.ended == ended


def test_level_groups_are_filtered_and_replaced_but_not_for_ever() -> None:
    run = world(run_ahead=0, batch_groups=1, dynamic_sampling=True, max_filtered=2)
    for version in (0, 1):  # as many again for the next batch
        for _ in range(2):
            run.produce("a", version)
            assert "filtered" in run.batch(version + 1).waiting_for
        assert run.pool.ledger.ended == {"filtered": 4 * (version + 1)}
        assert run.broker.counters["filtered_groups"] == 2 * (version + 1)
        run.produce("a", version)
        run.train(version + 1)
        assert run.broker.counters["level_groups_kept"] == version + 1


def scored(**options: Any) -> World:
    run = world(stages=["reward", "ref_logp", "logp"], lease_s=10, dead_after_s=1000, **options)
    for name in ("r", "q"):
        run.join("scorer", name)
    return run


def test_trajectories_go_through_their_stages_in_order() -> None:
    run = scored(batch_groups=1)
    run.answer("a", run.lease("a", 2, 0), 0, 0.0)
    assert run.status.ledger.in_flight["scoring"] == 2
    assert not run.to_score("r", "logp")
    rewards = run.to_score("r", "reward")
    assert rewards[0].row == {"prompt": "row 1"}
    run.give("r", rewards[:1], reward=0.5, reward_parts={"p": 0.5})
    run.give("r", rewards[1:], reward=0.25)
    logprobs = pack_float32([-1.0, -2.0])
    run.give("r", run.to_score("r", "ref_logp"), logprobs=logprobs)
    assert not run.batch(1).trajectories
    run.give("r", run.to_score("r", "logp"), logprobs=logprobs, version=0)
    made = run.batch(1).scored()[0]
    assert (made.reward, made.reward_parts) == (0.5, {"p": 0.5})
    assert made.ref_logprobs == made.proximal_logprobs == logprobs
    assert (made.scored, made.proximal_version) == (["reward", "ref_logp", "logp"], 0)


@pytest.mark.parametrize("how", ["error", "silence", "malformed", "crash", "death"])
def test_a_scorer_that_fails_costs_attempts_and_then_the_group(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = scored(batch_groups=1, max_attempts=2)
    run.answer("a", run.lease("a", 2, 0), 0, 1.0, 0.0)
    for attempt in (1, 2):
        tasks = run.to_score("r", "reward", 1)
        assert [(t.sample_id, t.attempt) for t in tasks] == [("s-0", attempt)]
        match how:
            case "error":
                run.give("r", tasks, error="no such thing")
            case "malformed":
                assert run.give("r", tasks, reward=float("nan")).refused
            case "silence":
                run.pass_time(11)
                assert run.give("r", tasks, reward=1.0).refused
            case _:
                if how == "crash":
                    run.ask("r", m.Leave(reason=f"{FAILED}out of memory"))
                run.join("scorer", "r", f"r-{attempt + 1}")
    assert run.pool.ledger.ended == {"failed": 2}
    assert run.broker.counters["scoring_retries"] == 2
    assert ("r is gone" in caplog.text) == (how in ("crash", "death"))


def test_a_group_whose_sample_is_made_again_is_taken_from_its_batch_and_from_its_scorer() -> None:
    run = world(batch_groups=1, run_ahead=0)
    tasks = run.produce("a", 0)
    run.pool.again(run.pool.samples[tasks[0].sample_id])
    assert not run.pool.complete and not run.batch(1).trajectories
    run = world(reward_scope="group", stages=["reward"], batch_groups=1)
    run.join("scorer", "r")
    tasks = run.lease("a", 2, 0)
    run.answer("a", tasks, 0)
    leased = run.to_score("r")
    run.pool.again(run.pool.samples[tasks[0].sample_id])
    assert not run.pool.leases.of("r")
    assert run.give("r", leased, 1.0, 0.0).refused.keys() == {task.sample_id for task in tasks}
    run.answer("a", run.lease("a", 1, 0), 0)
    assert len(run.to_score("r")) == len(leased) == 2


def test_each_stage_has_all_its_attempts_and_of_two_scores_in_a_message_the_first_counts() -> None:
    run = scored(batch_groups=1, max_attempts=2)
    assert run.ask("r", m.LeaseTasks(kind="reward", capacity=1, wait_s=9)) is None
    run.answer("a", run.lease("a", 2, 0), 0, 1.0, 0.0)
    run.give("r", run.leased("r"), error="no such thing")  # served as it came
    (task, other) = run.to_score("r", "reward")
    assert task.sample_id in run.give("r", [task, task], 1.0, 9.0).refused
    assert run.give("r", [task], 5.0).refused
    assert run.broker.counters["late_scores"] == 2
    assert run.broker.counters["scored: reward"] == 1
    assert run.pool.samples[task.sample_id].reward == 1.0 + 1.0
    run.give("r", [other], 1.0)
    run.give("r", run.to_score("r", "ref_logp", 1), error="no such thing")
    run.give("r", run.to_score("r", "ref_logp"), logprobs=b"\0" * 8)
    assert run.broker.counters["scoring_retries"] == 2 and not run.pool.ledger.ended


def test_stages_without_a_scorer_of_their_own_and_busy_ones_are_named() -> None:
    run = scored(batch_groups=1, stall_s=5)
    assert not run.to_score("r", "ref_logp") and not run.to_score("q", "logp")
    run.answer("a", run.lease("a", 2, 0), 0, 1.0, 0.0)
    run.pass_time(1)
    (found,) = run.status.stuck
    assert "stage reward" in found.what and "no scorer of it" in found.what
    assert len(run.to_score("q", "reward", 1)) == 1
    assert not run.status.stuck
    run.pass_time(5)
    (found,) = [s for s in run.status.stuck if "samples wait" in s.what]
    assert (found.holder, found.age_s) == ("q", 6.0)
    assert found.action == "none: start more of `umbra scorer --stage reward`"
    run.join("scorer", "q", "q-2")  # has not asked for anything yet
    assert any("no scorer of it" in s.what for s in run.status.stuck)


def test_reasons_of_failure_are_counted_by_name_as_far_as_that_is_bounded() -> None:
    """User code gives every sample a reason of its own, also across restarts of the buffer."""
    sizes = {"batch_groups": 1, "run_ahead": 1000, "steps": 2000, "durable": True}
    run = scored(**sizes, max_attempts=1, max_failed_share=1.0)
    for number in range(120):
        (task,) = run.lease("a", 1, 0)
        if number % 2:
            run.back("a", task, f"a {number}", failed=True)
        else:
            run.answer("a", [task], 0)
            run.give("r", run.to_score("r", "reward"), error=f"b {number}")
        if number == 70:
            run.restart_broker()
    counts = {k: n for k, n in run.broker.counters.items() if k.startswith("failed: ")}
    assert len(counts) == REASONS_KEPT + 1 and sum(counts.values()) == 120
    assert counts["failed: other"] == 120 - REASONS_KEPT
    assert counts["failed: a 1"] == counts["failed: reward: b 0"] == 1


def test_batches_go_while_no_checkpoint_could_use_them() -> None:
    run = world(run_ahead=1, max_staleness=2, durable=True)
    run.produce("a", 0)
    for step in (1, 2):
        run.train(step)
    run.store.size_bytes = 2 * run.config.buffer.store_max_bytes
    counts = run.broker.counters
    for left, full in ((2, 0), (1, 0), (0, 0), (0, 1)):
        assert (len(run.broker.batches.kept), counts["store_full"]) == (left, full)
        assert counts["batches_let_go"] == 2 - left
        run.pass_time(0.1)


def test_a_store_full_of_batches_has_a_checkpoint_made() -> None:
    """No new groups and none of the next checkpoint: the run waited for ever."""
    run = world(run_ahead=1, max_staleness=2, durable=True)
    run.ask("trainer", m.CheckpointSaved(step=0))
    run.steps("a", 1)
    run.train(2)
    assert not run.batch(3).checkpoint
    run.store.size_bytes = run.config.buffer.store_max_bytes
    run.pass_time(0.1)
    assert not run.lease("a", 4, 0) and run.batch(3).checkpoint
    run.store.size_bytes = 0
    run.ask("trainer", m.CheckpointSaved(step=2))
    run.pass_time(0.1)
    assert run.lease("a", 4, 2) and not run.batch(3).checkpoint


def test_a_run_whose_batch_does_not_fit_into_the_store_is_told_so() -> None:
    run = world()
    run.answer("a", run.lease("a", 2, 0), 0)
    run.store.size_bytes = run.config.buffer.store_max_bytes
    for seconds in (0.1, 70.0):
        run.pass_time(seconds)
    (full,) = (one for one in run.status.stuck if one.hopeless)
    assert full.age_s == pytest.approx(70.0) and "no room for a batch" in full.hopeless
    run.store.size_bytes = 0
    run.pass_time(0.1)
    assert not any(one.hopeless for one in run.status.stuck)
    for why in ("no space left", ""):
        run.broker.room.disk = why
        for _ in range(2):
            run.pass_time(0.1)
        assert run.broker.counters["store_full"] == 2
        run.join("generator", "a", "a-2")
        assert bool(run.lease("a", 100, 0)[2:]) == (not why)


def policy(run_ahead: int, bound: int) -> StalenessPolicy:
    return StalenessPolicy(4, run_ahead, bound, steps=100)


def test_what_two_knobs_imply() -> None:
    """A sample needs weights for the version that it will be trained at; admission ends with it."""
    for run_ahead, version, room in ((0, 3, 4), (1, 3, 8), (3, 97, 12), (3, 98, 8), (3, 100, 0)):
        assert policy(run_ahead, 2).room(untrained=0, version=version) == room
        assert policy(run_ahead, 2).room(untrained=room, version=version) == 0
    for run_ahead, bound, typical in ((0, 0, 0), (1, 2, 1), (4, 2, 2)):
        rules = policy(run_ahead, bound)
        assert rules.typical == typical
        assert [rules.is_stale(oldest - bound, version=7) for oldest in (7, 6)] == [False, True]
    assert StalenessPolicy(2, 1, 2, steps=100).due_version(untrained=2, version=3) == 4
    assert policy(1, 2).required_version(due=4, version=3) == 2
    assert [policy(1, 1).required_version(due=2, version=version) for version in (2, 4)] == [1, 3]


def test_split() -> None:
    """The trainer may go back to a checkpoint: generators are ahead of it then."""
    for oldest, newest, version, parts in (
        (5, 5, 5, (0, 0, 0)), (3, 5, 5, (2, 2, 0)), (3, 3, 5, (2, 0, 2)), (3, 4, 5, (2, 1, 1)),
        (3, 7, 5, (2, 2, 0)), (6, 7, 5, (-1, -1, 0)),
    ):  # fmt: skip
        assert split(oldest, newest, version) == parts


@pytest.mark.parametrize(
    ("count", "reason", "named"), [(0, f"{FAILED}dtype", True), (0, "", True), (1, "", False)]
)
def test_generators_of_others_that_are_gone_are_named(count: int, reason: str, named: bool) -> None:
    """After a failure the run is hopeless in time; a run's own ones are started again by it."""
    run = world(dead_after_s=1000)
    run.config = replace(run.config, generator=GeneratorConfig(count=count))
    run.restart_broker()
    for name, why in (("a", "drained"), ("b", reason)):
        run.join("generator", name)
        run.ask(name, m.Leave(reason=why))

    def missing() -> list[m.Stuck]:
        return [one for one in run.status.stuck if one.holder == "nobody"]

    for hopeless in (False, bool(reason)):
        assert [one.what for one in missing()] == named * [f"no generator is left (b: {reason})"]
        assert any(one.hopeless for one in missing()) == hopeless
        run.pass_time(601.0)
    run.join("generator", "c")
    assert not missing()
