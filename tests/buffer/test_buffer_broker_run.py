"""The broker's rules on staleness, members, operators and the end; B = 4 samples."""

from typing import Any

import pytest
from fakes.broker_world import trajectory, world
from msgspec.structs import replace

from umbra.proto import messages as m
from umbra.proto.records import Score
from umbra.services.buffer import members
from umbra.services.buffer.effects import Reply
from umbra.services.buffer.members import BEATS_PER_S, BEATS_UNTIL_DEAD


@pytest.mark.parametrize("swept", [True, False])
def test_a_straggler_past_the_bound_ends_its_group_as_stale_and_is_replaced(swept: bool) -> None:
    """With a commit if a stored answer of its group became stale, else when it comes itself."""
    run = world(run_ahead=1, max_staleness=1)
    straggler, sibling = run.lease("a", 2, 0)
    if swept:
        run.submit("a", trajectory(sibling, 0))
    run.produce("b", 0)  # three groups
    for step in (1, 2):
        run.train(step)
        run.produce("b", step)
    assert run.pool.ledger.ended == ({"stale": 2} if swept else {})
    said = "has ended" if swept else "stale: a token of version 0, the trainer is at 2"
    assert said in run.submit("a", trajectory(straggler, 0)).refused[straggler.sample_id]
    assert run.pool.ledger.ended == {"stale": 2}
    assert run.status.health["stale_samples"] == (1 / 9 if swept else 0), "of stored answers"


def test_staleness_of_trained_samples_is_split_by_where_it_arose() -> None:
    run = world(run_ahead=1, max_staleness=2)
    tasks = run.lease("a", 8, 0)
    run.submit("a", *(trajectory(task, 0) for task in tasks[:4]))
    run.train(1)
    # Half of the second batch has seen the update, half has not.
    run.submit("a", *(trajectory(task, 0, 1) for task in tasks[4:6]))
    run.submit("a", *(trajectory(task, 0) for task in tasks[6:]))
    run.train(2)
    status = run.status
    # 4 samples of staleness 0, then 2 in flight and 2 in queue of staleness 1.
    assert status.staleness == {
        "mean": 0.5, "max": 1.0, "in_flight_mean": 0.25, "in_queue_mean": 0.25,
        "mixed_fraction": 0.25, "last_mean": 1.0, "last_max": 1.0, "bound": 2.0, "typical": 1.0,
    }  # fmt: skip
    assert status.counters["mixed_version"] == 2
    first, second = (row.fields for row in run.rows if row.kind == "batch")
    assert (first["step"], second["step"], second["staleness_in_flight_mean"]) == (1, 2, 0.5)


BEAT = m.Heartbeat(state="ready", activity="x", progress=1, idle_s=0.0)


def code(answer: m.Message | None) -> str:
    assert isinstance(answer, m.Nack), answer
    return answer.code


def test_commits_are_counted_once_and_only_for_what_was_leased() -> None:
    run = world(run_ahead=0)
    run.produce("a", 0)
    run.batch(1)
    for late in (False, False, True):
        if late:  # when the next batch is leased already
            run.produce("a", 1)
            run.batch(2)
        assert run.commit(1).version == 1
        assert run.pool.ledger.trained == 4
    assert run.broker.counters["repeated_commits"] == 2
    assert isinstance(run.ask("trainer", m.CommitBatch(step=0)), m.Nack)


def test_a_trainer_with_a_batch_may_be_silent_for_longer() -> None:
    run = world(dead_after_s=5)
    run.produce("a", 0)
    run.batch(1)
    run.pass_time(119)
    assert list(run.broker.members.peers) == ["trainer"]
    run.pass_time(2)
    assert not run.broker.members.peers


