"""Encoding and decoding: every message survives, every other frame is refused with its reason."""

from __future__ import annotations

import re
import sys
import types
import typing
from dataclasses import replace
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umbra.proto.codec import (
    DEFAULT_LIMITS,
    REASON_CHARS,
    Encoder,
    Limits,
    decode,
    decode_header,
    nack,
)
from umbra.proto.errors import LimitError, WireError
from umbra.proto.messages import (
    TYPES,
    Command,
    CommitBatch,
    Event,
    Join,
    LeaseSamples,
    Nack,
    Ping,
    SampleLeases,
    SubmitTrajectories,
)
from umbra.proto.records import (
    Record,
    SampleTask,
    Trajectory,
    VersionSpan,
    pack_float32,
    pack_int32,
    unpack_float32,
    unpack_int32,
)
from umbra.proto.version import PROTOCOL_MAJOR, PROTOCOL_MINOR

HEADER: dict[str, Any] = {
    "major": PROTOCOL_MAJOR,
    "minor": PROTOCOL_MINOR,
    "type": "Ping",
    "id": 1,
    "sender": "generator-0",
    "incarnation": "i1",
}
LEASE: dict[str, Any] = {"capacity": 4, "version": 2, "wait_s": 1.5}
TRAJECTORY = Trajectory(
    sample_id="s0",
    group_id="g0",
    prompt_id="p0",
    attempt=1,
    prompt_ids=pack_int32([1, 2]),
    response_ids=pack_int32([3, 4, 5]),
    loss_mask=b"\1\0\1",
    logprobs=pack_float32([-0.5, 0.0, -0.25]),
    spans=[VersionSpan(version=0, start=0, end=2), VersionSpan(version=1, start=2, end=3)],
    finish_reason="stop",
)
SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**64 - 1),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    str: st.text(max_size=8),
    bytes: st.binary(max_size=8),
    types.NoneType: st.none(),
}
PLAIN = st.recursive(
    st.one_of(list(SCALARS.values())),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=4,
)


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Make values of a field's type."""
    inner = typing.get_args(kind)
    match typing.get_origin(kind):
        case typing.Literal:
            return st.sampled_from(inner)
        case typing.Union | types.UnionType:
            return st.one_of([values(kind) for kind in inner])
        case origin if origin is list:
            return st.lists(values(inner[0]), max_size=2)
        case origin if origin is tuple:
            return st.tuples(*map(values, inner))
        case origin if origin is dict:
            return st.dictionaries(st.text(max_size=4), values(inner[1]), max_size=2)
        case _ if kind is Any:
            return PLAIN
        case _ if kind in SCALARS:
            return SCALARS[kind]
        case _:
            return records(kind)


def records(cls: type[Record]) -> st.SearchStrategy[Any]:
    """Make records of a class."""
    hints = typing.get_type_hints(cls)
    return st.builds(cls, **{name: values(kind) for name, kind in hints.items()})


def frames(kind: str, body: Any, **header: Any) -> list[bytes]:
    """Pack a header with changes and a body of plain values."""
    return [msgpack.packb({**HEADER, "type": kind, **header}), msgpack.packb(body)]


def refusal(given_frames: list[bytes], **limits: int) -> WireError:
    """Return the error that decoding ends with."""
    with pytest.raises(WireError) as caught:
        decode(given_frames, replace(DEFAULT_LIMITS, **limits))
    return caught.value


# -- what is valid survives -----------------------------------------------------------------------


@pytest.mark.parametrize("name", TYPES)
@settings(max_examples=10, deadline=None, derandomize=True)
@given(data=st.data())
def test_round_trip(name: str, data: st.DataObject) -> None:
    body = data.draw(records(TYPES[name]))
    number, encoded = Encoder("trainer", "i7").encode(body, reply_to=3)
    envelope = decode([*encoded, *[b"raw"] * body.raw_frames()])
    assert envelope.body == body
    header = envelope.header
    assert (header.major, header.minor) == (PROTOCOL_MAJOR, PROTOCOL_MINOR)
    assert (header.type, header.id, header.reply_to) == (name, number, 3)
    assert (header.sender, header.incarnation) == ("trainer", "i7")


