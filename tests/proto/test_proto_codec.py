"""Decoding of any bytes: it ends with a message or a WireError, in bounded memory."""

from __future__ import annotations

import json
import random
import re
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import msgpack
import pytest
from fakes.broker_world import World
from fakes.costly_frames import costly_bodies, mutate
from fakes.trajectories import trajectory
from hypothesis import given
from hypothesis import strategies as st

from umbra.proto import messages as m
from umbra.proto.access import COMMON_BYTES, HEADER_BYTES, RULES, SENDERS, body_bytes
from umbra.proto.bounds import FIGURES, LEASES, NAME_CHARS, TEXT_CHARS, TOKENS, one_line, printable
from umbra.proto.codec import (
    FILL_BYTES,
    REASON_CHARS,
    Encoder,
    decode,
    decode_header,
    nack,
    portions,
)
from umbra.proto.errors import LimitError, WireError
from umbra.proto.records import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Task,
    VersionSpan,
    array_bytes,
    pack_float32,
    pack_int32,
    unpack_float32,
    unpack_int32,
)

HEADER: dict[str, Any] = {
    "major": PROTOCOL_MAJOR, "minor": PROTOCOL_MINOR, "type": "Ping", "id": 1,
    "sender": "generator-0", "incarnation": "i1",
}  # fmt: skip
LEASE: dict[str, Any] = {"capacity": 4, "version": 2, "wait_s": 1.5}
BEAT: dict[str, Any] = {"state": "ready", "activity": "x", "progress": 1, "idle_s": 0.0}


def frames(kind: str, body: Any, **header: Any) -> list[bytes]:
    return [msgpack.packb({**HEADER, "type": kind, **header}), msgpack.packb(body)]


def refusal(given_frames: list[bytes]) -> WireError:
    with pytest.raises(WireError) as caught:
        decode(given_frames)
    return caught.value


def test_arrays_are_little_endian() -> None:
    assert pack_int32([1, -2]) == b"\x01\x00\x00\x00\xfe\xff\xff\xff"
    assert pack_float32([1.0]) == b"\x00\x00\x80\x3f"
    assert unpack_int32(pack_int32([5, -6])) == [5, -6]
    assert unpack_float32(pack_float32([0.5, -0.25])) == [0.5, -0.25]


@pytest.mark.parametrize("versions", [[4], [4, 7], [7, 4], [5, 4, 7, 6]])
def test_a_trajectory_knows_its_length_its_bytes_and_its_versions(versions: list[int]) -> None:
    spans = [VersionSpan(version=one, start=n, end=n + 1) for n, one in enumerate(versions)]
    two = pack_float32([0.0, 0.0, 0.0])
    made = trajectory([1, 2], [3, 4, 5], spans=spans)
    assert (made.oldest_version, made.newest_version) == (min(versions), max(versions))
    assert made.response_tokens == 3
    assert array_bytes(made) == 8 + 12 + 3 + 12
    assert array_bytes(trajectory(ref_logprobs=two, proximal_logprobs=two)) == 35 + 24
    assert array_bytes(None) == 0


def test_what_another_version_left_out_or_added_is_understood() -> None:
    """Defaults fill in, unknown fields are skipped, the minor version may be newer."""
    assert decode(frames("Command", {"kind": "drain"})).body == m.Command(kind="drain", reason="")
    assert decode(frames("Ping", {}, minor=PROTOCOL_MINOR + 1)).body == m.Ping()
    task = {
        "sample_id": "s", "group_id": "g", "prompt_id": "p", "attempt": 1, "row": {}, "lease_s": 9,
    }  # fmt: skip
    body = {"tasks": [{**task, "new": [1]}], "new": {"a": 1}}
    expected = Task(sample_id="s", group_id="g", prompt_id="p", attempt=1, row={}, lease_s=9.0)
    assert decode(frames("TaskLeases", body, new="x")).body == m.TaskLeases(tasks=[expected])


NOT_FINITE = (float("nan"), float("inf"), float("-inf"))
TEXT_FOR_BYTES = {name: "AAAA" for name in ("prompt_ids", "response_ids", "loss_mask", "logprobs")}


