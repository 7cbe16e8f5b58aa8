"""The wire as it is: frames of one message of each type, kept in `tests/golden/frames.json`.

A test that fails here says that the wire has changed. If that is meant, and the version of the
protocol was raised where README.md says so, rewrite the file:

    python tests/proto/test_proto_golden.py --regen
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import msgspec.inspect as introspect
import pytest

from umbra.proto import codec
from umbra.proto.codec import Encoder, decode
from umbra.proto.messages import TYPES, Message

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "frames.json"
SENT_AT = 1_700_000_000.25


def sample(kind: introspect.Type, name: str, end: str = "") -> Any:
    """Return a value of `kind`, made out of the field's name, or the "least" or "most" of it."""
    number = sum(name.encode())
    match kind:
        case introspect.IntType(ge=ge, le=le):
            ends = {
                "least": -(2**63) if ge is None else ge,
                "most": 2**63 - 1 if le is None else le,
            }
            return ends.get(end, number)
        case introspect.FloatType(ge=ge, le=le):
            return {"least": -1e308 if ge is None else ge, "most": le or 1e308}.get(end, number / 8)
        case introspect.BoolType():
            return end != "least"
        case introspect.StrType():
            return {"least": "", "most": "\u2603"}.get(end, name)
        case introspect.BytesType():
            return name.encode()[: 0 if end == "least" else 4]
        case introspect.LiteralType():
            return kind.values[-1 if end == "most" else 0]
        case introspect.ListType() | introspect.DictType() if end == "least":
            return [] if isinstance(kind, introspect.ListType) else {}
        case introspect.ListType():
            return [sample(kind.item_type, name, end)]
        case introspect.TupleType():
            return [sample(item, name, end) for item in kind.item_types]
        case introspect.DictType():
            return {name: sample(kind.value_type, name, end)}
        case introspect.UnionType():
            return sample(kind.types[-1 if end == "least" else 0], name, end)
        case introspect.NoneType():
            return None
        case introspect.StructType():
            return {field.name: sample(field.type, field.name, end) for field in kind.fields}
        case introspect.AnyType():
            return [None, True, -number, 0.5, "text", b"\x00\xff", {"deep": []}]
        case _:
            raise NotImplementedError(kind)


def message(name: str, end: str = "") -> Message:
    cls = TYPES[name]
    values = sample(introspect.type_info(cls), name, end)
    return msgspec.convert(values, cls, builtin_types=(bytes,))


def encode(name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the frames of the golden message, in hex; only the clock is made up."""
    monkeypatch.setattr(codec.time, "time", lambda: SENT_AT)
    _, frames = Encoder("sender", "incarnation").encode(message(name), reply_to=7)
    return [frame.hex() for frame in frames]


def load() -> dict[str, list[str]]:
    return json.loads(GOLDEN.read_text(encoding="utf-8"))


def test_there_is_one_of_each_type() -> None:
    assert list(load()) == sorted(TYPES)


@pytest.mark.parametrize("name", TYPES)
def test_the_encoder_still_writes_it_and_the_decoder_reads_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = load()[name]
    assert encode(name, monkeypatch) == frames
    envelope = decode([bytes.fromhex(frame) for frame in frames])
    assert envelope.body == message(name)
    header = envelope.header
    assert (header.type, header.id, header.reply_to) == (name, 1, 7)
    assert (header.sender, header.incarnation) == ("sender", "incarnation")
    assert header.sent_at == SENT_AT


@pytest.mark.parametrize("end", ["least", "most"])
@pytest.mark.parametrize("name", TYPES)
def test_the_ends_of_every_field_survive(name: str, end: str) -> None:
    body = message(name, end)
    assert decode(Encoder("trainer", "i7").encode(body)[1]).body == body


if __name__ == "__main__" and sys.argv[1:] == ["--regen"]:
    with pytest.MonkeyPatch.context() as patch:
        made = {name: encode(name, patch) for name in sorted(TYPES)}
    GOLDEN.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
