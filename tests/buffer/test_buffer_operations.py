"""Commands of operators: drain, evaluate, checkpoint."""

from fakes.broker_world import World, world

from umbra.proto import messages as m


def test_a_member_is_asked_to_leave_until_it_does() -> None:
    run = world()
    assert run.ask("op", m.Drain(member="a", reason="its node is needed")) == m.Ok()
    assert run.pushes == [("a", m.Command(kind="drain", reason="its node is needed"))]
    assert isinstance(run.beat("a"), m.HeartbeatAck)  # the command was lost
    assert len(run.pushes) == 2
    run.beat("a", state="draining")
    run.beat("b")
    assert len(run.pushes) == 2 and run.broker.run.state == "ready"


def test_relays_join_beside_the_hub_and_may_be_drained() -> None:
    run = World(durable=True)
    where = {"weights": "tcp://hub:1"}
    for role, name in (("relay", "relay-b"), ("weight_hub", "hub"), ("relay", "relay-c")):
        body = m.Join(role=role, name=name, pid=1, host="h", endpoints=where)  # type: ignore[arg-type]
        assert isinstance(run.ask(name, body), m.Welcome)
    other = run.join("weight_hub", "hub-2")
    assert isinstance(other, m.Nack) and other.code == "duplicate_weight_hub"
    for name, words in [("hub", "drain the run as a whole"), ("c", "members are hub, relay-b")]:
        refused = run.get("op", m.Drain(member=name), m.Nack)
        assert refused.code == "not_drainable" and words in refused.reason
    assert run.ask("op", m.Drain(member="relay-b")) == m.Ok()
    assert run.pushes == [("relay-b", m.Command(kind="drain", reason="drained on request"))]
    run.restart_broker()
    assert run.broker.members.hub[0] == "tcp://hub:1"
    assert run.ask("op", m.Drain(member="relay-c")) == m.Ok()


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
