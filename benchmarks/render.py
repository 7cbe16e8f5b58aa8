"""Writes what the documents say of measurements, from the files in `benchmarks/results/`.

    python benchmarks/render.py            after a file there has changed
    python benchmarks/render.py --check    exit code 1 if a document or a plot is not what it gives

A document has a template in a comment, and behind it what the template gives:

    <!-- = long_tail: {ratio} times -->4.5 times<!-- / -->

`long_tail` names `results/long_tail.json`. `{ratio}` is one of its figures, with three digits or as
in `{ratio:.0%}`; `{other.ratio}` one of another file's; `{table:NAME}` a table, `{goals}` its
goals, `{date}`, `{command}`, `{hardware}` and `{load}` how it came about. A template of several
lines is a block, whose text begins on a line of its own. Without the file the text says that this
was not measured, so that no figure outlives its data.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import plot_end_to_end
import plot_examples
import plot_mixture
import plot_scale
import plot_staleness
from report import text

from umbra.services.reporting.tables import markdown

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs"
RENDERED = re.compile(r"<!-- = (?P<file>\w+)(?P<template>[:\n].*?)-->.*?<!-- / -->", re.DOTALL)
_FIELD = re.compile(r"\{(?P<name>[\w.]+)(?::(?P<form>[^{}]+))?\}")

Results = Callable[[str], Mapping[str, Any]]
Rows = list[dict[str, Any]]

# What each plot is drawn from; without one of the files there is no plot.
PLOTS: dict[str, tuple[Callable[[Rows], str], tuple[str, ...]]] = {
    "end-to-end.svg": (plot_end_to_end.picture, ("end_to_end_replay",)),
    "end-to-end-real.svg": (plot_end_to_end.picture, ("end_to_end_real",)),
    "examples.svg": (plot_examples.picture, ("worked_examples",)),
    "mixture.svg": (plot_mixture.picture, ("mixture",)),
    "scale.svg": (plot_scale.picture, ("scale",)),
    "staleness-accuracy.svg": (plot_staleness.picture, ("staleness",)),
}


class NotMeasuredError(LookupError):
    """There is no file of this name in `results/`."""


@cache
def results(name: str) -> Mapping[str, Any]:
    """The content of `results/NAME.json`.

    Raises:
        NotMeasuredError: there is none.
    """
    file = RESULTS / f"{name}.json"
    if not file.exists():
        raise NotMeasuredError(name)
    return json.loads(file.read_text(encoding="utf-8"))


def render(document: str, results: Results = results) -> str:
    """`document` with the text behind each of its templates made anew.

    Raises:
        LookupError: a file has no figure or table of that name.
    """

    def fill(found: re.Match[str]) -> str:
        head, template = found["file"], found["template"]
        block = "\n" in template
        source = template.lstrip(":").strip()
        try:
            made = _FIELD.sub(lambda one: _value(one, head, results), source)
        except NotMeasuredError as missing:
            how = f"`python benchmarks/published.py {missing}`"
            made = f"*Not measured with the code as it is; {how} does it.*"
        made = f"\n{made}\n" if block else made
        return f"<!-- = {head}{template}-->{made}<!-- / -->"

    return RENDERED.sub(fill, document)


def _value(found: re.Match[str], head: str, results: Results) -> str:
    name, form = found["name"], found["form"]
    file, _, own = name.rpartition(".")
    content = results(file or head)
    if own == "table" and form:
        return markdown(**_known(content["tables"], form, file or head))
    if own == "goals":
        return _goals(content["goals"])
    if own == "load":
        return "{} to {}".format(*content["load"]) if "load" in content else "not noted"
    if own in ("date", "command", "hardware"):
        return str(content[own])
    value = _known(content["figures"], own, file or head)
    return format(value, form) if form else text(value)


def _known(values: Mapping[str, Any], name: str, file: str) -> Any:
    if name not in values:
        raise LookupError(f"results/{file}.json has no {name!r}; it has {', '.join(values)}")
    return values[name]


def _goals(goals: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [goal["name"], f"{goal['op']} {text(goal['goal'])}", text(goal["value"]),
         "met" if goal["met"] else "**missed**"]
        for goal in goals
    ]  # fmt: skip
    return markdown(["goal", "", "measured", ""], rows)


def documents() -> list[Path]:
    """All that may have templates."""
    return [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]


def plots() -> dict[Path, str | None]:
    """What each plot has to be; None where it must not be, for want of data."""
    made: dict[Path, str | None] = {}
    for name, (picture, files) in PLOTS.items():
        try:
            rows = [row for file in files for row in results(file)["rows"]]
            made[DOCS / name] = picture(rows)
        except NotMeasuredError:
            made[DOCS / name] = None
    return made


def outdated() -> dict[Path, str | None]:
    """Files that are not as they have to be, and what they have to be."""
    wanted: dict[Path, str | None] = dict(plots())
    for document in documents():
        wanted[document] = render(document.read_text(encoding="utf-8"))
    return {path: content for path, content in wanted.items() if _content(path) != content}


def _content(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


def main() -> int:
    """Write, or check."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args()
    changed = outdated()
    for path, content in changed.items():
        print(f"{'outdated' if args.check else 'written'}: {path.relative_to(ROOT)}")
        if args.check:
            continue
        if content is None:
            path.unlink()
        else:
            path.write_text(content, encoding="utf-8")
    return int(args.check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
