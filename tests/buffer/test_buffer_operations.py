"""Commands of operators: drain, evaluate, checkpoint."""

from fakes.broker_world import World, world

from umbra.proto import messages as m
from umbra.services.buffer.endpoints.trainer import CHECKPOINT_S


def test_a_member_is_asked_to_leave_until_it_does() -> None:
    run = world()
    assert run.ask("op", m.Operate(kind="drain", member="a", reason="its node is needed")) == m.Ok()
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
        refused = run.get("op", m.Operate(kind="drain", member=name), m.Nack)
        assert refused.code == "not_drainable" and words in refused.reason
    assert run.ask("op", m.Operate(kind="drain", member="relay-b")) == m.Ok()
    assert run.pushes == [("relay-b", m.Command(kind="drain", reason="drained on request"))]
    run.restart_broker()
    assert run.broker.members.hub[0] == "tcp://hub:1"
    assert run.ask("op", m.Operate(kind="drain", member="relay-c")) == m.Ok()


def test_the_whole_run_is_drained_and_can_go_on() -> None:
    run = world(durable=True)
    run.lease("a", 4, version=0)
    assert run.ask("op", m.Operate(kind="drain", reason="enough for today")) == m.Ok()
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


def test_a_checkpoint_on_request() -> None:
    """Asked for in the middle of a step; made after it; whoever asked is told of the step."""
    run = world()
    run.produce("a", version=0)
    assert not run.batch(1).checkpoint
    assert run.ask("op", m.Operate(kind="checkpoint")) is None
    run.commit(1)
    assert run.ask("other op", m.Operate(kind="checkpoint")) is None
    lease = run.batch(2)
    assert lease.checkpoint and lease.trajectories
    assert run.ask("trainer", m.CheckpointSaved(step=0, newest=1)) == m.Ok()
    assert run.late["op"] == run.late["other op"] == [m.Ok(version=1)]
    assert not run.batch(2).checkpoint
    assert run.ask("op", m.Operate(kind="checkpoint")) == m.Ok(version=1)  # there is one already


def test_nobody_waits_for_a_checkpoint_for_ever() -> None:
    """A waiting trainer is asked at once; it fails, or says nothing, or the run ends."""
    run = world()
    assert run.ask("trainer", m.LeaseBatch(step=1, wait_s=60)) is None
    for name, words in [
        ("op", "the trainer could not save its state: no space left on device"),
        ("op 2", f"no checkpoint within {CHECKPOINT_S:g} s"),
        ("op 3", "the run is ending"),
    ]:
        assert run.ask(name, m.Operate(kind="checkpoint")) is None
        if name == "op":
            (lease,) = run.late["trainer"]
            assert isinstance(lease, m.BatchLease)
            assert (lease.trajectories, lease.checkpoint) == ([], True)
            run.ask("trainer", m.CheckpointSaved(step=0, error="no space left on device"))
            assert not run.batch(1).checkpoint  # it is not tried again and again
        elif name == "op 2":
            run.pass_time(CHECKPOINT_S - 1)
            assert not run.late[name]
            run.pass_time(1)
        else:
            run.ask("op", m.Operate(kind="drain"))
        (late,) = run.late[name]
        assert isinstance(late, m.Nack) and words in late.reason