def test_requests_are_only_for_members_of_the_right_role_and_of_what_there_is() -> None:
    run = world(steps=100, stages=["ref_logp"])
    run.join("scorer", "r")
    (task,) = run.lease("a", 1, 0)
    made, score = trajectory(task, 0), Score(sample_id=task.sample_id, attempt=1, logprobs=b"")
    for name, body, code in [
        ("outsider", m.LeaseTasks(capacity=1, version=0, wait_s=0), "not_member"),
        ("a", m.LeaseBatch(step=1, wait_s=0), "wrong_role"),
        ("a", m.CommitBatch(step=1), "wrong_role"),
        ("a", m.FinishRun(reason=""), "wrong_role"),
        ("trainer", m.SubmitResults(trajectories=[]), "wrong_role"),
        ("a", m.LeaseTasks(kind="ref_logp", capacity=1, wait_s=0), "wrong_role"),
        ("r", m.LeaseTasks(capacity=1, version=0, wait_s=0), "wrong_role"),
        ("a", m.SubmitResults(scores=[score]), "wrong_role"),
        ("r", m.SubmitResults(trajectories=[made]), "wrong_role"),
        ("r", m.SubmitResults(trajectories=[made], scores=[score]), "wrong_role"),
        ("r", m.SubmitResults(capacity=4), "wrong_role"),
        ("a", m.TaskLeases(tasks=[]), "unexpected"),
        ("a", m.LeaseTasks(capacity=1, version=-1, wait_s=0), "wrong_version"),
        ("a", m.LeaseTasks(capacity=1, version=1, wait_s=0), "wrong_version"),
        ("r", m.LeaseTasks(kind="reward", capacity=1, wait_s=0), "unknown_stage"),
        *(("trainer", m.LeaseBatch(step=step, wait_s=0), "wrong_step") for step in (0, 101, 2)),
        ("trainer", m.CommitBatch(step=1), "not_leased"),
    ]:
        before = run.broker.counters[code]
        reply = run.get(name, body, m.Nack)
        assert (reply.code, run.broker.counters[code]) == (code, before + 1), body
        assert "so the next is 1" in reply.reason or code != "wrong_step"
    assert run.pool.samples[task.sample_id].holder == "a"
    assert run.ask("anyone", m.Ping()) == m.Pong(role="buffer", state="ready")
    status = run.get("anyone", m.StatusRequest(), m.Status)
    assert [member.name for member in status.members] == ["a", "b", "trainer", "r"]
    assert run.ask("anyone", m.Ok()) is None


def test_a_name_is_of_one_role_of_one_connection_and_of_the_newest_incarnation() -> None:
    run = world()
    other = run.ask("b", m.Join(role="generator", name="c", pid=1, host="h"))
    stolen = replace(run.request("a", BEAT), identity=b"another")
    (effect,) = run.broker.handle_all([stolen], run.now)
    assert isinstance(effect, Reply)
    answers = [run.join("scorer", "a", "a-2"), other, effect.body]
    assert [code(one) for one in answers] == ["name_taken", "wrong_name", "not_allowed"]
    (told,) = run.status.refused
    assert told == "Heartbeat of 'a': 'a' has joined over another connection"
    run.join("generator", "a", "a-2")
    assert run.broker.counters["superseded"] == 1
    assert isinstance(run.beat("a"), m.HeartbeatAck)
    body = m.Join(role="generator", name="a", pid=1, host="h")
    for old in (m.LeaseTasks(capacity=1, version=0, wait_s=0), body):
        assert code(run.ask("a", old, incarnation="a-1")) == "stale_incarnation"


@pytest.mark.parametrize("role", ["trainer", "weight_hub", "generator"])
def test_a_second_process_does_not_take_the_name_of_a_live_one(role: Any) -> None:
    run, it = world(dead_after_s=15), "trainer" if role == "trainer" else "it"
    assert isinstance(run.join(role, it), m.Welcome)
    for replaces in (0, 2):  # another pid than the holder's
        refused = run.join(role, it, "it-2", replaces=replaces)
        assert code(refused) == "name_in_use" and "pid 1 on h1" in str(refused)
    run.pass_time(2)
    assert isinstance(run.beat(it), m.HeartbeatAck)  # it is still a member
    run.pass_time(2)
    assert code(run.join(role, it, "it-2", replaces=0)) == "name_in_use"
    run.pass_time(2)  # silent for three heartbeats by now
    assert isinstance(run.join(role, it, "it-2", replaces=0), m.Welcome)
    vouched = run.join(role, it, "it-3", replaces=1)
    assert isinstance(vouched, m.Welcome), "its supervisor knows that the one before is dead"


