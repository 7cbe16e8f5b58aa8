"""Write the tables of proto/README.md and proto/weights.md from the code: python .ci/wire_page.py

Made from it are the protocol's version, the values of `Role` and `State`, the fields of every
message and record (name, type, default), the limits of frames, and the exit codes of errors. The
prose and the meaning beside a field stay as they are; a new field has none until one is written.
A test compares, and `--check` prints the pages that are outdated.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import msgspec.inspect as introspect

from umbra.proto import access, bounds, errors, messages, records
from umbra.proto.records import PROTOCOL_MAJOR, PROTOCOL_MINOR

PROTO = Path(__file__).resolve().parents[1] / "proto"
PAGES = (PROTO / "README.md", PROTO / "weights.md")
ENUMERATIONS = {"Role": get_args(messages.Role), "State": get_args(messages.State)}
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
    and not issubclass(cls, records.Message)
    and cls not in (records.Record, records.Kept, records.Told, records.Header)
}
KINDS = {"Header": records.Header, **messages.TYPES, **RECORDS}
SECTION = re.compile(r"^### (\w+)\n(?:(?!^#).*\n)*", re.MULTILINE)
BLOCK = re.compile(r"(?:^    .*\n)+", re.MULTILINE)


def spell(kind: introspect.Type) -> str:
    """Write a type the way that the pages do."""
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
    """Write a default the way that the pages do; nothing for a field that has none."""
    if field.required:
        return ""
    value: Any = field.default
    if value is msgspec.NODEFAULT:
        value = field.default_factory()
    if value is None:
        return " = nil"
    return " = {}" if isinstance(value, msgspec.Struct) else f" = {json.dumps(value)}"


def fields_of(cls: type[records.Record]) -> Iterator[tuple[str, str]]:
    """Yield the name of each field, and its line: name, type and default."""
    info = introspect.type_info(cls)
    assert isinstance(info, introspect.StructType)
    for field in info.fields:
        name = field.encode_name
        yield name, f"{name}: {spell(field.type)}{spell_default(field)}"


def _section(found: re.Match[str]) -> str:
    text, cls = found[0], KINDS.get(found[1])
    if cls is None:
        return text
    block = BLOCK.search(text)
    meanings: dict[str, str] = {}
    for line in block[0].splitlines() if block else ():
        field, _, meaning = line.strip().partition("  ")
        meanings[field.partition(":")[0]] = meaning.strip()
    fields = list(fields_of(cls))
    width = max((len(line) for name, line in fields if meanings.get(name)), default=0)
    lines = [f"    {line:{width}}  {meanings.get(name, '')}".rstrip() for name, line in fields]
    made = "".join(f"{line}\n" for line in lines)
    if block:
        return text[: block.start()] + made + text[block.end() :]
    return f"{text.rstrip()}\n\n{made}\n" if made else text


def _table(text: str, heading: str, rows: list[list[str]]) -> str:
    """Replace the rows of the first table below `heading`."""
    head, mark, rest = text.partition(f"{heading}\n")
    if not mark:
        return text
    lines = "".join(f"| {' | '.join(row)} |\n".replace("|  |", "| |") for row in rows)
    return head + mark + re.sub(r"(\|-.*\n)(?:\|.*\n)+", rf"\1{lines}", rest, count=1)


def _limits() -> list[list[str]]:
    named = {"`header`": access.HEADER_BYTES}
    limits = {f"`{cls.__name__}`": access.body_bytes(cls) for cls in access.RULES}
    named |= {name: limit for name, limit in limits.items() if limit != access.COMMON_BYTES}
    named |= {"`any other body`": access.COMMON_BYTES, "to `events`": access.socket_bytes("events")}
    return [[name, str(limit)] for name, limit in named.items()]


def _exit_codes(text: str) -> list[list[str]]:
    meanings = dict(re.findall(r"^\| \d+ \| `(\w+)` \| (.*) \|$", text, re.MULTILINE))
    found = [
        (cls.exit_code, name)
        for name, cls in vars(errors).items()
        if isinstance(cls, type) and issubclass(cls, errors.UmbraError)
    ]
    known = list(meanings)
    found.sort(key=lambda one: (one[0], known.index(one[1]) if one[1] in known else len(known)))
    return [["0", "", "done"], *([str(c), f"`{n}`", meanings.get(n, "")] for c, n in found)]


def made(text: str) -> str:
    """Return a page with what the code says in the place of what stood there."""
    title = f"# Umbra wire protocol, version {PROTOCOL_MAJOR}.{PROTOCOL_MINOR}\n"
    text = re.sub(r"^# Umbra wire protocol, version .*\n", title, text)
    for name, values in ENUMERATIONS.items():
        line = f"{name}: {', '.join(f'`{value}`' for value in values)}."
        text = re.sub(rf"^{name}: `.*$", line, text, flags=re.MULTILINE)
    text = _table(text, "### Limits", _limits())
    text = _table(text, "## Errors and exit codes", _exit_codes(text))
    return SECTION.sub(_section, text)


def main() -> int:
    """Write the pages that are outdated; with --check only name them, and return 1."""
    check, outdated = "--check" in sys.argv[1:], 0
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        if (page := made(text)) != text:
            outdated += 1
            print(f"{'outdated' if check else 'written'}: {path.name}")
            if not check:
                path.write_text(page, encoding="utf-8")
    return int(check and outdated > 0)


if __name__ == "__main__":
    sys.exit(main())
