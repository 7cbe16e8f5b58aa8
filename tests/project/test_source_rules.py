"""Rules about the source text that no linter option expresses."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.commands import call

ROOT = Path(__file__).resolve().parents[2]
PICKLE_MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"}
PICKLE_METHODS = {"recv_pyobj", "send_pyobj", "recv_serialized_pyobj"}


def source_files() -> list[Path]:
    """Return the Python files outside tests that git tracks or could track."""
    listing = call(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", "*.py"],
        cwd=ROOT,
    )
    if listing.returncode != 0:
        pytest.skip("needs a git checkout")
    paths = [ROOT / name for name in listing.stdout.split("\0") if name]
    return [p for p in paths if p.is_file() and p.relative_to(ROOT).parts[0] != "tests"]


def pickle_uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of every use of pickle in `tree`."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    if alias.name.partition(".")[0] in PICKLE_MODULES:
                        yield node.lineno, alias.name
            case ast.ImportFrom(module=str(module), names=names):
                if module.partition(".")[0] in PICKLE_MODULES:
                    yield node.lineno, module
                if module == "torch" and any(alias.name == "load" for alias in names):
                    yield node.lineno, "torch.load"
            case ast.Attribute(value=ast.Name(id="torch"), attr="load"):
                yield node.lineno, "torch.load"
            case ast.Attribute(attr=attr) if attr in PICKLE_METHODS:
                yield node.lineno, attr
            case ast.keyword(arg="allow_pickle", value=ast.Constant(value=True)):
                yield node.value.lineno, "allow_pickle=True"
            case _:
                pass


def test_no_source_file_uses_pickle() -> None:
    files = source_files()
    assert ROOT / "src" / "umbra" / "cli.py" in files
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in files
        for line, name in pickle_uses(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert found == []


def test_no_class_name_means_two_things() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in source_files():
        if (where := path.relative_to(ROOT)).parts[0] in ("proto", "services", "deploy"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places[node.name].append(str(where))
    assert len(places) > 400
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


# Threads that see to their own failures; all others end their process by `service_thread`.
BARE_THREADS = {
    "proto/errors.py", "services/environments/trl.py", "services/generator/vllm/engine.py",
    "services/modeling/chat_template.py", "services/process/parent.py",
    "services/trainer/distributed/heartbeat.py", "services/weights/gpu/cuda.py",
    "services/weights/planes/bucket_fetch.py", "services/weights/receiver.py",
}  # fmt: skip


def test_a_thread_that_fails_ends_its_process() -> None:
    found = {
        str(path.relative_to(ROOT))
        for path in source_files()
        if path.relative_to(ROOT).parts[0] in ("proto", "services")
        and re.search(r"\bThread\(", path.read_text(encoding="utf-8"))
    }
    assert found == BARE_THREADS
