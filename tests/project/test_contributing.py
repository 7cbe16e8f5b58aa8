"""docs/contributing.md, step by step, in a copy of the package."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

from fakes.commands import call

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "contributing.md"
_NEW = re.compile(r"^New file `([^`]+)`:\n\n```python\n(.*?)^```$", re.M | re.S)
_CHANGE = re.compile(r"^In `([^`]+)`:\n\n```diff\n(.*?)^```$", re.M | re.S)
_TRY = re.compile(r"^Try it[^\n]*:\n\n```python\n(.*?)^```$", re.M | re.S)
# The engine of the page has what a generator asks of one.
ENGINE = """
import inspect
from umbra.services.generator.engines.engine import Engine
from umbra.services.generator.parrot_engine import ParrotEngine

parrot = ParrotEngine(1, 8, 10)
for name in {*Engine.__annotations__, *vars(Engine)}:
    if name.startswith("_"):
        continue
    assert hasattr(parrot, name), name
    if inspect.isfunction(method := getattr(Engine, name, None)):
        own = getattr(ParrotEngine, name)
        assert [*inspect.signature(own).parameters] == [*inspect.signature(method).parameters], name
"""
LINKED = ("proto", "services", "deploy")


def package(folder: Path) -> Path:
    """A copy of the package below `folder`, as it lies when it is installed; its path."""
    copied = folder / "umbra"
    unwanted = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "src" / "umbra", copied, symlinks=True, ignore=unwanted)
    for name in LINKED:
        (copied / name).unlink()
        shutil.copytree(ROOT / name, copied / name, ignore=unwanted)
    return copied


def follow(page: str, copied: Path) -> None:
    """Do the steps of `page` in the package at `copied`; each has to be possible."""
    for path, text in _NEW.findall(page):
        assert not (copied / path).exists(), path
        (copied / path).write_text(text, encoding="utf-8")
    for path, diff in _CHANGE.findall(page):
        file, lines = copied / path, diff.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in " -")
        new = "".join(line[1:] for line in lines if line[0] in " +")
        before, found, after = f"\n{file.read_text(encoding='utf-8')}".partition(f"\n{old}")
        assert found and old, f"docs/contributing.md: there is no {old!r} in {path}"
        file.write_text(f"{before}\n{new}{after}"[1:], encoding="utf-8")


def test_the_steps_lead_to_what_is_tried(tmp_path: Path, tiny_model_dir: Path) -> None:
    page = PAGE.read_text(encoding="utf-8")
    copied = package(tmp_path)
    tries = _TRY.findall(page)
    follow(page, copied)
    steps = len(_NEW.findall(page)) + len(_CHANGE.findall(page))
    assert steps + len(tries) == len(re.findall("^```(?:python|diff)", page, re.M))
    for number, text in enumerate(tries):
        (tmp_path / f"try_{number}.py").write_text(text, encoding="utf-8")
    program = (
        "import runpy\n"
        f"for number in range({len(tries)}):\n"
        f"    runpy.run_path(f'try_{{number}}.py', {{'MODEL': {str(tiny_model_dir)!r}}})\n"
        "import umbra; print(umbra.__file__)\n"
    ) + ENGINE
    done = call(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        quiet_s=120,
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == copied / "__init__.py"
    linted = [sys.executable, "-m", "ruff", "check", "--config", str(ROOT / "pyproject.toml")]
    changed = [str(copied / path) for path, _ in _NEW.findall(page)]
    checked = subprocess.run([*linted, *changed], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


def test_the_tests_and_programs_that_it_names_are_there() -> None:
    page = PAGE.read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:tests|benchmarks|services|deploy)/[\w/]+\.py)`", page))
    new = {path for path, _ in _NEW.findall(page)}
    assert [path for path in sorted(named - new) if not (ROOT / path).is_file()] == []
