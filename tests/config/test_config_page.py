"""docs/config.md is the schema, and help texts speak the language of run files."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from umbra import cli
from umbra.services.config.loader import SECTIONS

SCRIPT = Path(__file__).resolve().parents[2] / ".ci" / "config_page.py"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "config.md"
page = runpy.run_path(str(SCRIPT))
READERS, described = page["READERS"], page["described"]


def test_the_page_is_what_the_script_prints() -> None:
    made = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=True)
    assert PAGE.read_text(encoding="utf-8") == made.stdout, (
        "write it anew: python .ci/config_page.py > docs/config.md"
    )


def test_every_key_has_a_meaning() -> None:
    keys = list(described())
    assert {key.section for key in keys} == set(READERS) == set(SECTIONS)
    twice = len(SECTIONS["environment"])  # which [[environments]] have too
    assert len(keys) == sum(len(SECTIONS[section]) for section in READERS) - twice
    assert [key for key in keys if not key.meaning] == []


def test_every_command_is_in_one_section_of_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    named = [name for names in cli.SECTIONS.values() for name in names]
    assert sorted(named) == sorted(cli.COMMANDS)
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    for section, names in cli.SECTIONS.items():
        listed = text.partition(f"\n{section}:\n")[2].partition("\n\n")[0].splitlines()
        assert [line.split()[0] for line in listed] == list(names)


def test_there_are_170_keys_at_most() -> None:
    assert len(list(described())) <= 170
