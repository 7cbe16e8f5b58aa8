"""`.ci/budget.py`: what it counts, and what it refuses."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from test_source_rules import ROOT


@pytest.fixture
def budget(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    import budget

    return budget


def tree(root: Path, files: dict[str, str]) -> Path:
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def test_lines_and_public_names_of_each_folder(budget: Any, tmp_path: Path) -> None:
    code = "X = 1\n\n\ndef f(): ...\n\n\ndef _g(): ...\n\n\nclass C:\n    def m(self): ...\n"
    files = {"services/a/b/c.py": code, "services/__init__.py": "", "proto/p.py": "1\n"}
    root = tree(tmp_path, {**files, "services/a/notes.md": "1\n"})
    (root / "src").mkdir()
    (root / "src/services").symlink_to("../services")
    folders, long = budget.count(root)
    found = {name: (one.files, one.lines, one.names) for name, one in folders.items()}
    assert found == {"services/a": (1, 11, 2), "services": (1, 0, 0), "proto": (1, 1, 0)}
    assert long == []


def test_what_exceeds_its_budget_or_has_none_is_refused(
    budget: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tree(tmp_path, {"proto/p.py": "def f(): ...\n\n\ndef g(): ...\n"})
    assert budget.main(root, {"proto": (4, 2)}) == 0
    assert budget.main(root, {"proto": (3, 1)}) == 1
    said = capsys.readouterr().out
    assert "proto: 4 lines, the budget is 3" in said and "proto: 2 names, the budget is 1" in said
    tree(tmp_path, {"deploy/long.py": "1\n" * 601, "tests/t.py": "1\n"})
    assert budget.main(root, {"proto": (4, 2), "gone": (1, 1)}) == 1
    said = capsys.readouterr().out
    assert "deploy/long.py: 601 lines, the limit is 600" in said
    assert "deploy: has no budget: add one to budget.py" in said and "tests: has no" not in said
    assert "gone: no such folder: remove its budget" in said


def test_the_repository_passes(budget: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert budget.main() == 0, capsys.readouterr().out