def test_a_second_trainer_is_refused_while_the_first_lives_and_the_dead_may_return() -> None:
    run = world(dead_after_s=5)
    refusal = run.join("trainer", "other")
    assert code(refusal) == "duplicate_trainer" and "'trainer'" in str(refusal)
    run.pass_time(6)
    assert "dead: silent for 6 s" in str(run.beat("a"))
    assert isinstance(run.join("generator", "a"), m.Welcome)
    assert isinstance(run.join("trainer", "other"), m.Welcome)
    assert set(run.status.departed) == {"b", "trainer"}


def test_a_parked_request_is_refused_when_its_member_departs_and_by_no_other_departure() -> None:
    """Without an answer the server would take its resends for a waiting request's."""
    run = world(run_ahead=0)
    run.produce("a", 0, capacity=3)
    (last,) = run.lease("b", 1, 0)
    assert run.ask("trainer", m.LeaseBatch(step=1, wait_s=9)) is None
    run.ask("a", m.LeaseTasks(capacity=1, version=0, wait_s=5))
    run.join("generator", "a", "a-2")
    assert run.late["trainer"] == []
    run.answer("b", [last], 0)
    [batch] = run.late.pop("trainer")
    assert isinstance(batch, m.BatchLease) and len(batch.trajectories) == 4, "as soon as it is full"
    run.commit(1)
    run.ask("trainer", m.LeaseBatch(step=2, wait_s=9))
    run.join("trainer", "trainer", "trainer-2")
    run.pass_time(6)
    for name in ("a", "trainer"):
        [refused] = run.late[name]
        assert code(refused) == "not_member"


def test_the_status_names_what_is_overdue() -> None:
    run = world(run_ahead=0, lease_s=10, stall_s=30, dead_after_s=1000)
    task, *_ = run.lease("a", 4, 0)
    run.batch(1)
    for _ in range(25):
        run.pass_time(5)
        run.ask("a", m.RenewLeases(leases=[(task.sample_id, 1)]))
        run.beat("a", idle_s=run.now)
    stuck = {item.what: item for item in run.status.stuck}
    assert stuck["no progress in 'x'"].holder == "a"
    assert {item.holder for item in stuck.values() if item.what == "no heartbeat"} == {"trainer"}
    (batch,) = [item for item in stuck.values() if item.what.startswith("batch of step 1")]
    assert "waiting for sample s-0 held by a for 125.0 s" in batch.what and batch.age_s == 125


def test_the_wait_for_a_batch_ends_with_the_batch_the_trainer_or_the_run() -> None:
    run = world(run_ahead=0, stall_s=5, dead_after_s=1000)

    def overdue() -> bool:
        return any(item.what.startswith("batch of step") for item in run.status.stuck)

    def wait(step: int, seconds: float) -> None:
        assert run.ask("trainer", m.LeaseBatch(step=step, wait_s=99)) is None
        run.pass_time(seconds)

    run.pass_time(1)
    wait(1, 3)
    run.produce("a", 0)
    run.commit(1)
    run.pass_time(6)
    assert not overdue()
    wait(2, 6)
    assert overdue()
    run.join("trainer", "trainer", "trainer-2")
    assert not overdue()
    wait(2, 6)
    assert overdue()
    run.take(run.broker.drain("signal", run.now))
    assert not overdue()
    assert [row.fields["wait_s"] for row in run.rows if row.kind == "batch"] == [3]


def test_the_status_names_who_keeps_a_group_from_its_scorer() -> None:
    """A reward of whole groups waits for the last answer; the trainer waits for both."""
    run = world(reward_scope="group", stages=["reward"], batch_groups=1, run_ahead=0)
    tasks = run.lease("a", 2, 0)
    run.answer("a", tasks[:1], 0)
    why = run.batch(1).waiting_for
    assert "stage reward waits for all of its group: waiting for sample s-1 held by a" in why


