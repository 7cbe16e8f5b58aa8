"""Names belong to connections: at the hub, and at a buffer that starts again from its store."""

import pytest
from fakes.broker_world import World

from umbra.proto.access import KeyRole
from umbra.proto.messages import Header, Heartbeat, Message, Ready, Subscribe
from umbra.proto.net.server import Request
from umbra.services.buffer.effects import NackError
from umbra.services.weight_hub.service import MOST_NAMES, Bindings

SUBSCRIBE = Subscribe(host="h", planes=["tcp"])
READY = Ready(epoch=1, version=1, wire_s=0.0, stage_s=0.0)


def request(
    name: str,
    body: Message,
    *,
    identity: bytes = b"own",
    incarnation: str = "1",
    role: KeyRole | None = "generator",
) -> Request:
    header = Header(major=1, minor=0, type="x", id=1, sender=name, incarnation=incarnation)
    return Request("weights", identity, header, body, role)


def test_nobody_speaks_for_a_receiver() -> None:
    bindings = Bindings()
    assert bindings.check(request("g", SUBSCRIBE)) is None
    for outsider in (
        request("g", READY, identity=b"other"),
        request("g", SUBSCRIBE, identity=b"other"),
        request("g", READY, role="scorer"),
        request("g", SUBSCRIBE, incarnation="2", role="scorer"),
        request("g", READY, identity=b"other", incarnation="2"),
    ):
        nack = bindings.check(outsider)
        assert nack is not None and nack.code == "not_allowed", outsider
    assert bindings.check(request("g", READY)) is None
    again = request("g", SUBSCRIBE, identity=b"new", incarnation="2")
    assert bindings.check(again) is None, "it was started again"
    assert bindings.check(request("g", READY)) is not None, "the one before is superseded"


def test_names_are_bounded() -> None:
    bindings = Bindings()
    for number in range(MOST_NAMES):
        assert bindings.check(request(f"g{number}", SUBSCRIBE)) is None
    assert bindings.check(request("g0", READY)) is None
    assert bindings.check(request("new", SUBSCRIBE)) is None
    outsider = b"other"
    for name, forgotten in (("g1", True), ("g0", False), ("g2", False), ("new", False)):
        nack = bindings.check(request(name, READY, identity=outsider))
        assert (nack is None) is forgotten, f"{name}: who has not spoken for longest is forgotten"
    assert len(bindings.owners) == MOST_NAMES


def test_the_store_holds_nothing_that_opens_a_connection() -> None:
    """Of identities it has digests."""
    run = World(durable=True)
    run.join("generator", "a")
    record = run.broker.members.record("a")
    assert record is not None and b"a" not in record.values() and "identity" not in record
    run.broker.members.restore([record], 0.0)
    beat = Heartbeat(state="ready", activity="x", progress=1, idle_s=0.0)
    header = Header(major=1, minor=0, type="x", id=1, sender="a", incarnation="a-1")
    for identity in (record["seal"], b"b"):  # none is empty
        with pytest.raises(NackError, match="joined over another connection"):
            run.broker.members.hear(Request("any", identity, header, beat), 0.0)
    assert run.broker.members.hear(Request("any", b"a", header, beat), 0.0).identity == b"a"