def test_ids_count_up_from_one() -> None:
    encoder = Encoder("trainer", "i7")
    assert [encoder.encode(Ping())[0] for _ in range(3)] == [1, 2, 3]


def test_arrays_are_little_endian() -> None:
    assert pack_int32([1, -2]) == b"\x01\x00\x00\x00\xfe\xff\xff\xff"
    assert pack_float32([1.0]) == b"\x00\x00\x80\x3f"
    assert unpack_int32(pack_int32([5, -6])) == [5, -6]
    assert unpack_float32(pack_float32([0.5, -0.25])) == [0.5, -0.25]


def test_a_trajectory_knows_its_length_and_its_versions() -> None:
    decoded = decode(Encoder("g", "i").encode(SubmitTrajectories(trajectories=[TRAJECTORY]))[1])
    assert isinstance(decoded.body, SubmitTrajectories)
    trajectory = decoded.body.trajectories[0]
    assert trajectory == TRAJECTORY
    assert trajectory.response_tokens == 3
    assert (trajectory.oldest_version, trajectory.newest_version) == (0, 1)


def test_defaults_fill_in_what_a_sender_left_out() -> None:
    body = decode(frames("Command", {"kind": "drain"})).body
    assert body == Command(kind="drain", reason="")


def test_defaults_are_not_shared_between_messages() -> None:
    first, second = (decode(frames("CommitBatch", {"step": 1})).body for _ in range(2))
    assert isinstance(first, CommitBatch)
    assert isinstance(second, CommitBatch)
    first.metrics["loss"] = 1.0
    assert second.metrics == {}


def test_unknown_fields_are_skipped_at_every_depth() -> None:
    task = {
        "sample_id": "s", "group_id": "g", "prompt_id": "p", "attempt": 1, "row": {}, "lease_s": 9,
    }  # fmt: skip
    envelope = decode(
        frames("SampleLeases", {"tasks": [{**task, "new": [1]}], "new": {"a": 1}}, new="x")
    )
    expected = SampleTask(
        sample_id="s", group_id="g", prompt_id="p", attempt=1, row={}, lease_s=9.0
    )
    assert envelope.body == SampleLeases(tasks=[expected])


def test_a_newer_minor_version_is_understood() -> None:
    assert decode(frames("Ping", {}, minor=PROTOCOL_MINOR + 1)).body == Ping()


def test_an_int_is_taken_for_a_float() -> None:
    body = decode(frames("LeaseSamples", {**LEASE, "wait_s": 3})).body
    assert body == LeaseSamples(capacity=4, version=2, wait_s=3.0)


# -- what is not valid is refused -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "body", "path", "reason"),
    [
        ("LeaseSamples", {"capacity": 4, "wait_s": 1.0}, "$", "missing required field `version`"),
        ("LeaseSamples", {**LEASE, "capacity": "4"}, "capacity", "`int`, got `str`"),
        ("LeaseSamples", {**LEASE, "capacity": 4.0}, "capacity", "`int`, got `float`"),
        ("LeaseSamples", {**LEASE, "capacity": True}, "capacity", "`int`, got `bool`"),
        ("LeaseSamples", {**LEASE, "wait_s": None}, "wait_s", "`float`, got `null`"),
        ("LeaseSamples", [4, 2, 1.0], "$", "`object`, got `array`"),
        ("LeaseSamples", None, "$", "got `null`"),
        ("Command", {"kind": "explode"}, "kind", "'explode'"),
        ("RenewLeases", {"leases": [["s", 1], ["s", 1, 2]]}, "leases[1]", "length 2, got 3"),
        ("RenewLeases", {"leases": [["s", "1"]]}, "leases[0][1]", "`int`, got `str`"),
        ("SampleLeases", {"tasks": [{"sample_id": 1}]}, "tasks[0].sample_id", "got `int`"),
        ("SubmitAck", {"accepted": 1, "refused": {"s": 3}}, "refused[...]", "`str`, got `int`"),
        ("Event", {"kind": "x", "fields": {b"a": 1}}, "fields", "`str`, got `bytes`"),
    ],
)
def test_a_bad_field_is_named(kind: str, body: Any, path: str, reason: str) -> None:
    error = refusal(frames(kind, body))
    assert (error.code, error.path) == ("malformed", path)
    assert reason in str(error)
    assert str(error).startswith(kind if path == "$" else f"{kind}.{path}: ")


