"""docs/operate.md and docs/architecture.md speak of messages, keys and commands that exist."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from umbra import cli
from umbra.services.config.loader import SECTIONS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = ("operate.md", "architecture.md")
CODE = ("deploy", "proto", "services", "src/umbra")


def spoken(node: ast.AST) -> str | None:
    """The text of a string as written, with a private character for each value it takes."""
    match node:
        case ast.Constant(value=str(text)):
            return re.sub(r"%[sdrg]|%\.\d[fg]", "\ue000", text)
        case ast.JoinedStr(values=values):
            return "".join(spoken(value) or "\ue000" for value in values)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return (spoken(left) or "\ue000") + (spoken(right) or "\ue000")
    return None


def strings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if text := spoken(node):
            yield text


@cache
def said() -> str:
    found: list[str] = []
    for folder in CODE:
        for path in sorted((ROOT / folder).rglob("*.py")):
            found += strings(ast.parse(path.read_text(encoding="utf-8")))
    return "\n".join(text.replace("\n", " ") for text in found if " " in text)


def section(title: str) -> str:
    """The text of a section of docs/operate.md, its subsections included."""
    page = (DOCS / "operate.md").read_text(encoding="utf-8")
    return re.split(rf"^##+ {re.escape(title)}\n", page, flags=re.M)[1].partition("\n## ")[0]


def messages() -> list[str]:
    return re.findall(r"^\| `([^`]+)` \|", section("When something goes wrong"), re.M)


def is_said(message: str, code: str) -> bool:
    """Return whether `code` has a line with the parts of `message`, in order."""
    parts = [re.escape(part) for part in message.split("…") if part.strip()]
    return re.search("[^\n]*".join(parts), code) is not None


def test_every_message_is_one_of_the_code() -> None:
    assert len(messages()) > 15
    assert [message for message in messages() if not is_said(message, said())] == []


def test_every_file_of_a_run_has_its_line() -> None:
    """As far as the code names them in one place."""
    text = section("Losing a file")
    folder = (ROOT / "deploy" / "run_folder.py").read_text(encoding="utf-8")
    named = set(re.findall(r'_Below\("([\w.]+)"', folder)) - {"model"}  # which is the result
    assert named
    assert [name for name in sorted(named) if f"`{name}" not in text] == []


@pytest.mark.parametrize("name", PAGES)
def test_keys_and_commands_are_there(name: str) -> None:
    page = (DOCS / name).read_text(encoding="utf-8")
    keys = {f"{section}.{key}" for section, known in SECTIONS.items() for key in known}
    codes = re.findall(r"`([^`\n]+)`", page)
    named = {found for code in codes for found in re.findall(r"^([a-z_]+\.[a-z_]+)\b", code)}
    named -= {"metrics.jsonl", "buffer.json", "data.mdb"}
    named = {path for path in named if path.partition(".")[0] in SECTIONS}
    assert named
    assert named <= keys, named - keys
    commands = set(re.findall(r"umbra ([a-z][a-z-]+)", "\n".join(codes)))
    assert commands <= set(cli.COMMANDS)