def test_a_bad_field_is_named() -> None:
    for kind, body, path, reason in (
        ("LeaseTasks", {"capacity": 4}, "$", "missing required field `wait_s`"),
        ("LeaseTasks", {**LEASE, "capacity": "4"}, "capacity", "`int`, got `str`"),
        ("LeaseTasks", {**LEASE, "capacity": True}, "capacity", "`int`, got `bool`"),
        ("LeaseTasks", [4, 2, 1.0], "$", "`object`, got `array`"),
        ("Command", {"kind": "explode"}, "kind", "'explode'"),
        ("Command", {"kind": "x` - at `$.other`"}, "kind", "Invalid enum value"),  # poses as a path
        ("RenewLeases", {"leases": [["s", 1], ["s", 1, 2]]}, "leases[1]", "length 2, got 3"),
        ("RenewLeases", {"partials": [TEXT_FOR_BYTES]}, "partials[0].prompt_ids", "got `str`"),
        ("TaskLeases", {"accepted": 1, "refused": {"s": 3}}, "refused[...]", "`str`, got `int`"),
        ("Event", {"kind": "x", "fields": {b"a": 1}}, "fields", "`str`, got `bytes`"),
        *(("LeaseTasks", {**LEASE, "wait_s": one}, "wait_s", "") for one in NOT_FINITE),
        *(("Heartbeat", {**BEAT, "stats": {"i": one}}, "stats[...]", "") for one in NOT_FINITE),
    ):
        error = refusal(frames(kind, body))
        assert (error.code, error.path) == ("malformed", path)
        assert reason in str(error)
        assert str(error).startswith(kind if path == "$" else f"{kind}.{path}: ")
        assert nack(error) == m.Nack(code="malformed", reason=str(error), path=path)


@pytest.mark.parametrize("field", HEADER)
def test_a_bad_or_missing_header_field_is_named(field: str) -> None:
    header = {key: value for key, value in HEADER.items() if key != field}
    missing = refusal([msgpack.packb(header), msgpack.packb({})])
    bad = refusal(frames("Ping", {}, **{field: []}))
    assert (missing.code, bad.code, bad.path) == ("malformed", "malformed", field)
    assert f"`{field}`" in str(missing)


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


def test_an_unknown_type_and_another_number_of_frames_are_named() -> None:
    error = refusal(frames("Teleport", {}))
    assert (error.code, error.path) == ("unknown_type", "type")
    assert "'Teleport'" in str(error)
    for count in (0, 1, 3):
        error = refusal([*frames("Ping", {}), b""][:count])
        assert error.code == "frames" and f"got {count}" in str(error)


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
    for kind in ("Event", "Ping"):
        broken = [frames(kind, {}, id=12)[0], body]
        error = refusal(broken)
        assert (error.code, error.path) == ("malformed", "$")
        assert re.fullmatch(r"(not MessagePack|Event|Ping): .+", str(error))
        assert decode_header(broken).id == 12


def test_extension_types_are_refused() -> None:
    header, begin = frames("Event", {})[0], b"\x82\xa4kind\xa1x\xa6fields\x81\xa1a"
    assert decode([header, begin + b"\x01"]).body == m.Event(kind="x", fields={"a": 1})
    extensions = [msgpack.packb(msgpack.ExtType(5, bytes(size))) for size in (0, 4, 1000)]
    for extension in (*extensions, b"\xc7\x00\xff"):  # the last: a timestamp without a length
        assert refusal([header, begin + extension]).code == "malformed"


SCORE = {"sample_id": "s", "attempt": 1, "logprobs": bytes(4 * TOKENS + 1)}


@pytest.mark.parametrize(
    ("kind", "body", "path"),
    [
        ("Leave", {"reason": "x" * (TEXT_CHARS + 1)}, "reason"),
        ("Heartbeat", {**BEAT, "activity": "x" * (NAME_CHARS + 1)}, "activity"),
        ("Heartbeat", {**BEAT, "stats": {str(n): 0.0 for n in range(FIGURES + 1)}}, "stats"),
        ("Heartbeat", {**BEAT, "stats": {"x" * (NAME_CHARS + 1): 0.0}}, "stats"),
        ("TaskLeases", {"lost": ["s"] * (LEASES + 1)}, "lost"),
        ("SubmitResults", {"scores": [SCORE]}, "scores[0].logprobs"),
    ],
    ids=["text", "name", "map", "key", "list", "bin"],
)
def test_bounds(kind: str, body: Any, path: str) -> None:
    error = refusal(frames(kind, body))
    assert isinstance(error, LimitError)
    assert (error.code, error.path) == ("too_large", path)


