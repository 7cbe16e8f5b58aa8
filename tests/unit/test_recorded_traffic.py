"""Frames of plain sockets, recorded traffic, what members make of it; a buffer that hears them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from fakes.slowness import seconds
from hypothesis import given
from hypothesis import strategies as st

from umbra.proto.bounds import MEMBERS
from umbra.proto.codec import Encoder
from umbra.proto.messages import Heartbeat, LeaseSamples, Message, SubmitTrajectories
from umbra.proto.net.server import PEERS_KEPT
from umbra.proto.records import Trajectory

pytestmark = pytest.mark.usefixtures("benchmarks_importable")
BEAT = Heartbeat(state="ready", activity="decode", progress=1, idle_s=0.0)


def sent(*bodies: Message) -> bytes:
    """The file of a generator that has said `bodies`."""
    import recorded

    encoder = Encoder("generator", "i")
    return msgspec.msgpack.encode([recorded.RecordedFrame(encoder.encode(b)[1]) for b in bodies])


def recording() -> Any:
    import recorded
    import traffic

    answers = SubmitTrajectories(trajectories=[traffic.template()] * 2)
    ask = LeaseSamples(capacity=1, version=0, wait_s=1.0)
    one = SubmitTrajectories(trajectories=[traffic.template()], capacity=3)
    return recorded.recording([sent(ask, BEAT, answers, ask, one)])


@given(
    st.lists(st.lists(st.binary(max_size=600), min_size=1, max_size=4), max_size=6),
    st.integers(1, 400),
)
def test_messages_come_out_as_they_went_in_however_they_are_cut(
    messages: list[list[bytes]], piece: int
) -> None:
    import zmtp

    stream, inbox = b"".join(map(zmtp.packed, messages)), zmtp.Inbox()
    found = [
        one for at in range(0, len(stream), piece) for one in inbox.feed(stream[at : at + piece])
    ]
    assert found == messages


def test_a_frame_too_large_to_keep_comes_empty() -> None:
    import zmtp

    stream = zmtp.packed([b"head", bytes(zmtp.KEPT_BYTES + 1), b"tail"]) + zmtp.packed([b"next"])
    inbox, found = zmtp.Inbox(), list[list[bytes]]()
    for at in range(0, len(stream), 50_000):
        found += inbox.feed(stream[at : at + 50_000])
    assert found == [[b"head", b"", b"tail"], [b"next"]]


def test_libzmq_understands_a_plain_socket(zmq_context: zmq.Context[Any]) -> None:
    import zmtp

    with zmq_context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        client = zmtp.Connection(f"tcp://127.0.0.1:{port}", b"me")
        client.begin(zmtp.packed([b"header", b"body" * 100]))
        assert router.poll(1000 * seconds(10))
        assert router.recv_multipart() == [b"me", b"header", b"body" * 100]
        router.send_multipart([b"me", b"answer", b"x" * 300])
        client.socket.settimeout(seconds(10))
        found: list[list[bytes]] = []
        while not found:
            found = client.receive()
        assert found == [[b"answer", b"x" * 300]]
        client.close()


def test_a_recording_has_the_turns_and_the_sizes() -> None:
    made = recording()
    assert made.moves == [(2, False, True), (1, True, False)]
    assert len(made.trajectories) == 3
    assert 9_000 < made.trajectory_bytes < 11_000


def test_a_recording_without_answers_is_refused() -> None:
    import recorded

    with pytest.raises(ValueError, match="submitted nothing"):
        recorded.recording([sent(BEAT)])


def test_a_copy_of_a_trajectory_has_the_ids_of_the_lease() -> None:
    import recorded
    import traffic

    template = traffic.template()
    values = ("s-1", "g-1", "a prompt", 3, "generator-7")
    made = b"".join(recorded.filled(recorded.cut(template), [*map(msgspec.msgpack.encode, values)]))
    ids = dict(zip(recorded.FIELDS, values, strict=True))
    assert msgspec.msgpack.decode(made, type=Trajectory) == msgspec.structs.replace(template, **ids)


@pytest.mark.e2e
def test_a_buffer_takes_what_members_say(tmp_path: Path) -> None:
    import buffer_load

    row = buffer_load.play(tmp_path / "run", recording(), members=4, rate=0.0, seconds=seconds(0.5))
    assert row["per_s"] > 0 and row["trained_per_s"] >= 0
    assert (row["refused"], row["unanswered"]) == (0, 0)


def test_the_resends_of_all_members_are_known() -> None:
    assert PEERS_KEPT > 2 * MEMBERS + 2  # control and data socket of each; hub and trainer beside
