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


def sample(kind: introspect.Type, name: str) -> Any:
    """Return a value of `kind`, made out of the field's name."""
    number = sum(name.encode())
    match kind:
        case introspect.IntType():
            return number
        case introspect.FloatType():
            return number / 8
        case introspect.BoolType():
            return True
        case introspect.StrType():
            return name
        case introspect.BytesType():
            return name.encode()[:4]
        case introspect.LiteralType():
            return kind.values[0]
        case introspect.ListType():
            return [sample(kind.item_type, name)]
        case introspect.TupleType():
            return [sample(item, name) for item in kind.item_types]
        case introspect.DictType():
            return {name: sample(kind.value_type, name)}
        case introspect.UnionType():
            return sample(kind.types[0], name)
        case introspect.NoneType():
            return None
        case introspect.StructType():
            return {field.name: sample(field.type, field.name) for field in kind.fields}
        case introspect.AnyType():
            return [None, True, -number, 0.5, "text", b"\x00\xff", {"deep": []}]
        case _:
            raise NotImplementedError(kind)


def message(name: str) -> Message:
    cls = TYPES[name]
    values = sample(introspect.type_info(cls), name)
    return msgspec.convert(values, cls, builtin_types=(bytes,))


def encode(name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the frames of the golden message, in hex; only the clock is made up."""
    monkeypatch.setattr(codec.time, "time", lambda: SENT_AT)
    _, frames = Encoder("sender", "incarnation").encode(message(name), reply_to=7)
    return [frame.hex() for frame in frames]


@pytest.mark.parametrize("name", TYPES)
def test_the_encoder_still_writes_it_and_the_decoder_reads_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert list(kept) == sorted(TYPES), "one of each type"
    assert encode(name, monkeypatch) == kept[name]
    envelope = decode([bytes.fromhex(frame) for frame in kept[name]])
    assert envelope.body == message(name)
    header = envelope.header
    assert (header.type, header.id, header.reply_to) == (name, 1, 7)
    assert (header.sender, header.incarnation) == ("sender", "incarnation")
    assert header.sent_at == SENT_AT


if __name__ == "__main__" and sys.argv[1:] == ["--regen"]:
    with pytest.MonkeyPatch.context() as patch:
        made = {name: encode(name, patch) for name in sorted(TYPES)}
    GOLDEN.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