def test_an_answer_forgets_leases_that_were_lost_before_it() -> None:
    """Two losses would fail a sample; one of its generation and one of its score do not."""
    run = world(max_attempts=2, stages=["reward"], lease_s=10, dead_after_s=1000)
    run.join("scorer", "r")
    run.lease("a", 1, 0)
    run.pass_time(11)
    (task,) = run.lease("a", 1, 0)
    assert task.attempt == 2
    run.answer("a", [task], 0)
    assert run.to_score("r", capacity=1)
    run.pass_time(11)
    (scored,) = run.to_score("r", capacity=1)
    assert scored.sample_id == task.sample_id
    assert not run.status.ledger.ended.get("failed")


@pytest.mark.parametrize("change", [{"attempt": 9}, {"sample_id": "s-9"}, {"group_id": "g-9"}])
def test_a_partial_of_another_lease_is_not_kept(change: dict[str, Any]) -> None:
    run = world()
    (task,) = run.lease("a", 1, 0)
    run.back("a", task, partial=trajectory(task, 0, **change))
    assert run.broker.run.counters["malformed_partial"] == 1
    (again,) = run.lease("a", 1, 0)
    assert (again.sample_id, again.trajectory) == (task.sample_id, None)


def test_a_batch_is_measured_once_and_a_step_without_update_is_counted() -> None:
    run = world()
    run.produce("a", 0)
    assert run.batch(1).trajectories == run.batch(1).trajectories
    assert [row.fields["step"] for row in run.rows if row.kind == "batch"] == [1]
    first, again = [row.fields["digest"] for row in run.rows if row.kind == "handed_out"]
    assert first == again
    run.get("trainer", m.CommitBatch(step=1, metrics={"skipped": 1.0}), m.CommitAck)
    run.produce("a", 1)
    run.batch(2)
    run.get("trainer", m.CommitBatch(step=2, metrics={"skipped": 0.0}), m.CommitAck)
    assert run.broker.run.counters["batches_skipped"] == 1


def test_finishing_cancels_what_is_in_flight_and_asks_everyone_to_leave() -> None:
    run = world()
    run.produce("a", 0, capacity=5)
    tasks = run.lease("b", 2, 0)
    run.batch(1)
    run.join("monitor", "m")
    ledger = run.get("trainer", m.FinishRun(reason="steps reached"), m.RunFinished).ledger
    assert ledger.ended == {"cancelled": ledger.issued} and ledger.balance == 0
    told = {name for name, body in run.pushes if isinstance(body, m.Command)}
    assert told == {"a", "b", "trainer", "m"}
    refused = run.submit("b", trajectory(tasks[0], 0)).refused
    assert refused.keys() == {tasks[0].sample_id}
    assert run.lease("a", 1, 0) == []
    assert run.batch(1).waiting_for == "nothing: the run is ending"
    assert run.get("trainer", m.FinishRun(reason="again"), m.RunFinished).ledger == ledger
    assert code(run.join("generator", "c")) == "run_ending"
    assert [run.broker.is_over(run.now + s) for s in (9, 10)] == [False, True], "not for ever"
    for name in ("a", "b", "trainer"):
        assert not run.broker.is_over(run.now)
        run.ask(name, m.Leave(reason="drained"))
    assert run.broker.is_over(run.now)  # the monitor need not leave
    run.take(run.broker.close(run.now))
    assert run.rows[-1].kind == "ledger"
    assert run.status.state == "stopped"


def test_draining_gives_out_nothing_new_but_takes_what_comes_back() -> None:
    run = world(dead_after_s=1000)
    tasks = run.lease("a", 8, 0)
    run.submit("a", *(trajectory(task, 0) for task in tasks[:4]))
    run.batch(1)
    run.ask("b", m.LeaseTasks(capacity=1, version=0, wait_s=9))
    run.take(run.broker.drain("signal", run.now))
    assert run.late["b"] == [m.TaskLeases(tasks=[])]
    assert run.submit("a", trajectory(tasks[4], 0)).accepted == 1
    assert run.commit(1).version == 1
    run.pushes.clear()
    run.beat("b")  # has not heard of it
    assert [name for name, _ in run.pushes] == ["b"]
    run.pass_time(8)
    assert run.broker.is_over(run.now)
    run.take(run.broker.close(run.now))
    ledger = run.pool.ledger.snapshot()
    assert (ledger.trained, ledger.ended, ledger.balance) == (4, {"cancelled": 4}, 0)


