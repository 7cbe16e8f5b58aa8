"""Keys, commands, messages, files, functions, tests and versions that the pages name exist."""

import ast
import importlib.util
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml
from fakes.commands import call
from test_cli import every_command

from umbra import __version__, cli
from umbra.proto.access import KEY_ROLES
from umbra.proto.errors import UsageError
from umbra.services.config.loader import SECTIONS, load_config

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


# -- messages, files, keys and commands -----------------------------------------------------------


def spoken(node: ast.AST) -> str:
    """Return the text of a string as written, with a private character for each value it takes."""
    match node:
        case ast.Constant(value=str(text)):
            return text.replace("\n", " ")
        case ast.JoinedStr(values=values):
            return "".join(spoken(value) or "\ue000" for value in values)
    return ""


def test_every_message_is_one_of_the_code() -> None:
    """It has the parts of the message, in order, in one string."""
    paths = (
        p for f in ("deploy", "proto", "services", "src/umbra") for p in (ROOT / f).rglob("*.py")
    )
    nodes = (n for path in paths for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    code = "\n".join(map(spoken, nodes))
    part = page("operate.md").partition("\n## When something goes wrong\n")[2].partition("\n## ")[0]
    messages = re.findall(r"^\| `([^`]+)` \|", part, re.M)
    assert len(messages) > 15
    for message in messages:
        parts = [re.escape(part) for part in message.split("…") if part.strip()]
        assert re.search("[^\n]*".join(parts), code), message


@pytest.mark.parametrize("name", ["operate.md", "architecture.md"])
def test_keys_and_commands_are_there(name: str) -> None:
    keys = {f"{section}.{key}" for section, known in SECTIONS.items() for key in known}
    codes = re.findall(r"`([^`\n]+)`", page(name))
    named = {found for code in codes for found in re.findall(r"^([a-z_]+\.[a-z_]+)\b", code)}
    named -= {"metrics.jsonl", "buffer.json", "data.mdb"}
    named = {path for path in named if path.partition(".")[0] in SECTIONS}
    assert named
    assert named <= keys, named - keys
    commands = set(re.findall(r"umbra ([a-z][a-z-]+)", "\n".join(codes)))
    assert commands <= set(cli.COMMANDS)


@pytest.mark.parametrize(("title", "most"), [("A trajectory", 28), ("A version", 20)])
def test_a_walk_is_short_and_each_hop_is_there(title: str, most: int) -> None:
    part = page("architecture.md").partition(f"\n### {title}\n")[2].partition("\n##")[0]
    hops = re.findall(r"^\| `([\w/]+\.py)` \| `(\w+)` \| .+ \|$", part, re.M)
    assert 10 < len(hops) <= most
    for file, name in hops:
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), (file, name)


# -- each line of docs/security.md has its test ----------------------------------------------------


@pytest.mark.parametrize("title", ["What a key can do at worst", "HTTP"])
def test_each_line_has_its_test(title: str) -> None:
    part = page("security.md").partition(f"### {title}\n")[2].partition("\n#")[0]
    lines = [
        line for line in part.partition("\n\nFloods")[0].splitlines() if line.startswith("| ")
    ][1:]
    assert len(lines) >= 10
    for line in lines:
        named = re.findall(r"`(tests/\S+\.py)::(\w+)`", line)
        assert named, line
        for path, test in named:
            assert f"def {test}(" in (ROOT / path).read_text(encoding="utf-8"), (path, test)
    assert all(f"`{role}`" in page("security.md") for role in KEY_ROLES)


# -- the project -----------------------------------------------------------------------------------


def test_versions_extras_and_pages_are_those_that_there_are() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["version"], citation["license"]) == (__version__, project["license"])
    for path in PAGES:
        for named in re.findall(r"umbra-rl\[([\w,-]+)\]", path.read_text(encoding="utf-8")):
            extras = project["optional-dependencies"].keys()
            assert extras >= set(named.split(",")), (path.name, named)
    # As `make docs` would say, without mkdocs.
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    others = {"index.md", "changelog.md", "proto.md", "proto-weights.md"}
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} | others
    assert sorted(re.findall(r"([\w-]+\.md)$", text, re.M)) == sorted(pages)


# -- blocks of code --------------------------------------------------------------------------------

_BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.M | re.S)


def blocks(language: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for path in PAGES:
        for indent, named, text in _BLOCK.findall(path.read_text(encoding="utf-8")):
            if named == language:
                found.append((path.name, re.sub(rf"^{indent}", "", text, flags=re.M)))
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
    for name, text in blocks("toml"):
        sections = set(tomllib.loads(text))
        if sections <= set(SECTIONS):
            path = tmp_path / "run.toml"
            path.write_text(text, encoding="utf-8")
            try:
                load_config(path, environ={})
            except UsageError as error:
                pytest.fail(f"{name}: {error}\n{text}")


def test_every_module_that_is_imported_has_those_names() -> None:
    for name, text in blocks("python"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("umbra"):
                module = importlib.import_module(node.module or "")
                for one in (own.name for own in node.names):
                    spec = importlib.util.find_spec if not hasattr(module, one) else None
                    assert spec is None or spec(f"{node.module}.{one}"), (name, node.module, one)


def test_every_command_has_those_flags() -> None:
    known: dict[str, click.Command] = dict(every_command())
    tried = 0
    for page_name, text in blocks("sh"):
        for words in commands(text):
            name, command = "", cli.cli
            while isinstance(command, click.Group) and words and not words[0].startswith("-"):
                name = f"{name} {words.pop(0)}".strip()
                assert name in known, (page_name, name)
                command = known[name]
            flags = {flag for one in command.params for flag in (*one.opts, *one.secondary_opts)}
            given = {word.partition("=")[0] for word in words if word.startswith("--")}
            unknown = given - {*flags, "--", "--help", "--version"}
            assert not unknown, (page_name, name, unknown)
            tried += 1
    assert tried > 20


# -- docs/contributing.md, step by step, in a copy of the package ----------------------------------

_NEW = re.compile(r"^New file `([^`]+)`:\n\n```python\n(.*?)^```$", re.M | re.S)
_CHANGE = re.compile(r"^In `([^`]+)`:\n\n```diff\n(.*?)^```$", re.M | re.S)
_TRY = re.compile(r"^Try it[^\n]*:\n\n```python\n(.*?)^```$", re.M | re.S)


def test_the_steps_lead_to_what_is_tried(tmp_path: Path, tiny_model_dir: Path) -> None:
    text, copied = page("contributing.md"), tmp_path / "umbra"
    unwanted = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "src" / "umbra", copied, ignore=unwanted)  # and what links are to
    files, changes, tries = _NEW.findall(text), _CHANGE.findall(text), _TRY.findall(text)
    steps = len(files) + len(changes) + len(tries)
    assert steps == len(re.findall("^```(?:python|diff)", text, re.M))
    for path, content in files:
        assert not (copied / path).exists(), path
        (copied / path).write_text(content, encoding="utf-8")
    for path, diff in changes:
        file, lines = copied / path, diff.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in " -")
        new = "".join(line[1:] for line in lines if line[0] in " +")
        before, found, after = f"\n{file.read_text(encoding='utf-8')}".partition(f"\n{old}")
        assert found and old, f"docs/contributing.md: there is no {old!r} in {path}"
        file.write_text(f"{before}\n{new}{after}"[1:], encoding="utf-8")
    for number, content in enumerate(tries):
        (tmp_path / f"try_{number}.py").write_text(content, encoding="utf-8")
    program = (
        "import runpy\n"
        f"for number in range({len(tries)}):\n"
        f"    runpy.run_path(f'try_{{number}}.py', {{'MODEL': {str(tiny_model_dir)!r}}})\n"
        "import umbra; print(umbra.__file__)\n"
    )
    env = {"PYTHONPATH": str(tmp_path)}
    done = call([sys.executable, "-c", program], cwd=tmp_path, env=env, quiet_s=120)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == copied / "__init__.py"
    linted = [sys.executable, "-m", "ruff", "check", "--config", str(ROOT / "pyproject.toml")]
    checked = call([*linted, *(copied / path for path, _ in files)])
    assert checked.returncode == 0, checked.stdout
    named = set(re.findall(r"`((?:tests|benchmarks|services|deploy)/[\w/]+\.py)`", text))
    others = named - {path for path, _ in files}
    assert [path for path in sorted(others) if not (ROOT / path).is_file()] == []