def test_text_is_not_taken_for_bytes() -> None:
    fields = {name: getattr(TRAJECTORY, name) for name in TRAJECTORY.__struct_fields__}
    fields |= {"spans": [], "sampling": {}, "prompt_ids": "AAAA"}
    error = refusal(frames("SubmitTrajectories", {"trajectories": [fields]}))
    assert error.path == "trajectories[0].prompt_ids"


@pytest.mark.parametrize("field", [name for name in HEADER if name != "major"])
def test_a_bad_header_field_is_named(field: str) -> None:
    error = refusal(frames("Ping", {}, **{field: []}))
    assert (error.code, error.path) == ("malformed", field)


@pytest.mark.parametrize("field", HEADER)
def test_a_missing_header_field_is_named(field: str) -> None:
    header = {key: value for key, value in HEADER.items() if key != field}
    error = refusal([msgpack.packb(header), msgpack.packb({})])
    assert error.code == "malformed"
    assert f"`{field}`" in str(error)


def test_an_unknown_type_is_named() -> None:
    error = refusal(frames("Teleport", {}))
    assert (error.code, error.path) == ("unknown_type", "type")
    assert "'Teleport'" in str(error)


@pytest.mark.parametrize(
    ("major", "ours"), [(PROTOCOL_MAJOR - 1, False), (PROTOCOL_MAJOR + 1, True), (2**63, True)]
)
def test_another_major_is_refused_with_whom_to_upgrade(major: int, ours: bool) -> None:
    error = refusal(frames("Ping", {}, major=major, minor=3))
    assert (error.code, error.path) == ("protocol", "major")
    assert str(error) == (
        f"generator-0 speaks protocol {major}.3, this process {PROTOCOL_MAJOR}.{PROTOCOL_MINOR}: "
        f"upgrade the umbra-rl {'here' if ours else 'of generator-0'}"
    )


def test_another_major_may_have_changed_the_rest_of_the_header() -> None:
    error = refusal([msgpack.packb({"major": PROTOCOL_MAJOR + 1, "id": "seven"}), b""])
    assert error.code == "protocol"


@pytest.mark.parametrize("count", [0, 1, 3, 5])
def test_the_number_of_frames(count: int) -> None:
    error = refusal([*frames("Ping", {}), b"", b"", b""][:count])
    assert error.code == "frames"
    assert f"got {count if count < 2 else count - 2}" in str(error)


def test_raw_frames_come_as_they_were_sent() -> None:
    piece = {"bucket": 1, "result": 2}
    given = frames("Buckets", {"number": 1, "pieces": [piece, piece]})
    assert decode([*given, b"a", b""]).raw == (b"a", b"")
    assert decode(given, raw=[memoryview(b"a"), b""]).raw == (b"a", b"")
    assert refusal([*given, b"a"]).code == "frames"
    assert refusal([*given, b"a", bytes(99)], header_bytes=4096, frame_bytes=98).code == "too_large"


def test_a_header_can_be_read_when_the_body_cannot() -> None:
    broken = [frames("Ping", {}, id=12)[0], b"\xc1"]
    assert refusal(broken).code == "malformed"
    assert decode_header(broken).id == 12


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",  # the byte that MessagePack never uses
        b"\x80\x80",  # two values
        b"\x81\xa1a",  # a key without a value
        b"\xa1\xff",  # not UTF-8
        b"\x81\x01\x02",  # a key that is not text
        b"\x81\x90\x02",  # a key that cannot be hashed
    ],
)
def test_what_is_not_messagepack(body: bytes) -> None:
    error = refusal([frames("Event", {})[0], body])
    assert (error.code, error.path) == ("malformed", "$")
    assert str(error).startswith("not MessagePack: ")
    assert len(str(error)) > len("not MessagePack: ")


