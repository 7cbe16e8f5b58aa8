"""Runs of real processes whose engines and trainer take known times: what is compared, and how.

The machine that is modelled has ACCELERATORS accelerators. A generator on one decodes as the replay
engine does (SLOTS sequences at once, memory-bound: a step of all of them takes a third longer than
a step of one). Training divides perfectly over the accelerators that it has. Everything else is
real: buffer, hub, generators, trainer, their sockets, leases, pushes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import msgspec
from click.testing import CliRunner
from whole_runs import Cell, Steady, cpu_idle, run, steady

from umbra.deploy.run_folder import RunFolder, read_rows
from umbra.services.config.loader import load_config
from umbra.services.generator.replay_model import ReplayDecoder, ReplayModel
from umbra.services.generator.tasks import write_task
from umbra.services.trainer.make_model import command as make_model

FORM = "replay"
ACCELERATORS = 8
SLOTS = 16
BATCH_GROUPS, GROUP_SIZE = 16, 8
SAMPLES = BATCH_GROUPS * GROUP_SIZE  # of a batch

STEP_S, TOKEN_S, PROMPT_TOKEN_S = 6e-3, 1.25e-4, 2e-5  # of decoding
PAUSE_S = 0.02  # new weights stop an engine for so long
TRAIN_S, TRAIN_TOKEN_S = 0.4, 4.0e-4  # an update on one accelerator
REFERENCE = 1 / 3  # of an update's work: a forward pass of forward and backward
MEAN_TOKENS = 100.0
WARM = 4  # steps until things are steady


def long_tailed(share: float) -> float:
    """Quantile of the mix of `long_tail.py`: log-normal with sigma 1, cut at 10.7 medians."""
    share = min(max(share, 1e-6), 1 - 1e-6)
    return min(math.exp(NormalDist().inv_cdf(share)), 256 / 24)


def uniform(share: float) -> float:
    """Quantile of lengths between 0.8 and 1.2 of their mean."""
    return 0.8 + 0.4 * share


MIXES = {"long-tailed": long_tailed, "uniform": uniform}


@dataclass(frozen=True)
class Mode:
    """A way to use the accelerators: so many generate; a trainer on so many."""

    name: str
    generators: int
    training: int
    steps: int
    ahead: int  # buffer.run_ahead
    settings: tuple[str, ...] = ()
    model: str = "model"  # its folder: how many bytes a push has
    more_training: float = 1.0  # times what an update takes
    change_every: int = 0  # of so many weights one changes with each update; 0 = none
    generator: str = ""  # script here that serves instead of `umbra generator`
    reference: bool = False  # whether a scorer on one accelerator computes reference logprobs

    @property
    def train_step_s(self) -> float:
        """The part of an update's time that no token adds to."""
        return self.more_training * TRAIN_S / self.training

    @property
    def train_token_s(self) -> float:
        """What a token adds to it."""
        return self.more_training * TRAIN_TOKEN_S / self.training

    @property
    def scripts(self) -> dict[str, tuple[str, ...]]:
        """What is started instead of commands of umbra."""
        speed = (repr(self.train_step_s), repr(self.train_token_s), str(self.change_every))
        chosen: dict[str, tuple[str, ...]] = {"trainer": ("timed_trainer.py", *speed)}
        if self.generator:
            chosen["generator"] = (self.generator,)
        if self.reference:
            times = (TRAIN_S / SAMPLES * REFERENCE, TRAIN_TOKEN_S * REFERENCE)
            chosen["scorer"] = ("timed_scorer.py", *map(repr, times))
        return chosen


AHEAD = 4
STALE = "buffer.max_staleness=8"
MODES = (
    # Generation has all accelerators, then training has all: nothing is lost in between.
    Mode("sync, all take turns", ACCELERATORS, ACCELERATORS, 13, 0),
    Mode("sync, fixed split", 4, 4, 13, 0),
    Mode(
        "one step off",
        4,
        4,
        20,
        1,
        ("buffer.max_staleness=1", "buffer.stale_policy=wait"),
    ),
    Mode("async, no partials", 4, 4, 28, AHEAD, (STALE, "generator.kv_policy=drain")),
    Mode("async", 4, 4, 32, AHEAD, (STALE,)),
)
SYNCHRONOUS = MODES[0].name, MODES[1].name
ASYNCHRONOUS = MODES[-1].name


def replay_model(mix: str) -> ReplayModel:
    """Speed of an engine, and lengths of the mix with a mean of MEAN_TOKENS."""
    shares = [n / 400 for n in range(401)]
    quantiles = [MIXES[mix](share) for share in shares]
    scale = MEAN_TOKENS / _mean(quantiles)
    return ReplayModel(
        step_s=STEP_S,
        token_s=TOKEN_S,
        prompt_token_s=PROMPT_TOKEN_S,
        pause_s=PAUSE_S,
        lengths=[max(1.0, scale * value) for value in quantiles],
    )


def _mean(quantiles: Sequence[float]) -> float:
    return (sum(quantiles) - (quantiles[0] + quantiles[-1]) / 2) / (len(quantiles) - 1)


@dataclass(frozen=True, slots=True)
class Ideal:
    """Seconds per step of each resource if it were never idle and all slots were always taken."""

    generation_s: float
    training_s: float

    @property
    def step_s(self) -> float:
        """Seconds per step if nothing but the slower one is waited for."""
        return max(self.generation_s, self.training_s)


def ideal(mode: Mode, done: Steady) -> Ideal:
    """For the lengths that were really trained on.

    Generation: all tokens of a batch at the speed of full slots, plus reading its prompts, plus the
    pause for its new weights. Training: the time of its update.
    """
    tokens, prompts = done.tokens / done.steps, done.prompt_tokens / done.steps
    per_token = (STEP_S + TOKEN_S * SLOTS) / SLOTS
    work = tokens * per_token + prompts * PROMPT_TOKEN_S
    return Ideal(
        generation_s=work / mode.generators + PAUSE_S,
        training_s=mode.train_step_s + mode.train_token_s * (tokens + prompts),
    )