@pytest.mark.parametrize("character", ["\n", "\r", "\x1b", "\0", "\x7f", "\x9b", "\u2028"])
@pytest.mark.parametrize("form", ["a{}", "{}a", "a{}b"])
def test_control_characters_are_refused(character: str, form: str) -> None:
    text = form.format(character)
    assert refusal(frames("Ping", {}, sender=text)).path == "sender"
    assert refusal(frames("Heartbeat", {**BEAT, "activity": text})).path == "activity"
    assert refusal(frames("Heartbeat", {**BEAT, "stats": {text: 1.0}})).path == "stats"
    assert refusal(frames("Leave", {"reason": text})).path == "reason"


def test_what_a_process_says_of_itself_keeps_to_the_bounds() -> None:
    """Texts come from exceptions, figures from computations: neither makes a frame that fails."""
    said = m.Nack(code="x", reason="a\nb\x1b[1m" + "c" * TEXT_CHARS, path="\ud800")
    decoded = decode(Encoder("a", "b").encode(said)[1]).body
    assert isinstance(decoded, m.Nack)
    assert decoded.reason.startswith("a b [1mccc")
    assert len(decoded.reason) == TEXT_CHARS
    figures = m.CommitBatch(step=1, metrics={"loss": float("nan"), "reward": 0.5})
    kept = m.CommitBatch(step=1, metrics={"reward": 0.5})
    assert decode(Encoder("a", "b").encode(figures)[1]).body == kept


@pytest.mark.parametrize(
    "mark", list("\x1b\x9b\r\u061c\u200e\u202e\u2066\u2069\u2028\ufeff\U000e0041")
)
def test_what_reorders_or_hides_text_is_not_printed(mark: str) -> None:
    assert printable(f"a{mark}b\nc") == "a b\nc"
    assert one_line(f"a{mark}b\nc") == "a b c"
    emoji = "\U0001f469\u200d\U0001f680 \u05d0 \u65e5"
    assert printable(emoji) == emoji


@pytest.mark.parametrize(
    "name", [name for name, cls in m.TYPES.items() if body_bytes(cls) < 2 << 20]
)
def test_a_body_above_its_limit(name: str) -> None:
    """Known from the header: nothing of the body is decoded."""
    error = refusal([frames(name, {})[0], bytes(body_bytes(m.TYPES[name]) + 1)])
    assert isinstance(error, LimitError) and str(body_bytes(m.TYPES[name])) in str(error)


def test_limits_of_header_and_body() -> None:
    error = refusal(frames("Ping", {}, new="x" * HEADER_BYTES))
    assert error.code == "too_large" and str(HEADER_BYTES) in str(error)
    room = COMMON_BYTES - len(msgpack.packb({"new": bytes(1 << 15)}))
    body = msgpack.packb({"new": bytes((1 << 15) + room)})
    assert len(body) == COMMON_BYTES
    assert decode([frames("Ping", {})[0], body]).body == m.Ping()
    quoting = refusal(frames("Command", {"kind": "x" * 50_000}))
    assert len(str(quoting)) < REASON_CHARS + 100, "only the start of what was sent"
    with pytest.raises(LimitError, match="Header of 5"):
        Encoder("x" * 5000, "i").encode(m.Ping())
    large = m.Welcome(run_id="x" * COMMON_BYTES, heartbeat_s=1.0, data="")
    with pytest.raises(LimitError, match=rf"Welcome of \d+ bytes, at most {COMMON_BYTES}"):
        Encoder("x", "i").encode(large)


@pytest.mark.parametrize("value", ["\ud800", 2**64, -(2**63) - 1, object(), {1, 2j}])
def test_the_encoder_names_what_cannot_be_said(value: object) -> None:
    with pytest.raises(WireError, match="Event cannot be encoded: ") as caught:
        Encoder("x", "i").encode(m.Event(kind="x", fields={"a": value}))
    assert caught.value.code == "unencodable"


