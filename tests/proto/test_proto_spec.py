"""The wire: `proto/README.md`, `proto/weights.md` and the code say the same, table by table.

And frames of one message of each type are kept in `tests/golden/frames.json`: a test of them that
fails says that the wire has changed. If that is meant, and the version of the protocol was raised
where README.md says so, rewrite the file:

    python tests/proto/test_proto_spec.py --regen
"""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import msgspec
import msgspec.inspect as introspect
import pytest

from umbra.proto import access, codec
from umbra.proto import messages as m
from umbra.proto.access import ANYONE, KEY_ROLES, MEMBERS, RULES, SENDERS, may_send
from umbra.proto.codec import Encoder, decode

ROOT = Path(__file__).resolve().parents[2]
SPEC = "\n".join(
    (ROOT / "proto" / page).read_text(encoding="utf-8") for page in ("README.md", "weights.md")
)
wire_page = runpy.run_path(str(ROOT / ".ci" / "wire_page.py"))
RECORDS = wire_page["RECORDS"]
CHAPTERS = {
    "Any socket": "any",
    "Control socket": "control",
    "Data socket": "data",
    "Weights socket": "weights",
    "Events": "events",
}


def section(title: str, level: int) -> str:
    marks = "#" * level
    parts = re.split(rf"^{marks} {re.escape(title)}$", SPEC, flags=re.MULTILINE)
    assert len(parts) == 2, f"proto's pages have {len(parts) - 1} headings '{marks} {title}'"
    return re.split(rf"^#{{1,{level}}} ", parts[1], maxsplit=1, flags=re.MULTILINE)[0]


def headings(title: str) -> list[str]:
    return re.findall(r"^### (\w+)$", section(title, 2), flags=re.MULTILINE)


def test_the_pages_are_what_the_script_writes() -> None:
    """Version, enumerations, fields, limits and exit codes; and a change of one is seen."""
    for path in wire_page["PAGES"]:
        page = path.read_text(encoding="utf-8")
        assert wire_page["made"](page) == page, "write them again: python .ci/wire_page.py"
        for line in re.findall(r"^    \w+: .*$|^\| `\w+` \| \d+ \|$", page, re.M)[:20]:
            without = page.replace(f"{line}\n", "", 1)
            assert wire_page["made"](without) != without


def test_every_message_and_record_has_a_section() -> None:
    for chapter, socket in CHAPTERS.items():
        kinds = [cls.__name__ for cls, rule in RULES.items() if rule.socket == socket]
        assert headings(chapter) == kinds
    defined = {
        cls
        for cls in vars(m).values()
        if isinstance(cls, type) and issubclass(cls, m.Message) and cls is not m.Message
    }
    assert {m.TYPES[cls.__name__] for cls in defined} == defined
    assert RULES.keys() == defined == set(m.TYPES.values())
    assert sorted(headings("Records") + headings("Records of weights")) == sorted(RECORDS)


@pytest.mark.parametrize("name", [*m.TYPES, *RECORDS])
def test_a_section_says_first_its_subject_and_answers_are_messages(name: str) -> None:
    """Only messages that peers send have answers."""
    text = section(name, 3)
    assert text.strip()[0] not in "`N"
    assert set(re.findall(r"Answer: `(\w+)`", text)) <= m.TYPES.keys()
    assert "Answer: `" not in text or m.TYPES[name] in SENDERS


def parts_of(kind: introspect.Type) -> list[introspect.Type]:
    match kind:
        case introspect.ListType():
            inner = [kind.item_type]
        case introspect.DictType() if isinstance(kind.value_type, introspect.AnyType):
            inner = [kind.value_type]  # free-form
        case introspect.DictType():
            inner = [kind.key_type, kind.value_type]
        case introspect.TupleType():
            inner = list(kind.item_types)
        case introspect.UnionType():
            inner = list(kind.types)
        case introspect.StructType():
            inner = [field.type for field in kind.fields]
        case _:
            inner = []
    return [kind, *(part for one in inner for part in parts_of(one))]