@pytest.mark.parametrize(
    "extension",
    [
        msgpack.packb(msgpack.ExtType(5, b"")),
        msgpack.packb(msgpack.ExtType(5, b"1234")),
        msgpack.packb(msgpack.ExtType(5, b"x" * 1000)),
        b"\xd6\xff\x00\x00\x00\x00",  # a timestamp
        b"\xc7\x00\xff",  # a timestamp without a length
    ],
)
def test_extension_types_are_refused(extension: bytes) -> None:
    body = b"\x82\xa4kind\xa1x\xa6fields\x81\xa1a" + extension
    assert decode([frames("Event", {})[0], body.replace(extension, b"\x01")]).body == Event(
        kind="x", fields={"a": 1}
    )
    assert refusal([frames("Event", {})[0], body]).code == "malformed"


# -- limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "limits"),
    [
        (b"x" * 101, {"bin_bytes": 100}),
        ("x" * 101, {"str_bytes": 100}),
        ([0] * 101, {"items": 100}),
        ({str(number): 0 for number in range(101)}, {"items": 100}),
        (b"x" * 101, {"frame_bytes": 100}),
    ],
)
def test_limits(value: Any, limits: dict[str, int]) -> None:
    event = frames("Event", {"kind": "x", "fields": {"a": value}}, sender="me")
    assert decode(event).header.sender == "me"
    error = refusal(event, **limits)
    assert isinstance(error, LimitError)
    assert error.code == "too_large"
    assert "100" in str(error)


@pytest.mark.parametrize(
    ("value", "limits"),
    [
        (b"x" * 100, {"bin_bytes": 100}),
        ("x" * 100, {"str_bytes": 100}),
        ([0] * 100, {"items": 100}),
        ({str(number): 0 for number in range(100)}, {"items": 100}),
    ],
)
def test_what_is_at_a_limit_is_taken(value: Any, limits: dict[str, int]) -> None:
    event = frames("Event", {"kind": "x", "fields": {"a": value}}, sender="me")
    size = {"frame_bytes": len(event[1]), "header_bytes": len(event[0])}
    assert decode(event, replace(DEFAULT_LIMITS, **limits, **size)).header.sender == "me"
    for name, most in size.items():
        with pytest.raises(LimitError):
            decode(event, replace(DEFAULT_LIMITS, **limits, **(size | {name: most - 1})))


def test_raw_frames_have_the_limit_of_all() -> None:
    body = {"number": 1, "pieces": [{"bucket": 0, "result": 1}]}
    sent = frames("Buckets", body)
    limits = replace(DEFAULT_LIMITS, frame_bytes=500)
    assert decode(sent, limits, [b"x" * 500]).raw == (b"x" * 500,)
    with pytest.raises(LimitError, match="a raw frame of more than 500 bytes"):
        decode(sent, limits, [b"x" * 501])


def test_the_quick_way_is_for_frames_in_which_no_limit_can_be_passed() -> None:
    names = ("frame_bytes", "bin_bytes", "str_bytes", "items")
    for least in names:
        limits = Limits(**{name: 7 if name == least else 9 for name in names})
        assert limits.safe_bytes == 7


@pytest.mark.parametrize(("major", "whose"), [(PROTOCOL_MAJOR + 1, "here"), (0, "of me")])
def test_of_two_majors_the_older_one_is_to_be_upgraded(major: int, whose: str) -> None:
    error = refusal(frames("Ping", {}, major=major, sender="me"))
    assert str(error).endswith(f"upgrade the umbra-rl {whose}")
    assert (error.code, error.path) == ("protocol", "major")