def test_many_members_beat_more_slowly() -> None:
    run = world(dead_after_s=15)
    for count, pace_s in [(64, 1.0), (130, 130 / BEATS_PER_S), (530, 15 / BEATS_UNTIL_DEAD)]:
        for number in range(len(run.broker.members.peers), count):
            run.join("generator", f"g{number}")
        assert run.get("a", BEAT, m.HeartbeatAck).heartbeat_s == pace_s
    run.pass_time(8.9)
    assert not run.get("a", m.StatusRequest(), m.Status).stuck  # beats are further apart


def test_a_member_is_asked_to_leave_until_it_does() -> None:
    run = world(durable=True)
    assert run.ask("op", m.Drain(member="a", reason="its node is needed")) == m.Ok()
    assert run.pushes == [("a", m.Command(kind="drain", reason="its node is needed"))]
    assert isinstance(run.beat("a"), m.HeartbeatAck)  # the command was lost
    assert len(run.pushes) == 2
    run.beat("a", state="draining")
    run.beat("b")
    assert len(run.pushes) == 2 and run.broker.run.state == "ready"
    run.restart_broker()
    run.beat("b")  # it can be reached once it speaks to the restarted one
    assert run.ask("op", m.Drain(member="b", reason="x")) == m.Ok()
    assert run.pushes[2:] == [("b", m.Command(kind="drain", reason="x"))]


def test_the_hub_is_told_to_everyone_and_relays_beside_it_may_be_drained() -> None:
    run = world(durable=True)
    where = {"weights": "tcp://hub:1"}
    for role, name in (("relay", "relay-b"), ("weight_hub", "hub"), ("relay", "relay-c")):
        body = m.Join(role=role, name=name, pid=1, host="h", endpoints=where)  # type: ignore[arg-type]
        assert isinstance(run.ask(name, body), m.Welcome)
    assert code(run.join("weight_hub", "hub-2")) == "duplicate_weight_hub"
    for name, words in [
        ("hub", "drain the run as a whole"),
        ("c", "members are a, b, hub"),
    ]:
        refused = run.get("op", m.Drain(member=name), m.Nack)
        assert refused.code == "not_drainable" and words in refused.reason
    assert run.ask("op", m.Drain(member="relay-b")) == m.Ok()
    assert run.pushes == [("relay-b", m.Command(kind="drain", reason="drained on request"))]
    run.restart_broker()
    assert run.ask("op", m.Drain(member="relay-c")) == m.Ok()
    alone = m.HeartbeatAck(version=0, heartbeat_s=1.0)
    assert run.beat("a") == replace(alone, weights="tcp://hub:1", weights_incarnation="hub-1")
    run.ask("hub", m.Leave(reason=""))
    assert run.beat("a") == alone


def test_the_whole_run_is_drained_and_can_go_on() -> None:
    run = world(durable=True)
    run.lease("a", 4, version=0)
    assert run.ask("op", m.Drain(reason="enough for today")) == m.Ok()
    assert sorted(name for name, _ in run.pushes) == ["a", "b", "trainer"]
    status = run.status
    assert (status.state, status.ending, status.finished) == ("draining", "enough for today", False)
    run.restart_broker()
    assert run.broker.run.state == "ready"


def test_many_watchers_cost_one_look() -> None:
    run = world()
    first = run.get("m1", m.StatusRequest(), m.Status)
    run.lease("a", 4, version=0)
    assert run.get("m2", m.StatusRequest(), m.Status).ledger == first.ledger  # of a moment ago
    run.pass_time(1.0)
    assert run.get("m1", m.StatusRequest(), m.Status).ledger.issued > first.ledger.issued


def test_of_those_that_left_the_last_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "DEPARTED_KEPT", 2)
    run = world()
    for number in range(5):
        run.join("monitor", f"m{number}")
        run.ask(f"m{number}", m.Leave(reason="done"))
    assert list(run.status.departed) == ["m3", "m4"]