BOUNDED = introspect.StrType | introspect.BytesType | introspect.ListType | introspect.DictType


@pytest.mark.parametrize("name", [*m.TYPES, "Header"])
def test_everything_has_a_bound(name: str) -> None:
    """And an operator's command is refused with an unknown field, which is skipped in others."""
    cls = m.TYPES.get(name, m.Header)
    for kind in parts_of(introspect.type_info(cls)):
        assert not isinstance(kind, BOUNDED) or kind.max_length is not None, kind
        if isinstance(kind, introspect.DictType):
            is_row = isinstance(kind.value_type, introspect.AnyType)
            assert not is_row or cls not in SENDERS or name == "Event"
    is_command = name in m.TYPES and SENDERS.get(m.TYPES[name]) == ("operator",)
    assert cls.__struct_config__.forbid_unknown_fields is is_command


@pytest.mark.parametrize("role", KEY_ROLES)
def test_a_role_may_send_no_byte_of_what_it_must_not(role: Any) -> None:
    for cls in m.TYPES.values():
        allowed = access.allowed_bytes(cls, role)
        assert allowed == (access.body_bytes(cls) if may_send(role, cls) else 0)
        assert bool(access.allowed_bytes(cls, None)) == (cls in SENDERS)


CODE = re.compile(
    r"(?:Nack|WireError|RejectedError)\((?:[^()]|\([^()]*\))*?\bcode=\"(\w+)\""
    r"|(?:_nack|refuse)\([^,()]+,\s*\"(\w+)\"|NackError\(\s*\"(\w+)\""
)


def test_nack_codes() -> None:
    stated = re.findall(r"^- `(\w+)`: .", section("Nack codes", 2), flags=re.MULTILINE)
    assert len(stated) == len(set(stated))
    used = {"malformed", "too_large", "rejected"}  # the defaults in errors.py
    for folder in ("proto", "services"):
        for path in (ROOT / folder).rglob("*.py"):
            found = CODE.findall(path.read_text(encoding="utf-8"))
            used |= {"".join(one) for one in found}
    # These two are made with an f-string out of the role.
    assert set(stated) - {"duplicate_trainer", "duplicate_weight_hub"} == used


def test_senders_of_messages() -> None:
    stated: dict[str, str] = {}
    for line in section("Keys", 2).splitlines():
        if row := re.fullmatch(r"- (.*): (`.*`)", line):
            stated |= dict.fromkeys(re.findall(r"`(\w+)`", row[2]), row[1])
    spelled = {ANYONE: "any", MEMBERS: "any but `operator`"}
    assert stated == {
        kind.__name__: spelled.get(roles) or ", ".join(f"`{role}`" for role in roles)
        for kind, roles in SENDERS.items()
    }


GOLDEN = ROOT / "tests" / "golden" / "frames.json"
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


def message(name: str) -> m.Message:
    cls = m.TYPES[name]
    values = sample(introspect.type_info(cls), name)
    return msgspec.convert(values, cls, builtin_types=(bytes,))


def encode(name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the frames of the golden message, in hex; only the clock is made up."""
    monkeypatch.setattr(codec.time, "time", lambda: SENT_AT)
    _, frames = Encoder("sender", "incarnation").encode(message(name), reply_to=7)
    return [frame.hex() for frame in frames]


@pytest.mark.parametrize("name", m.TYPES)
def test_the_encoder_still_writes_it_and_the_decoder_reads_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert list(kept) == sorted(m.TYPES), "one of each type"
    assert encode(name, monkeypatch) == kept[name]
    envelope = decode([bytes.fromhex(frame) for frame in kept[name]])
    assert envelope.body == message(name)
    header = envelope.header
    assert (header.type, header.id, header.reply_to) == (name, 1, 7)
    assert (header.sender, header.incarnation) == ("sender", "incarnation")
    assert header.sent_at == SENT_AT


if __name__ == "__main__" and sys.argv[1:] == ["--regen"]:
    with pytest.MonkeyPatch.context() as patch:
        made = {name: encode(name, patch) for name in sorted(m.TYPES)}
    GOLDEN.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
