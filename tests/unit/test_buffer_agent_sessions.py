"""Sessions of agents between generators, buffer and env-workers."""

from __future__ import annotations

import pytest
from fakes.broker_world import World, trajectory, world

from umbra.proto.messages import (
    EndSessions,
    Interrupt,
    LeaseSessions,
    Leave,
    Nack,
    OfferSessions,
    Ok,
    RenewAck,
    RenewLeases,
    ReturnedSample,
    ReturnSamples,
    SessionLeases,
    Status,
    StatusRequest,
)
from umbra.proto.records import SampleTask, SessionOffer, SessionTask

AGENT = "agent mine:solve"
URL = "http://host:8100"
LEASE_S = 30.0


@pytest.fixture
def run() -> World:
    made = world(lease_s=LEASE_S, dead_after_s=1000.0, max_attempts=2)
    made.join("env_worker", "w")
    made.join("env_worker", "v")
    return made


def offer(
    run: World,
    generator: str,
    *tasks: SampleTask,
    session: str = "x",
    environment: str = AGENT,
) -> None:
    """`generator` has sessions of these samples."""
    sessions = [
        SessionOffer(
            sample_id=task.sample_id,
            attempt=task.attempt,
            session=f"{session}-{task.sample_id}-{task.attempt}",
        )
        for task in tasks
    ]
    body = OfferSessions(url=URL, key="k", environment=environment, sessions=sessions)
    assert run.ask(generator, body) == Ok()


def question(capacity: int, wait_s: float = 0.0, environment: str = AGENT) -> LeaseSessions:
    return LeaseSessions(environments=[environment], capacity=capacity, wait_s=wait_s)


def take(run: World, worker: str, capacity: int) -> list[SessionTask]:
    """What `worker` gets at once."""
    return run.get(worker, question(capacity), SessionLeases).tasks


def leases(*tasks: SessionTask) -> list[tuple[str, int]]:
    return [(task.sample_id, task.attempt) for task in tasks]


def lost(run: World, worker: str, *tasks: SessionTask) -> list[str]:
    """Which of these leases `worker` has no more, as it renews them."""
    return run.get(worker, RenewLeases(leases=leases(*tasks)), RenewAck).lost


def counts(run: World) -> dict[str, int]:
    run.now += 1.0
    return run.get("a", StatusRequest(), Status).sessions


def test_a_session_goes_to_a_worker_once(run: World) -> None:
    (sample,) = run.lease("a", 1, 0)
    offer(run, "a", sample)
    (task,) = take(run, "w", 8)
    assert (task.sample_id, task.attempt) == (sample.sample_id, sample.attempt)
    assert task.url == f"{URL}/sessions/x-{sample.sample_id}-{sample.attempt}"
    assert (task.key, task.environment, task.lease_s) == ("k", AGENT, LEASE_S)
    offer(run, "a", sample)  # repeated, as generators do
    assert take(run, "v", 8) == []
    assert counts(run) == {"waiting": 0, "running": 1, "workers": 2}


def test_a_question_waits_for_sessions(run: World) -> None:
    assert run.ask("w", question(2, wait_s=5.0)) is None
    offer(run, "a", *run.lease("a", 3, 0))
    (answer,) = run.late.pop("w")
    assert isinstance(answer, SessionLeases) and len(answer.tasks) == 2
    assert counts(run)["waiting"] == 1
    assert run.ask("v", question(2, wait_s=5.0, environment="another")) is None
    run.pass_time(6.0)
    assert run.late.pop("v") == [SessionLeases(tasks=[])]


def test_who_has_more_room_gets_more(run: World) -> None:
    assert run.ask("w", question(1, wait_s=5.0)) is None
    assert run.ask("v", question(5, wait_s=5.0)) is None
    offer(run, "a", *run.lease("a", 4, 0))
    (given,) = run.late.pop("v")
    assert isinstance(given, SessionLeases) and len(given.tasks) == 4
    assert "w" not in run.late


