"""Whole runs of the demo's tasks for benchmarks, and what their metrics say."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from umbra.deploy.commands.demo import DEMOS, HELDOUT, RECIPES
from umbra.deploy.run.live import View
from umbra.deploy.run.up import Up
from umbra.deploy.run_folder import RunFolder, read_rows
from umbra.services.config import RunConfig
from umbra.services.environments.protocol import prompt_messages
from umbra.services.process.child import umbra_argv
from umbra.services.process.command import SignalCounter

RUN_LIMIT_S = 900.0
FOLDERS = {  # of the run files that are not the demo's
    "smollm": Path(__file__).parents[1] / "examples" / "smollm",
    "long": Path(__file__).with_name("long"),
}
# 25 M parameters; a vocabulary of about 100.
LONG_MODEL = ("--hidden", "512", "--layers", "8", "--heads", "8", "--kv-heads", "4", "--ff", "1536")
LONG_PROMPTS = 512


def umbra(*arguments: str) -> str:
    """Run an `umbra` command and return its standard output.

    Raises:
        RuntimeError: it failed; with the end of its standard error.
    """
    done = subprocess.run(
        umbra_argv(*arguments), capture_output=True, text=True, timeout=RUN_LIMIT_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"umbra {arguments[0]} failed: {done.stderr.strip()[-2000:]}")
    return done.stdout


def run_file(task: str) -> Path:
    """Return the run file of a task."""
    return FOLDERS[task] / "run.toml" if task in FOLDERS else DEMOS / f"{task}.toml"


def base_model(work: Path, task: str, seed: int) -> Path:
    """Return a folder with the task's data and its model in `base`, made once per task and seed."""
    folder = work / (task if task == "smollm" else f"{task}-s{seed}")
    if (folder / "base" / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    if task == "smollm":
        prepare = FOLDERS[task] / "prepare.py"
        subprocess.run([sys.executable, str(prepare), str(folder)], check=True)
        (folder / "model").rename(folder / "base")
        return folder
    if task == "long":
        rows = ({"prompt": f"{number:03d}", "answer": ""} for number in range(LONG_PROMPTS))
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        umbra("make-model", str(folder / "base"), "--seed", str(seed), *LONG_MODEL)
        return folder
    recipe = RECIPES[task]
    counts = ("--prompts", str(recipe.prompts), "--heldout", str(HELDOUT))
    umbra(
        *("make-task", task, "--out", str(folder), "--seed", str(seed)),
        *(*counts, "--demos", str(recipe.demos)),
    )
    umbra("make-model", str(folder / "random"), "--seed", str(seed))
    umbra(
        *("sft", str(folder / "random"), "--data", str(folder / "demos.jsonl")),
        *("--out", str(folder / "base"), "--steps", str(recipe.sft_steps)),
        *("--schedule", recipe.sft_schedule, "--seed", str(seed)),
        *("--threads", "1", "--device", "cpu"),
    )
    return folder


def read_prompts(base: Path) -> list[dict[str, Any]]:
    """Return the rows of a folder that `base_model` made, with prompts as lists of messages."""
    rows = [json.loads(line) for line in (base / "prompts.jsonl").read_text().splitlines()]
    return [{**row, "prompt": prompt_messages(row)} for row in rows]


def reward_of(task: str, config: RunConfig) -> Callable[[str, str], float]:
    """Return the task's reward of a text, given the row's answer."""
    if config.environment.kind != "reward":
        return lambda text, answer: float(text.strip() == answer)  # as environment "exact" has it
    score = runpy.run_path(str(run_file(task).with_name("reward.py")))["score"]
    return lambda text, answer: score(None, text, {"answer": answer})


def run(config: RunConfig, search: Sequence[Path] = ()) -> tuple[Any, RunFolder]:
    """Run `config`, with modules from `search`; return the summary and the run's folder.

    Raises:
        RuntimeError: the run failed.
    """
    folder = RunFolder.create(config.run.dir, config.run.name)
    with SignalCounter() as interrupts:
        up = Up(config, folder, view=View(quiet=True), interrupts=interrupts, search=search)
        summary = up.run()
    if interrupts.count:
        raise KeyboardInterrupt
    if summary["exit_code"]:
        raise RuntimeError(f"{folder.path}: {summary['exit_reason']}")
    return summary, folder


@dataclass(frozen=True, slots=True)
class Steady:
    """Figures between the commits of two steps.

    Idle shares are 1 - the share of the time in which a service worked: a generator while it
    decodes anything (mean over generators), the trainer while it updates.
    """

    steps: int
    seconds: float
    samples: int
    tokens: float  # of responses
    staleness: float
    staleness_max: float
    generator_idle: float
    trainer_idle: float


def steady(folder: RunFolder, *, first: int, last: int, generators: int) -> Steady:
    """Measure the run in `folder` from the end of step `first` to that of step `last`."""
    rows = list(read_rows(folder.metrics))
    steps = {row["step"]: row for row in rows if row["kind"] == "step"}
    window = (steps[first]["time"], steps[last]["time"])
    inside = [steps[number] for number in range(first + 1, last + 1)]
    spans = [row for row in rows if row["kind"] == "span"]
    decodes = [row for row in spans if row["name"] == "decode"]
    seconds = window[1] - window[0]
    busy = [
        _busy((one for one in decodes if one["service"] == name), window)
        for name in {row["service"] for row in decodes}
    ]
    trained = _busy((row for row in spans if row["name"] == "train_step"), window)
    return Steady(
        steps=last - first,
        seconds=seconds,
        samples=int(sum(row["samples"] for row in inside)),
        tokens=sum(row["samples"] * row["response_length/mean"] for row in inside),
        staleness=mean(row["staleness/total/mean"] for row in inside),
        staleness_max=max(row["staleness/total/max"] for row in inside),
        generator_idle=1 - sum(busy) / generators / seconds,
        trainer_idle=1 - trained / seconds,
    )


def _busy(spans: Iterable[Mapping[str, Any]], window: tuple[float, float]) -> float:
    """Return the seconds of `window` in which one of `spans` was under way."""
    busy, until = 0.0, window[0]
    for start, end in sorted((row["start"], row["end"]) for row in spans):
        begin, end = max(start, until), min(end, window[1])
        busy += max(0.0, end - begin)
        until = max(until, end)
    return busy


def curve(folder: RunFolder) -> tuple[list[float], list[float]]:
    """Return each step's mean reward, and its seconds from the first decoding to its commit."""
    rows = list(read_rows(folder.metrics))
    began = min(r["start"] for r in rows if r["kind"] == "span" and r["name"] == "decode")
    steps = sorted((row for row in rows if row["kind"] == "step"), key=lambda row: row["step"])
    return [row["reward/mean"] for row in steps], [row["time"] - began for row in steps]
