"""`proto/README.md`, `proto/weights.md` and the code say the same, table by table."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any, get_args

import msgspec
import msgspec.inspect as introspect
import pytest

from umbra.proto import access, bounds, errors, messages, records, sockets
from umbra.proto import messages as m
from umbra.proto.access import KEY_ROLES, SENDERS, may_send
from umbra.proto.records import PROTOCOL_MAJOR, PROTOCOL_MINOR

ROOT = Path(__file__).resolve().parents[2]
SPEC = "\n".join(
    (ROOT / "proto" / page).read_text(encoding="utf-8") for page in ("README.md", "weights.md")
)
ENUMERATIONS = {"Role": get_args(messages.Role), "State": get_args(messages.State)}
CHAPTERS: dict[str, tuple[type[m.Message], ...]] = {
    "Any socket": m.ANY,
    "Control socket": m.CONTROL,
    "Data socket": m.DATA,
    "Weights socket": m.WEIGHTS,
    "Events": m.TELEMETRY,
}
TEXTS: dict[tuple[int | None, str | None], str] = {
    (bounds.NAME_CHARS, bounds.NO_CONTROL): "name",
    (bounds.TEXT_CHARS, bounds.NO_CONTROL): "text",
    (bounds.ID_CHARS, None): "id",
}
RECORDS = {
    name: cls
    for module in (records, messages)
    for name, cls in vars(module).items()
    if isinstance(cls, type)
    and issubclass(cls, records.Record)
    and not issubclass(cls, m.Message)
    and cls not in (records.Record, records.Kept, records.Told, m.Header)
}


def section(title: str, level: int) -> str:
    marks = "#" * level
    parts = re.split(rf"^{marks} {re.escape(title)}$", SPEC, flags=re.MULTILINE)
    assert len(parts) == 2, f"proto's pages have {len(parts) - 1} headings '{marks} {title}'"
    return re.split(rf"^#{{1,{level}}} ", parts[1], maxsplit=1, flags=re.MULTILINE)[0]


def rows(text: str) -> list[list[str]]:
    """Return the cells of the first table in `text`, without its two heading lines."""
    table = re.search(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)
    if table is None:
        return []
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table[0].splitlines()[2:]
    ]


def headings(title: str) -> list[str]:
    return re.findall(r"^### (\w+)$", section(title, 2), flags=re.MULTILINE)


def spell(kind: introspect.Type) -> str:
    match kind:
        case introspect.ListType():
            return f"list[{kind.max_length}] of {spell(kind.item_type)}"
        case introspect.DictType():
            assert isinstance(kind.key_type, introspect.StrType)
            key = kind.key_type
            if isinstance(kind.value_type, introspect.AnyType):
                assert key.max_length is None
            elif (key.max_length, key.pattern) not in TEXTS:
                return f"map[{kind.max_length}, {key.max_length}] of {spell(kind.value_type)}"
            return f"map[{kind.max_length}] of {spell(kind.value_type)}"
        case introspect.StrType():
            return TEXTS[kind.max_length, kind.pattern]
        case introspect.FloatType():
            limit = sys.float_info.max
            return {(None, None): "float", (-limit, limit): "number"}[kind.ge, kind.le]
        case introspect.IntType():
            return {(None, None): "int", (0, 2**53 - 1): "size"}[kind.ge, kind.le]
        case introspect.TupleType():
            return f"({', '.join(map(spell, kind.item_types))})"
        case introspect.UnionType():
            return " or ".join(map(spell, kind.types))
        case introspect.LiteralType():
            for name, values in ENUMERATIONS.items():
                if set(values) == set(kind.values):
                    return name
            return " or ".join(json.dumps(value) for value in kind.values)
        case introspect.StructType():
            return kind.cls.__name__
        case introspect.BytesType():
            return f"bin[{kind.max_length}]"
        case introspect.NoneType():
            return "nil"
        case _:
            return type(kind).__name__.removesuffix("Type").lower()


def spell_default(field: introspect.Field) -> str:
    """Write a default the way that the spec does; nothing for a field that has none."""
    if field.required:
        return ""
    value: Any = field.default
    if value is msgspec.NODEFAULT:
        value = field.default_factory()
    if value is None:
        return " = nil"
    return " = {}" if isinstance(value, msgspec.Struct) else f" = {json.dumps(value)}"


def fields_of(cls: type[records.Record]) -> list[str]:
    """Return name, type and default of every field, as the spec writes them."""
    info = introspect.type_info(cls)
    assert isinstance(info, introspect.StructType)
    return [f"{f.encode_name}: {spell(f.type)}{spell_default(f)}" for f in info.fields]


def declared(text: str) -> list[str]:
    """Return the fields in the first block of `text`, without their meaning."""
    block = re.search(r"(?:^    .*\n)+", text, flags=re.MULTILINE)
    return [line.strip().partition("  ")[0] for line in block[0].splitlines()] if block else []


def test_version() -> None:
    title = SPEC.splitlines()[0]
    assert title == f"# Umbra wire protocol, version {PROTOCOL_MAJOR}.{PROTOCOL_MINOR}"


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_has_the_messages_of_its_socket(chapter: str) -> None:
    assert headings(chapter) == [cls.__name__ for cls in CHAPTERS[chapter]]


def test_every_message_class_is_known_by_its_name() -> None:
    defined = {
        cls
        for cls in vars(messages).values()
        if isinstance(cls, type) and issubclass(cls, m.Message) and cls is not m.Message
    }
    assert {m.TYPES[cls.__name__] for cls in defined} == defined
    assert sum(len(group) for group in CHAPTERS.values()) == len(m.TYPES) == len(defined)


def test_every_record_has_a_section() -> None:
    assert sorted(headings("Records") + headings("Records of weights")) == sorted(RECORDS)


@pytest.mark.parametrize("cls", [m.Header, *m.TYPES.values(), *RECORDS.values()])
def test_fields(cls: type[records.Record]) -> None:
    text = section(cls.__name__, 3)
    assert declared(text) == fields_of(cls)
    assert text.strip().splitlines()[0][0] not in "`N", "a section says first what it is about"


@pytest.mark.parametrize("name", m.TYPES)
def test_the_answers_it_names_are_messages(name: str) -> None:
    for answer in re.findall(r"Answer: `(\w+)`", section(name, 3)):
        assert answer in m.TYPES


@pytest.mark.parametrize("name", ENUMERATIONS)
def test_enumerations(name: str) -> None:
    line = re.search(rf"^{name}: (.*)\.$", SPEC, flags=re.MULTILINE)
    assert line is not None
    assert line[1] == ", ".join(f"`{value}`" for value in ENUMERATIONS[name])


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


@pytest.mark.parametrize("name", [*m.TYPES, "Header"])
def test_everything_has_a_bound(name: str) -> None:
    for kind in parts_of(introspect.type_info(m.TYPES.get(name, m.Header))):
        if isinstance(kind, introspect.StrType | introspect.BytesType | introspect.ListType):
            assert kind.max_length is not None, kind
        if isinstance(kind, introspect.DictType):
            is_row = isinstance(kind.value_type, introspect.AnyType)
            assert kind.max_length is not None, kind
            assert not is_row or m.TYPES[name] not in SENDERS or name == "Event"


@pytest.mark.parametrize("name", m.TYPES)
def test_unknown_fields(name: str) -> None:
    """An operator's command is refused with an unknown field; in others it is skipped."""
    cls = m.TYPES[name]
    is_command = SENDERS.get(cls) == ("operator",)
    assert cls.__struct_config__.forbid_unknown_fields is is_command