def test_each_environment_of_a_worker_has_room_of_its_own(run: World) -> None:
    samples = run.lease("a", 8, 0)
    offer(run, "a", *samples[:5])
    offer(run, "a", *samples[5:], environment="other")
    has = LeaseSessions(environments=[AGENT, "other"], rooms=[2, 64], capacity=4, wait_s=0.0)
    given = [task.environment for task in run.get("w", has, SessionLeases).tasks]
    assert given == [AGENT, AGENT, "other", "other"]  # two of each, four in all
    none_left = LeaseSessions(environments=[AGENT, "other"], rooms=[0, 1], capacity=9, wait_s=0.0)
    (task,) = run.get("v", none_left, SessionLeases).tasks
    assert task.environment == "other"
    assert len(take(run, "v", 8)) == 3  # who does not tell rooms has its capacity for each


def test_a_worker_gets_what_it_has_the_environment_for(run: World) -> None:
    offer(run, "a", *run.lease("a", 1, 0))
    other = run.get("w", question(8, environment="agent other:solve"), SessionLeases)
    assert other.tasks == []
    (stuck,) = [one for one in run.broker.status(run.now).stuck if AGENT in one.what]
    assert stuck.what == f"1 sessions wait for {AGENT}, which no env-worker has"
    assert "umbra env-worker" in stuck.action
    assert len(take(run, "v", 8)) == 1


def test_only_the_holder_of_a_sample_offers_its_session(run: World) -> None:
    (sample,) = run.lease("a", 1, 0)
    offer(run, "b", sample)
    assert take(run, "w", 8) == []
    assert run.broker.counters["late_sessions"] == 1


def test_a_lease_is_renewed_until_its_sample_is_over(run: World) -> None:
    samples = run.lease("a", 2, 0)
    offer(run, "a", *samples)
    one, two = take(run, "w", 8)
    for _ in range(4):  # longer than a lease
        run.pass_time(LEASE_S / 2)
        run.get("a", RenewLeases(leases=leases(one, two)), RenewAck)
        assert lost(run, "w", one, two) == []
    assert lost(run, "v", one) == [one.sample_id]  # it is the other's
    run.submit("a", trajectory(samples[0], 0))
    assert lost(run, "w", one, two) == [one.sample_id]
    assert run.ask("w", EndSessions(leases=leases(two))) == Ok()
    run.pass_time(LEASE_S - 1)
    assert counts(run) == {"waiting": 0, "running": 0, "workers": 1}
    assert run.broker.counters["sessions_lost"] == 0  # its generator says what came of it


def test_samples_of_a_dead_worker_begin_anew(run: World) -> None:
    samples = run.lease("a", 2, 0)
    offer(run, "a", *samples)
    tasks = take(run, "w", 8)
    run.pushes.clear()
    run.join("env_worker", "w", "w-2")  # the same machine, started again
    (push,) = [body for name, body in run.pushes if name == "a" and isinstance(body, Interrupt)]
    assert sorted(push.leases) == sorted(leases(*tasks))
    assert run.pool.ledger.count("generating") == 0
    assert run.pool.ledger.count("queued") == 2
    returned = ReturnedSample(sample_id=tasks[0].sample_id, attempt=1, reason="interrupted")
    assert run.ask("a", ReturnSamples(samples=[returned])) == Ok()  # changes nothing any more
    again = run.lease("b", 2, 0)
    assert {task.sample_id for task in again} == {task.sample_id for task in samples}
    assert {task.attempt for task in again} == {2}
    offer(run, "b", *again)
    assert len(take(run, "v", 8)) == 2
    assert lost(run, "w", *tasks) == [task.sample_id for task in tasks]
    run.broker.run.check()


def test_a_worker_that_does_not_renew_is_lost(run: World) -> None:
    samples = run.lease("a", 1, 0)
    offer(run, "a", *samples)
    (task,) = take(run, "w", 8)
    run.pass_time(LEASE_S / 2)
    run.get("a", RenewLeases(leases=leases(task)), RenewAck)
    run.pass_time(LEASE_S / 2 + 1)
    assert run.broker.counters["sessions_lost"] == 1
    assert run.pool.ledger.count("generating") == 0


