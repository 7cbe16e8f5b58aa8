"""docs/config.md is the schema, and help texts speak the language of run files."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / ".ci" / "config_page.py"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "config.md"
page = runpy.run_path(str(SCRIPT))
READERS, described = page["READERS"], page["described"]


def test_the_page_is_what_the_script_prints() -> None:
    made = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=True)
    assert PAGE.read_text(encoding="utf-8") == made.stdout, (
        "write it anew: python .ci/config_page.py > docs/config.md"
    )


def test_there_are_170_keys_at_most() -> None:
    assert len(list(described())) <= 170
