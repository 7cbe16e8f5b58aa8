"""What became of every published figure from commit to commit, and whether one has got worse.

    python benchmarks/track.py                     compare; exit code 1 if something got worse
    python benchmarks/track.py --keep              compare, then note the figures down for HEAD
    python benchmarks/track.py --keep --accept long_tail.equal_over_generate="why that is so"
    python benchmarks/track.py --history           begin `track.json` anew, from the files in git

`benchmarks/track.json` has an entry per commit with the figures and goals of each file in
`results/` that was measured anew since the entry before, and the instructions of `counted.py`. A
value is compared with the median of the last ones on the same hardware. It is worse if it has
changed to the wrong side by more than its own noise: twice the usual change from one measurement to
the next, as far as there are enough of them, else what is usual for its kind. Goals say which side
is the wrong one; of the other figures those in `SIDES` are judged, the rest is kept and shown.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import counted

from umbra.services.reporting.numbers import number
from umbra.services.reporting.tables import aligned

HERE = Path(__file__).parent
RESULTS = HERE / "results"
FILE = HERE / "track.json"
COUNTED = "counted"  # the "file" that counts of instructions are of
LATEST = 3  # measurements whose median a new one is compared with
ENOUGH = 4  # measurements from which their own noise is told
FLOOR = 0.03  # the least noise that anything has
USUAL = 0.15  # noise of a ratio within a run of which little is known
# Noise of other kinds, as long as little is known, by what their names have: the first that fits.
KINDS: dict[str, float] = {
    f"{COUNTED}.*": 0.02,
    "hostile.*": 1.0,  # what the attackers got done in their time
    "weight_push.*": 0.25,
    "*p99*": 1.0,
    "*longest*": 1.0,
    "*_ms*": 0.5,
    "*ms *": 0.5,
    "*_s": 0.3,
    "*_us": 0.3,
    "*_gb_s": 0.3,
    "*per_s*": 0.3,
    "*saturates*": 0.3,
}
# Which figures are better the larger (">") or the smaller ("<") they are; the first that fits.
SIDES: dict[str, str] = {
    f"{COUNTED}.*": "<",
    "buffer_load.saturates_at": ">",
    "buffer_load.keeps_up_with": ">",
    "buffer_load.saturated_us": "<",
    "buffer_throughput.few_us": "<",
    "buffer_throughput.many_us": "<",
    "buffer_throughput.p50_ms_*": "<",
    "buffer_throughput.*_mb": "<",
    "broker_scale.buffer_us": "<",
    "demo_runs.*_after": ">",
    "demo_runs.*_loop_s": "<",
    "demo_runs.push_*_ms": "<",
    "end_to_end_*_async_least_of_ideal": ">",
    "end_to_end_*_over_*": ">",
    "long_tail.*_over_*": ">",
    "push_at_size.*_gb_s": ">",
    "security_cost.more_us": "<",
    "staleness.*_loss": "<",
    "store.append_log_CPU_us": "<",
    "trainer_speed.*": ">",
    "weight_push.*_over_floor": "<",
}
_WRONG = {">": -1, ">=": -1, "<": 1, "<=": 1}  # sign of a change for the worse


@dataclass(frozen=True)
class Measured:
    """One figure of one file, as it was measured once."""

    value: float
    side: str  # "": it is not judged
    met: bool = True  # the goal, if it is one


@dataclass(frozen=True)
class Change:
    """A value beside what it used to be."""

    name: str
    before: float
    now: float
    noise: float
    side: str
    worse: bool
    accepted: str = ""  # why, if so

    @property
    def ratio(self) -> float:
        """Now over before; NaN where that says nothing."""
        return self.now / self.before if self.before > 0 and self.now > 0 else math.nan


def values_of(name: str, content: Mapping[str, Any]) -> dict[str, Measured]:
    """All numbers that a file of results publishes: its figures, and its goals by their names."""
    found: dict[str, Measured] = {}
    for key, value in content.get("figures", {}).items():
        if isinstance(value, int | float) and math.isfinite(value):
            found[key] = Measured(float(value), side_of(f"{name}.{key}"))
    for goal in content.get("goals", ()):
        if math.isfinite(goal["value"]):
            found[goal["name"]] = Measured(float(goal["value"]), goal["op"], goal["met"])
    return found


def side_of(name: str) -> str:
    """Which side of a figure is the better one; empty if neither is."""
    return next((side for form, side in SIDES.items() if fnmatch(name, form)), "")


def entry_of(files: Mapping[str, Mapping[str, Any]], commit: str, date: str) -> dict[str, Any]:
    """What is noted of a commit: `files` are contents of results, by name."""
    return {
        "commit": commit,
        "date": date,
        "measured": {
            name: {
                "hardware": content["hardware"],
                "values": {key: one.value for key, one in values_of(name, content).items()},
            }
            for name, content in files.items()
            if "goals" in content
        },
    }


def series(entries: Iterable[Mapping[str, Any]], file: str, key: str, hardware: str) -> list[float]:
    """Values of a figure that were noted, oldest first, back to where a worse one was accepted."""
    found: list[float] = []
    for entry in entries:
        measured = entry["measured"].get(file)
        if measured is None or measured["hardware"] != hardware:
            continue
        if f"{file}.{key}" in entry.get("accepted", {}):
            found.clear()
        if key in measured["values"]:
            found.append(measured["values"][key])
    return found


def noise_of(name: str, values: Sequence[float]) -> float:
    """By how much a value changes without a reason, as a share of it."""
    steps = [abs(math.log(b / a)) for a, b in pairwise(values) if a > 0 and b > 0]
    if len(values) >= ENOUGH and steps:
        return max(FLOOR, math.exp(2 * 1.4826 * median(steps)) - 1)
    return next((noise for form, noise in KINDS.items() if fnmatch(name, form)), USUAL)


def judge(name: str, now: Measured, values: Sequence[float], accepted: str = "") -> Change | None:
    """`now` beside the `values` of before; None if there are none.

    Ratios of what is 0 or negative say nothing: such a value is worse if its goal is missed and it
    is farther on the wrong side than ever before.
    """
    if not values:
        return None
    before, noise = median(values[-LATEST:]), noise_of(name, values)
    worse = False
    if now.side and before > 0 and now.value > 0:
        worse = _WRONG[now.side] * math.log(now.value / before) > math.log1p(noise)
    elif now.side:
        worst = max(_WRONG[now.side] * value for value in values)
        worse = not now.met and _WRONG[now.side] * now.value > worst
    return Change(name, before, now.value, noise, now.side, worse, accepted if worse else "")


def compare(
    entries: Sequence[Mapping[str, Any]],
    files: Mapping[str, Mapping[str, Any]],
    accepted: Mapping[str, str],
) -> Iterator[Change]:
    """Every figure of `files` that was there before."""
    for file, content in files.items():
        for key, now in values_of(file, content).items():
            name = f"{file}.{key}"
            before = series(entries, file, key, content["hardware"])
            if before and before[-1] == now.value:
                before.pop()  # that is this measurement itself
            change = judge(name, now, before, accepted.get(name, ""))
            if change is not None:
                yield change


def new_in(
    entries: Sequence[Mapping[str, Any]], entry: Mapping[str, Any], accepted: Iterable[str]
) -> dict[str, Mapping[str, Any]]:
    """Of the files of `entry`, those that differ from when they were last noted, or have a figure
    that is accepted.
    """
    last: dict[str, Any] = {}
    for one in entries:
        last |= one["measured"]
    begun = {name.partition(".")[0] for name in accepted}
    return {
        name: one
        for name, one in entry["measured"].items()
        if last.get(name) != one or name in begun
    }


def table(changes: Sequence[Change]) -> str:
    """The changes for people, the worst first."""
    rows: list[Sequence[str]] = [("figure", "before", "now", "ratio", "noise", "")]
    for one in sorted(changes, key=lambda one: (not one.worse, one.name)):
        verdict = f"accepted: {one.accepted}" if one.accepted else "WORSE" if one.worse else ""
        ratio = "" if math.isnan(one.ratio) else f"{one.ratio:.3f}"
        rows.append(
            (one.name, number(one.before), number(one.now), ratio, f"{one.noise:.0%}", verdict)
        )
    return "\n".join(aligned(rows, right=range(1, 5)))


def counts_here() -> dict[str, Mapping[str, Any]]:
    """Counts of instructions, as if they were a file of results; nothing where they are missing."""
    if why := counted.missing():
        print(f"Instructions are not counted: {why}.")
        return {}
    python = ".".join(map(str, sys.version_info[:3]))
    figures = counted.instructions()
    return {COUNTED: {"hardware": f"callgrind, Python {python}", "figures": figures, "goals": []}}


def results_here() -> dict[str, Mapping[str, Any]]:
    """The files of results that scripts of benchmarks have written."""
    found = {file.stem: json.loads(file.read_text()) for file in sorted(RESULTS.glob("*.json"))}
    return {name: content for name, content in found.items() if "goals" in content}


def history() -> list[dict[str, Any]]:
    """Entries of all commits that have changed a file of results, oldest first."""
    entries: list[dict[str, Any]] = []
    for line in git("log", "--reverse", "--format=%h %cs", "--", str(RESULTS)).splitlines():
        commit, date = line.split()
        changed = git("show", "--name-only", "--format=", commit, "--", str(RESULTS)).split()
        files: dict[str, Any] = {}
        for name in changed:
            there = git("ls-tree", "--name-only", commit, f":/{name}")
            content = json.loads(git("show", f"{commit}:{name}")) if there else {}
            if name.endswith(".json") and "goals" in content:
                files[Path(name).stem] = content
        entry = entry_of(files, commit, date)
        if entry["measured"]:
            entries.append(entry)
    return entries


def git(*arguments: str) -> str:
    """What git says."""
    argv = ["git", "-C", str(HERE), *arguments]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


def read() -> list[dict[str, Any]]:
    """The entries of `track.json`."""
    return json.loads(FILE.read_text())["commits"] if FILE.exists() else []


def write(entries: Sequence[Mapping[str, Any]]) -> None:
    """Write them."""
    FILE.write_text(json.dumps({"commits": entries}, indent=1) + "\n")


def main() -> int:
    """Compare, note down; 1 if something got worse that was not accepted."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--keep", action="store_true", help="note this commit's figures down")
    parser.add_argument("--accept", action="append", default=[], metavar="NAME=WHY")
    parser.add_argument("--no-count", action="store_true", help="count no instructions")
    parser.add_argument("--history", action="store_true", help="make track.json from git's history")
    parser.add_argument("--all", action="store_true", help="show what has not changed, too")
    args = parser.parse_args()
    if args.history:
        write(history())
        return 0
    accepted = dict(text.partition("=")[::2] for text in args.accept)
    if bare := [name for name, why in accepted.items() if not why]:
        parser.error(f"--accept {bare[0]}: write it as NAME=WHY, with a reason that is kept")
    entries = read()
    files = results_here() | ({} if args.no_count else counts_here())
    changes = list(compare(entries, files, accepted))
    if unknown := accepted.keys() - {one.name for one in changes if one.worse}:
        parser.error(f"--accept {min(unknown)}: no figure of that name got worse")
    moved = [one for one in changes if one.worse or abs(one.ratio - 1) > FLOOR]
    print(table(changes if args.all else moved))
    worse = [one for one in changes if one.worse and not one.accepted]
    print(f"{len(changes)} figures compared, {len(worse)} got worse by more than their noise")
    if args.keep and not worse:
        commit = git("rev-parse", "--short", "HEAD").strip()
        entry = entry_of(files, commit, time.strftime("%Y-%m-%d"))
        entry["measured"] = new_in(entries, entry, accepted)
        if accepted:
            entry["accepted"] = accepted
        if entry["measured"]:
            write([*entries, entry])
            print(f"noted down for {commit}: {', '.join(entry['measured'])}")
    return int(bool(worse))


if __name__ == "__main__":
    sys.exit(main())
