"""Whole runs for benchmarks, in-process supervisor and all, and what they say about themselves."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any, Generic, Protocol, TypeVar

from umbra.deploy.live import QuietView
from umbra.deploy.overlap import Interval, clip, merge, total
from umbra.deploy.programs import other_programs
from umbra.deploy.run_folder import RunFolder, read_rows
from umbra.deploy.up import Up
from umbra.services.config import RunConfig
from umbra.services.process.signals import SignalCounter
from umbra.services.process.supervisor import Program

HERE = Path(__file__).parent


class Named(Protocol):
    """What a mode has at least."""

    @property
    def name(self) -> str: ...


M = TypeVar("M", bound=Named)
Scripts = Mapping[str, Sequence[str]]  # by command of umbra: script here, and its own arguments


@dataclass(frozen=True)
class Cell(Generic[M]):
    """One run of a comparison: how, on what (a mix of lengths, or a task), with which seed."""

    form: str
    mode: M
    mix: str
    seed: int

    @property
    def key(self) -> str:
        """Names the cell in files."""
        return f"{self.form}/{self.mode.name}/{self.mix}/{self.seed}"


def cells(
    form: str, modes: Sequence[M], mixes: Sequence[str], seeds: Sequence[int], chosen: Sequence[str]
) -> Iterator[Cell[M]]:
    """All combinations, seeds outermost, of the modes that are named; of all, if none is."""
    for seed in seeds:
        for mix in mixes:
            for mode in modes:
                if not chosen or mode.name in chosen:
                    yield Cell(form, mode, mix, seed)


def run(config: RunConfig, scripts: Scripts, *, evaluate: bool = False) -> tuple[Any, RunFolder]:
    """Run `config` to its end, with `scripts` instead of the commands of those names.

    Returns:
        The summary, and the folder with everything else.

    Raises:
        RuntimeError: the run failed.
    """
    folder = RunFolder.create(config.run.dir, config.run.name)

    def programs(config: RunConfig, folder: RunFolder, broker: str) -> list[Program]:
        return [instead(one, scripts) for one in other_programs(config, folder, broker)]

    with SignalCounter() as interrupts:
        view = QuietView()
        up = Up(
            config, folder, view=view, interrupts=interrupts, evaluate=evaluate, programs=programs
        )
        summary = up.run()
    if interrupts.count:
        raise KeyboardInterrupt
    if summary["exit_code"]:
        raise RuntimeError(f"{folder.path}: {summary['exit_reason']}")
    return summary, folder


def instead(program: Program, scripts: Scripts) -> Program:
    """`program`, by a script of ours if there is one for its command."""
    # argv is: python -m umbra COMMAND ...
    script = scripts.get(program.argv[3])
    if script is None:
        return program
    name, *arguments = script
    argv = (sys.executable, str(HERE / name), *arguments, *program.argv[4:])
    return replace(program, argv=argv)


@dataclass(frozen=True, slots=True)
class Steady:
    """What happened between the commits of two steps.

    Idle shares are 1 - the share of the time in which a service was at work: a generator while it
    decodes anything (mean over generators), the trainer while it updates, the others by CPU time.
    """

    steps: int
    seconds: float
    samples: int
    tokens: float  # of responses
    prompt_tokens: float
    reward: float
    staleness: float
    staleness_max: float
    decoded: float  # response tokens that generators made in that time
    generator_idle: float
    trainer_idle: float

    @property
    def step_s(self) -> float:
        """Seconds per step."""
        return self.seconds / self.steps


def steady(folder: RunFolder, *, first: int, last: int, generators: int) -> Steady:
    """What the run in `folder` did from the end of step `first` to that of step `last`."""
    rows = list(read_rows(folder.metrics))
    steps = {row["step"]: row for row in rows if row["kind"] == "step"}
    window = (steps[first]["time"], steps[last]["time"])
    inside = [steps[number] for number in range(first + 1, last + 1)]
    spans = [row for row in rows if row["kind"] == "span"]
    decodes = [row for row in spans if row["name"] == "decode"]
    seconds = window[1] - window[0]
    busy = [
        total(clip(merge(_intervals(one for one in decodes if one["service"] == name)), window))
        for name in {row["service"] for row in decodes}
    ]
    trained = total(clip(merge(_intervals(r for r in spans if r["name"] == "train_step")), window))
    samples = sum(row["samples"] for row in inside)
    tokens = sum(row["samples"] * row["response_length/mean"] for row in inside)
    return Steady(
        steps=last - first,
        seconds=seconds,
        samples=int(samples),
        tokens=tokens,
        prompt_tokens=sum(row["tokens"] for row in inside) - tokens,
        reward=mean(row["reward/mean"] for row in inside),
        staleness=mean(row["staleness/total/mean"] for row in inside),
        staleness_max=max(row["staleness/total/max"] for row in inside),
        decoded=sum(row["tokens"] * _share(row, window) for row in decodes),
        generator_idle=1 - sum(busy) / generators / seconds,
        trainer_idle=1 - trained / seconds,
    )


def cpu_idle(summary: Mapping[str, Any], name: str) -> float:
    """Share of its life in which the service called `name` used no CPU."""
    used = summary["seconds"]["services"][name]
    return 1 - used["cpu"] / used["wall"]


def _intervals(rows: Iterable[Mapping[str, Any]]) -> list[Interval]:
    return [(row["start"], row["end"]) for row in rows]


def _share(row: Mapping[str, Any], window: Interval) -> float:
    """How much of a span lies within `window`."""
    length = row["end"] - row["start"]
    return total(clip([(row["start"], row["end"])], window)) / length if length > 0 else 0.0
