"""Metadata of the project: citation, issue forms, versions, extras."""

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

from umbra import __version__

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == __version__
    assert citation["license"] == PROJECT["project"]["license"]
    assert {"cff-version", "message", "title", "authors"} <= set(citation)


def test_every_extra_that_a_page_names_is_there() -> None:
    extras = set(PROJECT["project"]["optional-dependencies"])
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    for page in pages:
        for named in re.findall(r"umbra-rl\[([\w,-]+)\]", page.read_text(encoding="utf-8")):
            assert set(named.split(",")) <= extras, (page.name, named)


def test_the_site_has_every_page_once() -> None:
    """As `make docs` would say, without mkdocs."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    named = re.findall(r"([\w-]+\.md)$", text, re.M)
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert sorted(named) == sorted(
        pages | {"index.md", "changelog.md", "proto.md", "proto-weights.md"}
    )
