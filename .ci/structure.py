"""Name what makes production code hard to follow; fail for what is not in `ALLOWED`, with a reason.

Counted are constructors (`__init__`) with more than eight parameters, modules that only forward
(imports and nothing of their own), names that modules take from one that imports them itself, and
files under 40 lines that one other module imports. Tests do not count as importers. A struct whose
fields are data is no constructor. An entry of `ALLOWED` that no longer applies is a failure too.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

PARAMETERS = 8
SMALL_FILE_LINES = 40
ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("deploy", "proto", "services", "src/umbra")

# "path" or "path: class" -> why it stays as it is
ALLOWED: dict[str, str] = {
    "proto/messages.py: names": "all messages have one door, whichever file holds them",
    "services/environments/guess.py": "one environment a file, to copy from",
    "services/generator/engines/torch_engine.py: TorchEngine": "what an engine gets at its start",
    "services/generator/vllm/engine.py: VllmEngine": "what an engine is told at its start, by name",
}


class Module:
    """One file: its dotted name, its tree, and its length."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.length = len(text.splitlines())
        self.tree = ast.parse(text)
        parts = path.removeprefix("src/umbra/").removesuffix(".py").split("/")
        self.is_package = parts[-1] == "__init__"
        self.name = ".".join(["umbra", *(parts[:-1] if self.is_package else parts)])


def modules(root: Path) -> list[Module]:
    """Read the production files below `root`, in the order of their paths."""
    files = {
        path.relative_to(root)
        for folder in FOLDERS
        for path in (root / folder).rglob("*.py")
        if "__pycache__" not in path.parts
    }
    return [Module(str(path), (root / path).read_text(encoding="utf-8")) for path in sorted(files)]


def imported(module: Module, known: Mapping[str, Module]) -> set[str]:
    """Name the modules of `known` that `module` imports, wherever in the file it does."""
    found: set[str] = set()
    for node in ast.walk(module.tree):
        match node:
            case ast.Import(names=names):
                found.update(alias.name for alias in names)
            case ast.ImportFrom(module=str(source), names=names, level=0):
                for alias in names:
                    inner = f"{source}.{alias.name}"
                    found.add(inner if inner in known else source)
            case _:
                pass
    return (found & known.keys()) - {module.name}


def long_constructors(module: Module) -> Iterable[tuple[str, str]]:
    """Yield a key and a sentence for each constructor that takes too much."""
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.ClassDef):
            continue
        for item in node.body:
            if isinstance(item, ast.FunctionDef) and item.name == "__init__":
                given = item.args
                count = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs) - 1
                if count > PARAMETERS:
                    yield f"{module.path}: {node.name}", f"its constructor takes {count} parameters"


def only_forwards(module: Module) -> bool:
    """Tell whether `module` imports names and defines none."""
    forwards = False
    for node in module.tree.body:
        match node:
            case ast.ImportFrom(module="__future__") | ast.Expr(value=ast.Constant()):
                pass
            case ast.Import() | ast.ImportFrom():
                forwards = True
            case ast.Assign(targets=[ast.Name(id="__all__")]):
                pass
            case ast.Assign(value=ast.Attribute() | ast.Name()):
                forwards = True  # name = module.name
            case _:
                return False
    return forwards


def forwarded_names(modules: Mapping[str, Module]) -> dict[str, str]:
    """Find the names of ours that modules take from another than the one that defines them.

    A package may gather the names of its modules.
    """
    sources: dict[str, dict[str, str]] = {name: {} for name in modules}
    for name, module in modules.items():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ImportFrom) and node.module in modules:
                sources[name].update((a.asname or a.name, node.module) for a in node.names)
    found: dict[str, set[str]] = defaultdict(set)
    for taken in sources.values():
        for name, source in taken.items():
            inner = f"{source}.{name}" in modules
            if name in sources[source] and not inner and not modules[source].is_package:
                found[modules[source].path].add(name)
    return {
        f"{path}: names": f"others take from it {len(names)} that it imports, as {min(names)}"
        for path, names in found.items()
    }


def findings(root: Path) -> dict[str, str]:
    """Return what is found below `root`: a key as in `ALLOWED`, and what is wrong with it."""
    everything = modules(root)
    known = {module.name: module for module in everything}
    importers: dict[str, list[str]] = defaultdict(list)
    for module in everything:
        for name in imported(module, known):
            importers[name].append(module.path)
    found = forwarded_names(known)
    for module in everything:
        found.update(long_constructors(module))
        users = importers[module.name]
        if only_forwards(module):
            found[module.path] = "it only forwards names"
        elif module.length < SMALL_FILE_LINES and len(users) == 1 and not module.is_package:
            found[module.path] = f"{module.length} lines, imported by {users[0]} alone"
    return found


def main(root: Path = ROOT, allowed: Mapping[str, str] = ALLOWED) -> int:
    """Print the findings; return 1 if one is new, or if an allowed one is gone, else 0."""
    found = findings(root)
    for key, fault in found.items():
        print(f"{key}: {fault}" + (f" (allowed: {allowed[key]})" if key in allowed else ""))
    new = found.keys() - allowed.keys()
    stale = sorted(allowed.keys() - found.keys())
    for key in stale:
        print(f"{key}: allowed in {Path(__file__).name}, but no longer found: remove the entry")
    print(f"{len(found)} findings, {len(new)} of them new, {len(stale)} entries are out of date")
    return 1 if new or stale else 0


if __name__ == "__main__":
    sys.exit(main())
