"""The blocks of code in the pages: run files are loaded, Python is run, commands are parsed."""

import ast
import importlib.util
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from test_cli_help import every_command

from umbra import cli
from umbra.proto.errors import UsageError
from umbra.services.config.loader import SECTIONS, load_config

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.M | re.S)


def blocks(language: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for page in PAGES:
        for indent, named, text in _BLOCK.findall(page.read_text(encoding="utf-8")):
            if named == language:
                found.append((page.name, re.sub(rf"^{indent}", "", text, flags=re.M)))
    assert found
    return found


def commands(text: str) -> Iterator[list[str]]:
    joined = text.replace("\\\n", " ")
    for line in joined.splitlines():
        for part in re.split(r"&&|\||;", line.partition(" #")[0]):
            try:
                words = shlex.split(part)
            except ValueError:  # a quote that goes over several lines
                continue
            if words[:1] == ["umbra"]:
                yield words[1:]


def test_every_run_file_has_keys_that_there_are(tmp_path: Path) -> None:
    for page, text in blocks("toml"):
        sections = set(tomllib.loads(text))
        if sections <= set(SECTIONS):
            path = tmp_path / "run.toml"
            path.write_text(text, encoding="utf-8")
            try:
                load_config(path, environ={})
            except UsageError as error:
                pytest.fail(f"{page}: {error}\n{text}")


def test_every_module_that_is_imported_has_those_names() -> None:
    for page, text in blocks("python"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("umbra"):
                module = importlib.import_module(node.module or "")
                missing = [
                    one.name
                    for one in node.names
                    if not hasattr(module, one.name)
                    and importlib.util.find_spec(f"{node.module}.{one.name}") is None
                ]
                assert not missing, (page, node.module, missing)


def test_every_command_has_those_flags() -> None:
    known: dict[str, click.Command] = dict(every_command())
    tried = 0
    for page, text in blocks("sh"):
        for words in commands(text):
            name, command = "", cli.cli
            while isinstance(command, click.Group) and words and not words[0].startswith("-"):
                name = f"{name} {words.pop(0)}".strip()
                assert name in known, (page, name)
                command = known[name]
            flags = {flag for one in command.params for flag in (*one.opts, *one.secondary_opts)}
            given = {word.partition("=")[0] for word in words if word.startswith("--")}
            assert given - {"--"} <= {*flags, "--help", "--version"}, (page, name, given - flags)
            tried += 1
    assert tried > 20