def test_a_sample_that_loses_workers_again_and_again_fails(run: World) -> None:
    for attempt in (1, 2):
        samples = run.lease("a", 2, 0)
        offer(run, "a", samples[0])
        assert len(take(run, "w", 8)) == 1
        run.join("env_worker", "w", f"w-{attempt + 1}")
    assert run.broker.counters["attempts_exhausted"] == 1
    assert run.pool.ledger.snapshot().ended == {"failed": 2}  # with its group
    run.broker.run.check()


def test_a_worker_that_leaves_costs_no_attempt(run: World) -> None:
    for attempt in range(5):
        samples = run.lease("a", 1, 0)
        assert [task.attempt for task in samples] == [attempt + 1]
        offer(run, "a", *samples)
        assert len(take(run, "w", 8)) == 1
        run.ask("w", Leave(reason="drained"))
        run.join("env_worker", "w", f"w-{attempt + 2}")
    assert run.broker.counters["attempts_exhausted"] == 0


def test_sessions_of_a_dead_generator_are_over(run: World) -> None:
    offer(run, "a", *run.lease("a", 2, 0))
    (task,) = take(run, "w", 1)
    run.join("generator", "a", "a-2")
    assert lost(run, "w", task) == [task.sample_id]
    assert take(run, "v", 8) == []
    run.pass_time(1.0)
    assert counts(run) == {"waiting": 0, "running": 0, "workers": 2}


def test_what_could_not_be_begun_waits_again(run: World) -> None:
    offer(run, "a", *run.lease("a", 1, 0))
    (task,) = take(run, "w", 8)
    assert run.ask("w", EndSessions(leases=[], unbegun=leases(task))) == Ok()
    assert take(run, "v", 8) == [task]
    assert run.ask("w", EndSessions(leases=leases(task))) == Ok()  # not its any more
    assert lost(run, "v", task) == []


def test_a_session_takes_the_place_of_the_one_before(run: World) -> None:
    (sample,) = run.lease("a", 1, 0)
    offer(run, "a", sample)
    (old,) = take(run, "w", 8)
    offer(run, "a", sample, session="y")  # the sample began anew under the same lease
    (new,) = take(run, "v", 8)
    assert new.url != old.url
    assert lost(run, "w", old) == [old.sample_id]
    assert lost(run, "v", new) == []


def test_a_restarted_buffer_learns_of_sessions_again() -> None:
    run = world(lease_s=LEASE_S, durable=True)
    run.join("env_worker", "w")
    samples = run.lease("a", 3, 0)
    offer(run, "a", *samples)
    begun = take(run, "w", 2)
    run.restart_broker()
    offer(run, "a", samples[2])  # those that wait are offered again
    assert lost(run, "w", *begun) == []  # those that run are renewed
    (task,) = take(run, "w", 8)
    assert task.sample_id == samples[2].sample_id
    run.pass_time(LEASE_S / 2)
    assert lost(run, "w", *begun, task) == []
    assert counts(run) == {"waiting": 0, "running": 3, "workers": 1}


def test_roles_keep_to_what_is_theirs(run: World) -> None:
    for name, body in (
        ("w", OfferSessions(url=URL, sessions=[])),
        ("a", question(1)),
        ("a", EndSessions(leases=[])),
    ):
        answer = run.ask(name, body)
        assert isinstance(answer, Nack) and answer.code == "wrong_role"


def test_a_run_that_ends_gives_out_none(run: World) -> None:
    assert run.ask("w", question(1, wait_s=5.0)) is None
    offer(run, "a", *run.lease("a", 1, 0)[:0])
    run.take(run.broker.drain("enough", run.now))
    assert run.late.pop("w") == [SessionLeases(tasks=[])]
    assert take(run, "v", 8) == []
