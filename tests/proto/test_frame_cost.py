"""No frame costs its decoder more than a few times its bytes, whatever it is made of."""

from __future__ import annotations

import tracemalloc

import msgpack
import pytest
from fakes.costly_frames import costly_bodies

from umbra.proto.access import SENDERS, body_bytes
from umbra.proto.codec import decode
from umbra.proto.errors import WireError
from umbra.proto.messages import Message
from umbra.proto.records import PROTOCOL_MAJOR, PROTOCOL_MINOR

SPARE = 8 << 20
TIMES = 3  # and the frame itself, which makes four
MOST = 2 << 20  # of a body here: a larger one only has more bytes in its arrays


@pytest.mark.parametrize("cls", SENDERS, ids=lambda cls: cls.__name__)
def test_decoding_costs_no_more_than_a_frame_brings(cls: type[Message]) -> None:
    header = msgpack.packb(
        {
            "major": PROTOCOL_MAJOR, "minor": PROTOCOL_MINOR, "type": cls.__name__, "id": 1,
            "sender": "s", "incarnation": "i",
        }
    )  # fmt: skip
    sound = 0
    for body in costly_bodies(cls, min(body_bytes(cls), MOST)):
        tracemalloc.start()
        try:
            sound += decode([header, body]) is not None
        except WireError as error:
            assert len(str(error)) < 1000
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak <= TIMES * len(body) + SPARE, (len(body), body[:40])
    assert sound, "none of them was decoded"