def turns_s(mode: Mode, mix: str, batches: int = 200) -> float:
    """Mean seconds per step of a synchronous `mode` that loses nothing but what it must.

    Its engines share a batch evenly and decode until the last of its samples has ended; then there
    is the pause for new weights, and the update. Drawn anew, from lengths of `mix`.
    """
    dice, model = random.Random(0), replay_model(mix)
    spent = 0.0
    for _ in range(batches):
        lengths = [model.length(dice.random()) for _ in range(SAMPLES)]
        ends = [_decoded_s(model, lengths[n :: mode.generators]) for n in range(mode.generators)]
        update = mode.train_step_s + mode.train_token_s * sum(lengths)
        spent += max(ends) + PAUSE_S + update
    return spent / batches


def _decoded_s(model: ReplayModel, lengths: Sequence[int]) -> float:
    decoder, at = ReplayDecoder(model, SLOTS), 0.0
    for number, length in enumerate(lengths):
        decoder.submit(str(number), 0, length, 0.0)
    while (following := decoder.next_at()) is not None:
        at = following
        decoder.advance(at)
    return at


def prepare(work: Path) -> None:
    """A model, prompts and replay models in `work`, unless they are there."""
    if not (work / "model" / "config.json").exists():
        CliRunner().invoke(make_model, [str(work / "model")], catch_exceptions=False)
        write_task("sort", work / "task", seed=0, prompts=4096, heldout=8, demos=8)
    for mix in MIXES:
        file, content = work / f"{mix}.json", msgspec.json.encode(replay_model(mix))
        if not file.exists() or file.read_bytes() != content:
            file.write_bytes(content)


def overrides(cell: Cell[Mode], work: Path) -> list[str]:
    """The configuration of a run."""
    return [
        f"run.dir={work / 'runs'}",
        "run.name=replay",
        f"run.steps={cell.mode.steps}",
        f"run.seed={cell.seed}",
        f"model.path={work / cell.mode.model}",
        f"data.prompts={work / 'task' / 'prompts.jsonl'}",
        "environment.kind=exact",
        "sampling.max_tokens=2000",
        f"buffer.batch_groups={BATCH_GROUPS}",
        f"buffer.group_size={GROUP_SIZE}",
        "generator.engine=replay",
        f"generator.replay={work / cell.mix}.json",
        f"generator.count={cell.mode.generators}",
        f"generator.slots={SLOTS}",
        "generator.prefetch=4",
        "generator.device=cpu",
        "generator.threads=1",
        "generator.max_context=2048",
        "trainer.device=cpu",
        "trainer.threads=1",
        f"buffer.run_ahead={cell.mode.ahead}",
        *cell.mode.settings,
    ]


def wire_mb(folder: RunFolder) -> float:
    """Mean megabytes of a push, as they travelled; the first, which is whole, is left out."""
    rows = [row for row in read_rows(folder.metrics) if row["kind"] == "push" and row["version"]]
    return sum(row["wire_bytes"] for row in rows) / max(len(rows), 1) / 1e6


def one_slot_wait_s(folder: RunFolder) -> float:
    """Mean seconds a step that the trainer would have waited if the arena had a single slot.

    Then a snapshot can only begin when the push of the version before it has ended everywhere.
    """
    rows = list(read_rows(folder.metrics))
    ends: dict[int, float] = {}
    for row in rows:
        if row["kind"] == "push":
            ends[row["version"]] = max(row["time"], ends.get(row["version"], 0.0))
    spans = (row for row in rows if row["kind"] == "span" and row["name"] == "snapshot")
    begun = sorted(row["start"] for row in spans)  # of versions 0, 1, 2, ...
    later = list(enumerate(begun[1:]))[WARM:]  # the first pushes wait for engines to be there
    waits = [max(0.0, ends.get(version, 0.0) - start) for version, start in later]
    return sum(waits) / max(len(waits), 1)


def run_cell(cell: Cell[Mode], work: Path) -> dict[str, Any]:
    """Do the run; its row."""
    work = work.resolve()
    prepare(work)
    mode = cell.mode
    summary, folder = run(load_config(None, overrides=overrides(cell, work)), mode.scripts)
    # At the end of a run fewer and fewer samples are needed, so those steps are left out.
    last = mode.steps - 1 - mode.ahead
    done = steady(folder, first=WARM, last=last, generators=mode.generators)
    best = ideal(mode, done)
    return {
        "cell": cell.key,
        "form": FORM,
        "mode": mode.name,
        "mix": cell.mix,
        "seed": cell.seed,
        "samples_per_s": done.samples / done.seconds,
        "tokens_per_s": done.tokens / done.seconds,
        "step_s": done.step_s,
        "ideal_step_s": best.step_s,
        "utilisation": best.step_s / done.step_s,
        "ideal_generation_s": best.generation_s,
        "ideal_training_s": best.training_s,
        "generator_idle": done.generator_idle,
        "trainer_idle": done.trainer_idle,
        "buffer_idle": cpu_idle(summary, "buffer"),
        "hub_idle": cpu_idle(summary, "weight-hub"),
        "staleness": done.staleness,
        "staleness_max": done.staleness_max,
        "decoded_per_trained": done.decoded / done.tokens,
        "dropped": sum(summary["ledger"]["ended"].values()),
        "push_seconds": summary["push_seconds"],
        "wire_mb": wire_mb(folder),
        "one_slot_wait_s": one_slot_wait_s(folder),
        "steady": asdict(done),
    }
