"""Write the figures of README.md and docs/*.md from the files in `benchmarks/results/`.

    python benchmarks/figures.py            after a file there has changed
    python benchmarks/figures.py --check    exit code 1 if a document or plot is outdated

A document has a template in a comment, and behind it the text that follows from the template:

    <!-- = long_tail: {ratio} times -->4.5 times<!-- / -->

`long_tail` names `results/long_tail.json`. `{ratio}` is one of its figures, with three digits or as
in `{ratio:.0%}`; `{table:NAME}` one of its tables; `{missed}` counts met goals and names others;
`{origin}` says which command measured it, at which commit, when, where and under which load.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import plots
from report import text

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TEMPLATE = re.compile(r"<!-- = (?P<file>\w+)(?P<template>[:\n].*?)-->.*?<!-- / -->", re.DOTALL)
FIELD = re.compile(r"\{(?P<name>\w+)(?::(?P<form>[^{}]+))?\}")
PLOTS = {
    "end-to-end.svg": (plots.end_to_end, "end_to_end"),
    "smollm.svg": (plots.end_to_end, "end_to_end_smollm"),
    "staleness-accuracy.svg": (plots.staleness, "staleness"),
}


@cache
def results(name: str) -> Mapping[str, Any]:
    """Return the content of `results/NAME.json`."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def render(document: str) -> str:
    """Return `document` with the text behind each template rendered.

    Raises:
        LookupError: a file has no figure or table of that name.
    """

    def fill(found: re.Match[str]) -> str:
        name, template = found["file"], found["template"]
        content = results(name)
        made = FIELD.sub(lambda one: _value(one, name, content), template.lstrip(":").strip())
        made = f"\n{made}\n" if "\n" in template else made
        return f"<!-- = {name}{template}-->{made}<!-- / -->"

    return TEMPLATE.sub(fill, document)


def _value(found: re.Match[str], file: str, content: Mapping[str, Any]) -> str:
    name, form = found["name"], found["form"]
    if name == "missed":
        goals = content["goals"]
        missed = [
            f"{goal['name']} **{text(goal['value'])}** ({goal['op']} {text(goal['goal'])})"
            for goal in goals
            if not goal["met"]
        ]
        met = f"{len(goals) - len(missed)} of {len(goals)} goals are met"
        return f"{met}; missed: {'; '.join(missed)}." if missed else f"{met}."
    if name == "origin":
        return origin(content)
    values = content["tables"] if name == "table" else content["figures"]
    key = form if name == "table" else name
    if key not in values:
        raise LookupError(f"results/{file}.json has no {key!r}; it has {', '.join(values)}")
    if name == "table":
        return markdown(**values[key])
    return format(values[key], form) if form else text(values[key])


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    heading = f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"
    return "\n".join([heading, *(f"| {' | '.join(row)} |" for row in rows)])


def origin(content: Mapping[str, Any]) -> str:
    """Say how the figures were measured."""
    load = "{} to {}".format(*content["load"]) if "load" in content else "not recorded"
    if content.get("others") is not None:
        load += f", {content['others']:.0%} of the CPU taken by others at most"
    return (
        f"`{content['command']}`, commit {content['commit']}, {content['date']}, "
        f"{content['hardware']}, load {load}"
    )


def outdated() -> dict[Path, str]:
    """Return the content of each document and plot that is not what the results give."""
    wanted = {
        path: render(path.read_text(encoding="utf-8"))
        for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    }
    for name, (picture, file) in PLOTS.items():
        wanted[ROOT / "docs" / name] = picture(results(file)["rows"])
    return {
        path: content
        for path, content in wanted.items()
        if not path.exists() or path.read_text(encoding="utf-8") != content
    }


def main() -> int:
    """Write outdated files, or name them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    changed = outdated()
    for path, content in changed.items():
        print(f"{'outdated' if check else 'written'}: {path.relative_to(ROOT)}")
        if not check:
            path.write_text(content, encoding="utf-8")
    return int(check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