@pytest.mark.parametrize(("chars", "pattern"), TEXTS)
def test_lengths_of_texts(chars: int, pattern: str | None) -> None:
    (meaning,) = re.findall(rf"^\| {TEXTS[chars, pattern]} \| str \| (.*) \|$", SPEC, re.MULTILINE)
    assert f"at most {chars} characters" in meaning
    assert ("no control characters" in meaning) is (pattern is not None)


def test_limits() -> None:
    stated = {row[0].strip("`"): int(row[1]) for row in rows(section("Limits", 3))}
    assert stated == {
        "header": access.HEADER_BYTES,
        **{cls.__name__: limit for cls, limit in access.LARGE.items()},
        "any other body": access.COMMON_BYTES,
        "to `events": access.socket_bytes("events"),
    }


@pytest.mark.parametrize("role", KEY_ROLES)
def test_a_role_may_send_no_byte_of_what_it_must_not(role: Any) -> None:
    for cls in m.TYPES.values():
        allowed = access.allowed_bytes(cls, role)
        assert allowed == (access.body_bytes(cls) if may_send(role, cls) else 0)
        assert bool(access.allowed_bytes(cls, None)) == (cls in SENDERS)


def test_socket_options() -> None:
    text = " ".join(section("Sockets", 2).split())
    assert f"`LINGER` {sockets.LINGER_MS} ms" in text
    assert f"keepalive after {sockets.KEEPALIVE_IDLE_S} s" in text
    assert f"after {sockets.RECONNECT_MS} to {sockets.RECONNECT_MAX_MS} ms" in text
    assert f"takes in only {sockets.ROUTER_RECEIVE_HWM} messages" in text
    hwm = {row[0]: int(row[4]) for row in rows(section("Sockets", 2))}
    assert set(hwm.values()) == {1000}  # as test_proto_sockets.py finds them


def test_exit_codes() -> None:
    table = rows(section("Errors and exit codes", 2))
    stated = {row[1].strip("`"): int(row[0]) for row in table if row[1]}
    assert stated == {
        name: cls.exit_code
        for name, cls in vars(errors).items()
        if isinstance(cls, type) and issubclass(cls, errors.UmbraError)
    }


def codes_in(tree: ast.AST) -> set[str]:
    """Return the codes that a file gives to Nacks and to the errors that become one."""
    refusals = {"Nack", "WireError", "RejectedError", "_nack", "refuse", "NackError"}
    found: set[str] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
        given = [word.value for word in node.keywords if word.arg == "code"]
        if name in ("_nack", "refuse"):
            given += node.args[1:2]
        elif name == "NackError":
            given += node.args[:1]
        for value in given:
            if name in refusals and isinstance(value, ast.Constant):
                found.add(str(value.value))
    return found


def test_nack_codes() -> None:
    stated = re.findall(r"^- `(\w+)`: .", section("Nack codes", 2), flags=re.MULTILINE)
    assert len(stated) == len(set(stated))
    used = {"malformed", "too_large", "rejected"}  # the defaults in errors.py
    for folder in ("proto", "services"):
        for path in (ROOT / folder).rglob("*.py"):
            used |= codes_in(ast.parse(path.read_text(encoding="utf-8")))
    # These two are made with an f-string out of the role.
    assert set(stated) - {"duplicate_trainer", "duplicate_weight_hub"} == used