@given(sizes=st.lists(st.integers(0, 12)), most=st.integers(1, 4), fill=st.integers(1, 20))
def test_all_in_order_and_no_portion_that_could_be_fuller(
    sizes: list[int], most: int, fill: int
) -> None:
    made = list(portions(sizes, int, most, fill))
    assert [size for portion in made for size in portion] == sizes
    for portion, following in zip(made, [*made, None][1:], strict=True):
        assert 1 <= len(portion) <= most
        assert sum(portion) <= fill or len(portion) == 1
        if following is not None:
            assert len(portion) == most or sum(portion) + following[0] > fill


@pytest.mark.parametrize(("size", "lengths"), [(0, [512, 512, 1]), (FILL_BYTES, [1] * 1025)])
def test_a_portion_is_a_message_that_the_buffer_takes(size: int, lengths: list[int]) -> None:
    assert [len(portion) for portion in portions(range(1025), lambda _: size)] == lengths


SPARE = 8 << 20
TIMES = 3  # and the frame itself, which makes four
MOST = 2 << 20  # of a body here: a larger one only has more bytes in its arrays


@pytest.mark.parametrize("cls", SENDERS, ids=lambda cls: cls.__name__)
def test_a_frame_costs_no_more_than_it_brings(cls: type[m.Message]) -> None:
    """It is decoded, and the buffer does what a member of a role that may send it asks for."""
    header, sound = frames(cls.__name__, {})[0], 0
    run, role, is_asked = World(), SENDERS[cls][0], RULES[cls].socket in ("any", "control", "data")
    joined = run.join("monitor" if role == "operator" else role, HEADER["sender"], "i1")
    assert isinstance(joined, m.Welcome)
    for body in costly_bodies(cls, min(body_bytes(cls), MOST)):
        with memory_below(TIMES * len(body) + SPARE):
            if decode_or_refuse([header, body]):
                sound += 1
                if is_asked:
                    answer = run.ask(HEADER["sender"], decode([header, body]).body)
                    assert not isinstance(answer, m.Nack) or answer.code != "unexpected"
    assert sound, "none of them was decoded"


GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "frames.json"
MESSAGES = {
    name: [bytes.fromhex(frame) for frame in frames]
    for name, frames in json.loads(GOLDEN.read_text(encoding="utf-8")).items()
}
EVENT_HEADER, LEASES_HEADER = MESSAGES["Event"][0], MESSAGES["TaskLeases"][0]
MUTATIONS = 4_000
# msgpack makes room for at most 10,000 items when it reads a length, at each of 1,024 levels.
SMALL_FRAME_BOUND = 96 << 20


@contextmanager
def memory_below(bound: int) -> Iterator[None]:
    """Fail when the block's peak of allocations is above `bound` bytes."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < bound


def decode_or_refuse(frames: list[bytes]) -> bool:
    """Decode; return whether it was a message. Any error other than WireError gets out."""
    try:
        decode(frames)
    except WireError as error:
        assert 0 < len(str(error)) < 1000
        assert error.path
        return False
    return True


def test_mutated_messages() -> None:
    rng, decoded = random.Random(0), 0
    with memory_below(SMALL_FRAME_BOUND):
        for number, frames in zip(range(MUTATIONS), cycle(MESSAGES.values())):
            mutated, which = list(frames), 0 if number % 3 == 0 else 1
            mutated[which] = mutate(frames[which], rng)
            decoded += decode_or_refuse(mutated)
    assert MUTATIONS / 100 < decoded < MUTATIONS / 2, "both outcomes happen"


LEVELS = (
    b"\x91", b"\x81\xa1a", b"\xdd\x00\x00\x00\x01", b"\xdd\x00\x0f\xff\xff",
    b"\xdf\x00\x0f\xff\xff\xa1a",
)  # fmt: skip


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("depth", [500, 1024, 200_000])
def test_deep_nesting(level: bytes, depth: int) -> None:
    body = b"\x82\xa4kind\xa1x\xa6fields\x81\xa1a" + level * depth + b"\xc0"
    with memory_below(SMALL_FRAME_BOUND + 2 * len(body)):
        decode_or_refuse([EVENT_HEADER, body])
    # And where the type of the field is known.
    assert not decode_or_refuse([LEASES_HEADER, b"\x81\xa5tasks" + level * depth + b"\xc0"])
