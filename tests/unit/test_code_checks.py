"""The checks of `.ci`: what they find, what they allow, and how lines are counted."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from fakes.slowness import seconds
from test_source_rules import ROOT

LONG = "class Wide:\n    def __init__(self, a, b, c, d, /, e, f, g, *, h, i): ...\n"
EIGHT = "class Fits:\n    def __init__(self, a, b, c, d, e, f, g, h): ...\n"
FORWARD = '"""Names."""\nfrom __future__ import annotations\nfrom umbra.proto.wide import Wide\n'


@pytest.fixture
def structure(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    import structure

    return structure


@pytest.fixture
def line_counts(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    import line_counts

    return line_counts


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    import walks

    return walks


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def test_each_kind_is_found(structure: Any, tmp_path: Path) -> None:
    used_twice = "import umbra.proto.wide\nX = 1\n"
    root = tree(
        tmp_path,
        {
            "proto/wide.py": LONG + EIGHT,
            "proto/names.py": FORWARD + '__all__ = ["Wide"]\n',
            "proto/alias.py": "import umbra.proto.wide\nWide = umbra.proto.wide.Wide\n",
            "services/a/small.py": "X = 1\n",
            "services/a/user.py": "def f():\n    from umbra.services.a import small\n" + "\n" * 50,
            "services/a/shared.py": "Y = 1\n",
            "services/a/one.py": "from umbra.services.a.shared import Y\n" + used_twice + "\n" * 50,
            "services/a/two.py": "from umbra.services.a.shared import Y\n" + used_twice + "\n" * 50,
            "services/a/entry.py": "def main(): ...\n",
            "services/b/__init__.py": "from umbra.proto.wide import Fits\nZ = 1\n",
            "services/b/second.py": "from umbra.proto.wide import Wide\nW = Wide\nV = 1\n",
            "services/b/third.py": (
                "from umbra.services.b import Fits, second\n"
                "from umbra.services.b.second import V, Wide\nU = 1\n"
            )
            + "\n" * 50,
            "tests/test_small.py": "from umbra.services.a.small import X\n",
        },
    )
    assert structure.findings(root) == {
        "proto/wide.py: Wide": "its constructor takes 9 parameters",
        "proto/names.py": "it only forwards names",
        "proto/alias.py": "it only forwards names",
        "services/a/small.py": "1 lines, imported by services/a/user.py alone",
        "services/b/second.py": "3 lines, imported by services/b/third.py alone",
        "services/b/second.py: names": "others take from it 1 that it imports, as Wide",
    }


def test_an_allowed_finding_passes_a_new_one_and_a_stale_entry_do_not(
    structure: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tree(tmp_path, {"proto/wide.py": LONG})
    key = "proto/wide.py: Wide"
    assert structure.main(root, {key: "for now"}) == 0
    assert (
        f"{key}: its constructor takes 9 parameters (allowed: for now)" in capsys.readouterr().out
    )
    assert structure.main(root, {}) == 1
    assert "1 findings, 1 of them new" in capsys.readouterr().out
    assert structure.main(root, {key: "for now", "proto/gone.py": "it was small"}) == 1
    assert "proto/gone.py: allowed in structure.py, but no longer found" in capsys.readouterr().out


def test_the_repository_passes(structure: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert structure.main() == 0, capsys.readouterr().out


WALK = """
**A trajectory, from here to there** (on paper): {hops} hops in 2 files.

| # | where | what |
|---|---|---|
| 1-2 | `a/one.py` `first`, `Two.second` | |
| 3 | `b.py` `{last}` (or `c.py` `other`) | in words |
"""


def test_a_walk_is_compared_with_the_code(walks: Any, tmp_path: Path) -> None:
    code = "def first(): ...\nclass Two:\n    def second(self): ...\n"
    root = tree(tmp_path, {"services/a/one.py": code, "b.py": "async def last(): ...\n"})
    assert walks.findings(WALK.format(hops=3, last="last"), root) == ([], 3, 2)
    assert walks.findings(WALK.format(hops=4, last="lost"), root)[0] == [
        "b.py: it has no lost",
        "it is 3 hops in 2 files, which the page does not say",
    ]
    skipped = WALK.replace("| 3 |", "| 4 |").replace("b.py", "gone.py").format(hops=4, last="last")
    assert walks.findings(skipped, root)[0] == [
        "gone.py: hops 4 to 4 after 2, for 1 names",
        "gone.py: there is no such file",
    ]


def test_the_walk_in_the_documents_is_that_of_the_code(
    walks: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert walks.main() == 0, capsys.readouterr().out


def git(folder: Path, *words: str) -> None:
    names = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    subprocess.run(
        ["git", *names, *words], cwd=folder, check=True, capture_output=True, timeout=seconds(60)
    )


def test_lines_of_each_revision(
    line_counts: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    git(tmp_path, "init", "-q")
    files = {"services/a/x.py": "1\n2\n", "services/__init__.py": "1\n", "proto/p.py": "1\n"}
    tree(tmp_path, {**files, "tests/t.py": "1\n", "services/a/x.md": "1\n"})
    (tmp_path / "src").mkdir()
    (tmp_path / "src/services").symlink_to("../services")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    git(tmp_path, "tag", "before")
    tree(tmp_path, {"deploy/cluster/d.py": "1\n2\n3"})
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "second")
    monkeypatch.setattr(line_counts, "ROOT", tmp_path)

    assert line_counts.main(["--rev", "before", "--rev", "HEAD", "--json"]) == 0
    before = {
        "proto": {"files": 1, "lines": 1},
        "services": {"files": 1, "lines": 1},
        "services/a": {"files": 1, "lines": 2},
    }
    after = {**before, "deploy": {"files": 1, "lines": 3}}
    assert json.loads(capsys.readouterr().out) == {"before": before, "HEAD": after}

    assert line_counts.main(["--rev", "before", "--rev", "HEAD"]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| `deploy` | 0 | 3 |",
        "| `proto` | 1 | 1 |",
        "| `services` | 1 | 1 |",
        "| `services/a` | 2 | 2 |",
        "| **all** | **4** | **7** |",
    ]
    assert line_counts.main(["--rev", "nowhere"]) == 2
    assert "nowhere: " in capsys.readouterr().err