@pytest.mark.parametrize("order", ["little", "big"])
def test_arrays_are_little_endian_on_any_machine(
    monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    """On a machine of the other order the bytes are turned around, both ways."""
    turned = order != sys.byteorder
    monkeypatch.setattr(sys, "byteorder", order)
    packed = pack_int32([1, 2])
    assert packed == (b"\0\0\0\1\0\0\0\2" if turned else b"\1\0\0\0\2\0\0\0")
    assert unpack_int32(packed) == [1, 2]
    assert unpack_float32(pack_float32([0.5, -2.0])) == [0.5, -2.0]


def test_a_header_above_its_limit() -> None:
    error = refusal(frames("Ping", {}, new="x" * DEFAULT_LIMITS.header_bytes))
    assert error.code == "too_large"
    assert str(DEFAULT_LIMITS.header_bytes) in str(error)


def test_the_encoder_refuses_what_nobody_would_take(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LimitError, match="Header of 5"):
        Encoder("x" * 5000, "i").encode(Ping())
    monkeypatch.setattr("umbra.proto.codec.DEFAULT_LIMITS", replace(DEFAULT_LIMITS, frame_bytes=64))
    with pytest.raises(LimitError, match=r"Event of \d+ bytes, at most 64"):
        Encoder("x", "i").encode(Event(kind="x" * 100))


@pytest.mark.parametrize("value", ["\ud800", 2**64, -(2**63) - 1, object(), {1, 2j}])
def test_the_encoder_names_what_cannot_be_said(value: object) -> None:
    with pytest.raises(WireError, match="Event cannot be encoded: ") as caught:
        Encoder("x", "i").encode(Event(kind="x", fields={"a": value}))
    assert caught.value.code == "unencodable"


# -- refusals travel ------------------------------------------------------------------------------


def test_a_refusal_becomes_a_nack() -> None:
    error = refusal(frames("LeaseSamples", {**LEASE, "capacity": "4"}))
    assert nack(error) == Nack(code="malformed", reason=str(error), path="capacity")


def test_a_refusal_quotes_only_the_start_of_what_was_sent() -> None:
    error = refusal(frames("Command", {"kind": "x" * 100_000}))
    assert len(str(error)) < REASON_CHARS + 100
    assert error.path == "kind"


def test_what_was_sent_cannot_pose_as_a_path() -> None:
    error = refusal(frames("Command", {"kind": "x` - at `$.other`"}))
    assert error.path == "kind"


def test_a_nack_about_anything_can_be_sent() -> None:
    body = {"role": "\n'`x" * 1000}
    error = refusal(frames("Join", body | dict.fromkeys(Join.__struct_fields__[1:], 0)))
    sent = decode(Encoder("buffer", "i").encode(nack(error), reply_to=1)[1]).body
    assert isinstance(sent, Nack)
    assert re.fullmatch(r"role|name", sent.path)


def test_the_encoder_takes_what_is_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(Encoder("x", "i").encode(Event(kind="x" * 100))[1][1])
    at, below = (replace(DEFAULT_LIMITS, frame_bytes=most) for most in (size, size - 1))
    monkeypatch.setattr("umbra.proto.codec.DEFAULT_LIMITS", at)
    Encoder("x", "i").encode(Event(kind="x" * 100))
    monkeypatch.setattr("umbra.proto.codec.DEFAULT_LIMITS", below)
    with pytest.raises(LimitError):
        Encoder("x", "i").encode(Event(kind="x" * 100))


@pytest.mark.parametrize("versions", [[4], [4, 7], [7, 4], [5, 4, 7, 6]])
def test_the_oldest_and_the_newest_version_of_a_trajectory(versions: list[int]) -> None:
    spans = [VersionSpan(version=one, start=n, end=n + 1) for n, one in enumerate(versions)]
    made = msgspec.structs.replace(TRAJECTORY, spans=spans)
    assert (made.oldest_version, made.newest_version) == (min(versions), max(versions))
