"""What helps against staleness: rules for rate, momentum, trust region and weights, side by side.

    python benchmarks/staleness_rules.py --json FILE --jobs 2
    python benchmarks/staleness_rules.py --json FILE --rules ppo momentum_0 --seeds 0 --tasks sort

One process per cell: production engine, environment, objective and optimizer, but no services, so
that staleness is exact: the batch of step t is sampled from the weights after step t - k (from the
first weights while t < k). `delay` is the on-policy run without its last k steps: what is lost
because the first k batches teach nothing new. FILE is written after each cell and continued.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec
import torch
from report import Report, spread
from staleness import SAMPLES, base_model
from staleness_cells import MINIBATCH_RATE, PLANS, SAME

from umbra.deploy.demo import DEMOS
from umbra.proto.records import SampleTask, Trajectory
from umbra.services.generator.pools import open_environments
from umbra.services.generator.rollout import RolloutSettings
from umbra.services.generator.runner import RolloutRunner
from umbra.services.generator.torch_engine import TorchEngine
from umbra.services.modeling.chat import Chat
from umbra.services.modeling.models import load_tokenizer, stop_ids
from umbra.services.runtime.config import RunConfig
from umbra.services.runtime.config.loader import load_config
from umbra.services.runtime.trajectories import sampling_of
from umbra.services.trainer.batch import make_batch
from umbra.services.trainer.learner import Learner
from umbra.services.trainer.policy import load_policy
from umbra.services.trainer.update import PolicyUpdate

ON_POLICY = "on-policy"
LEVEL = 8
POINTS = 2.0  # that staleness may cost
Pace = Callable[[int, float], float]  # of the learning rate: staleness, effective sample size
Row = dict[str, Any]


@dataclass(frozen=True)
class Rule:
    """Settings of the trainer that differ, and what the learning rate is multiplied by."""

    keys: tuple[str, ...] = ()
    pace: Pace = lambda _staleness, _ess: 1.0


OPSM = ("objective=tis_opsm",)
RULES: dict[str, Rule] = {
    "naive": Rule(("objective=naive",)),
    "ppo": Rule(("objective=ppo",)),
    "tis_opsm": Rule(OPSM),
    # Rates by staleness (staleness-aware SGD, arXiv 1511.05950), and by what the batch is worth.
    "rate / sqrt(1 + k)": Rule(OPSM, lambda k, _ess: (1 + k) ** -0.5),
    "rate / (1 + k)": Rule(OPSM, lambda k, _ess: 1 / (1 + k)),
    "rate * ess": Rule(OPSM, lambda _k, ess: ess),
    "rate * 1.5": Rule(OPSM, lambda _k, _ess: 1.5),
    # Delay acts like momentum (arXiv 1605.09774), so Adam's own may be too much.
    "beta1 0.5": Rule((*OPSM, "betas=[0.5, 0.999]")),
    "beta1 0": Rule((*OPSM, "betas=[0.0, 0.999]")),
    "beta2 0.95": Rule((*OPSM, "betas=[0.9, 0.95]")),
    "beta1 0, beta2 0.95": Rule((*OPSM, "betas=[0.0, 0.95]")),
    # The trust region: narrower and wider masks, and truncation.
    "opsm 0.05": Rule((*OPSM, "mask_threshold=0.05")),
    "opsm 0.5": Rule((*OPSM, "mask_threshold=0.5")),
    "tis at 1": Rule((*OPSM, "is_cap=1.0")),
    "tis at 5": Rule((*OPSM, "is_cap=5.0")),
    "sequence tis": Rule((*OPSM, "is_level=sequence")),
    "gradient clipped at 0.2": Rule((*OPSM, "max_grad_norm=0.2")),
    "ppo, high clip 0.5": Rule(("objective=ppo", "clip_high=0.5")),
    "ppo + opsm": Rule(("objective=ppo", "mask=opsm")),
    "ppo, beta1 0": Rule(("objective=ppo", "betas=[0.0, 0.999]")),
    "kl to behaviour": Rule((*OPSM, "kl_to=behaviour", "kl_estimator=k3", "kl_coef=0.05")),
    "prime_rl": Rule(("objective=prime_rl",)),
    "cispo": Rule(("objective=cispo",)),
    "icepop": Rule(("objective=icepop",)),
    "m2po": Rule(("objective=m2po",)),
    "gspo": Rule(("objective=gspo",)),
}


@dataclass(frozen=True)
class Cell:
    """One run."""

    task: str
    rule: str
    staleness: int
    minibatches: int
    seed: int

    @property
    def key(self) -> str:
        """Names the cell in the file."""
        return f"{self.task}, {self.rule}, k={self.staleness}, m={self.minibatches}, {self.seed}"


class Player:
    """Plays samples with weights that are given, by the production engine and environment."""

    def __init__(self, path: Path, model: Any, config: RunConfig, rows: Sequence[Row]) -> None:
        tokenizer = load_tokenizer(path, "MODEL")
        self._model, self._rows = model, rows
        stops = stop_ids(model, tokenizer)
        context = config.generator.max_context
        self.engine = TorchEngine(
            model,
            stop_ids=stops,
            slots=config.generator.slots,
            max_context=context,
            seed=config.run.seed,
            version=0,
        )
        chat = Chat.configured(config.model, tokenizer, stops)
        sampling = sampling_of(config.sampling)
        self._pool = open_environments(config, config.environment, chat, sampling)
        settings = RolloutSettings(chat, sampling, context)
        self._runner = RolloutRunner(self.engine, self._pool, settings)

    def play(
        self, weights: Mapping[str, torch.Tensor], version: int, groups: range, size: int
    ) -> list[Trajectory]:
        """`size` samples of each of these groups of prompts, in their order."""
        self._model.load_state_dict(weights)
        self.engine.version = version
        self._runner.add(
            SampleTask(
                sample_id=f"{group}/{n}",
                group_id=str(group),
                prompt_id=str(group % len(self._rows)),
                attempt=0,
                row=self._rows[group % len(self._rows)],
                lease_s=0.0,
            )
            for group in groups
            for n in range(size)
        )
        done: list[Trajectory] = []
        while self._runner.active:
            self._runner.poll(0.0)
            done += self._runner.results()[0]
        return sorted(done, key=lambda one: [int(part) for part in one.sample_id.split("/")])

    def close(self) -> None:
        """End its environments."""
        self._pool.close()


def settings(cell: Cell, folder: Path) -> RunConfig:
    """The configuration of a cell."""
    plan, rule = PLANS[cell.task], RULES.get(cell.rule, RULES["naive"])
    rate = plan.learning_rate * (MINIBATCH_RATE if cell.minibatches > 1 else 1.0)
    given = {one.partition("=")[0] for one in rule.keys}
    common = [
        *SAME,
        f"minibatches={cell.minibatches}",
        f"learning_rate={rate:g}",
        "schedule=constant",
        f"max_grad_norm={plan.max_grad_norm:g}",
        "threads=1",
    ]
    keys = [one for one in common if one.partition("=")[0] not in given]
    return load_config(
        DEMOS / f"{cell.task}.toml",
        overrides=[
            *(f"trainer.{key}" for key in (*rule.keys, *keys)),
            f"run.steps={plan.steps}",
            f"run.seed={cell.seed}",
            f"model.path={folder / 'base'}",
            f"data.prompts={folder / 'prompts.jsonl'}",
            f"eval.prompts={folder / 'heldout.jsonl'}",
            "generator.slots=256",
        ],
        environ={},
    )


def run_cell(cell: Cell, work: Path) -> Row:
    """The run; its row."""
    began = time.perf_counter()
    torch.set_num_threads(1)
    torch.manual_seed(cell.seed)
    folder = work / f"{cell.task}-s{cell.seed}"
    config = settings(cell, folder)
    model, _ = load_policy(folder / "base")
    learner = Learner(model, config.trainer, config.run.steps)
    update = PolicyUpdate(config, learner)
    player = Player(folder / "base", copy.deepcopy(model).eval(), config, _rows(folder, "prompts"))
    held_out = Player(
        folder / "base", copy.deepcopy(model).eval(), config, _rows(folder, "heldout")
    )
    pace = RULES.get(cell.rule, Rule()).pace
    versions = deque([_weights(model)], cell.staleness + 1)
    groups, size = config.buffer.batch_groups, config.buffer.group_size
    ess, rewards, essays = 1.0, [], []
    delayed = None
    try:
        for step in range(config.run.steps):
            version = max(0, step - cell.staleness)
            made = player.play(
                versions[0], version, range(step * groups, (step + 1) * groups), size
            )
            rewards.append(mean(one.reward for one in made))
            batch = make_batch(made, model.config.vocab_size)
            learner._config = msgspec.structs.replace(
                config.trainer,
                learning_rate=config.trainer.learning_rate * pace(step - version, ess),
            )
            row = update(batch, step, lambda: True)
            assert row is not None
            if (measured := row.get("ess")) is not None:
                ess = float(measured)
                essays.append(ess)
            versions.append(_weights(model))
            if cell.rule == ON_POLICY and step + 1 == config.run.steps - LEVEL:
                delayed = _accuracy(held_out, versions[-1])
        accuracy = _accuracy(held_out, versions[-1])
    finally:
        player.close()
        held_out.close()
    late = rewards[-10:]
    found: Row = {
        "cell": cell.key,
        "task": cell.task,
        "rule": cell.rule,
        "staleness": cell.staleness,
        "minibatches": cell.minibatches,
        "seed": cell.seed,
        "accuracy": accuracy,
        "delayed": delayed,
        "late_reward": mean(late),
        "ess": mean(essays[-15:]) if essays else None,
        "curve": " ".join(f"{mean(rewards[i : i + 6]):.2f}" for i in range(0, len(rewards), 6)),
        "seconds": time.perf_counter() - began,
    }
    return {name: round(v, 5) if isinstance(v, float) else v for name, v in found.items()}


def _weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def _rows(folder: Path, name: str) -> list[Row]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def _accuracy(player: Player, weights: Mapping[str, torch.Tensor]) -> float:
    made = player.play(weights, 0, range(SAMPLES), 1)
    return sum(one.reward for one in made) / SAMPLES


def cells(args: argparse.Namespace) -> Iterator[Cell]:
    """All combinations, seeds outermost."""
    for seed in args.seeds:
        for rule in (ON_POLICY, *args.rules):
            for task in args.tasks:
                for updates in args.minibatches:
                    level = 0 if rule == ON_POLICY else args.staleness
                    yield Cell(task, rule, level, updates, seed)


def summarise(report: Report) -> None:
    """A table of accuracies, and what each rule loses against on-policy runs."""
    panels = sorted({(row["task"], row["minibatches"]) for row in report.rows}, reverse=True)
    by = {(r["rule"], r["task"], r["minibatches"], r["seed"]): r for r in report.rows}
    base = {place[1:]: row for place, row in by.items() if place[0] == ON_POLICY}
    lines: list[tuple[float, list[str]]] = []
    for rule in dict.fromkeys(row["rule"] for row in report.rows):
        columns: list[str] = []
        losses: list[float] = []
        for panel in panels:
            mine = {p[1:]: r for p, r in by.items() if p[0] == rule and p[1:3] == panel}
            columns.append(spread([row["accuracy"] for row in mine.values()], ".3f"))
            own = [
                100 * (base[p]["accuracy"] - r["accuracy"]) for p, r in mine.items() if p in base
            ]
            losses += [mean(own)] if own else []
        if losses:
            told = [f"{mean(losses):.1f}", f"{max(losses):.1f}"]
            lines.append((mean(losses), [f"`{rule}`", *columns, *told]))
            report.figure(f"loss_{rule}", mean(losses))
            report.figure(f"most_{rule}", max(losses))
    names = [f"{task}, {updates} update{'s' * (updates > 1)} a batch" for task, updates in panels]
    report.table(
        "rules",
        ["rule", *names, "loss, points: mean", "most"],
        [line for _, line in sorted(lines, key=lambda one: one[0])],
    )
    delays = [
        100 * (r["accuracy"] - r["delayed"]) for r in base.values() if r["delayed"] is not None
    ]
    if delays:
        report.figure("delay_loss", mean(delays))


def _run(task: tuple[Cell, Path]) -> Row:
    return run_cell(*task)


def main() -> int:
    """Run what is missing, print tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="rows; continued if it exists")
    parser.add_argument("--work", type=Path, default=Path("runs/staleness"), help="the base models")
    parser.add_argument("--tasks", nargs="+", default=["sort", "guess"], choices=list(PLANS))
    parser.add_argument("--rules", nargs="+", default=list(RULES), choices=list(RULES))
    parser.add_argument("--staleness", type=int, default=LEVEL)
    parser.add_argument("--minibatches", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, a core each")
    args = parser.parse_args()
    report = Report.begin("staleness_rules", args.json)
    done = {row["cell"] for row in report.rows}
    missing = [cell for cell in cells(args) if cell.key not in done]
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    for task, seed in sorted({(cell.task, cell.seed) for cell in missing}):
        base_model(work, task, seed)
    with get_context("spawn").Pool(args.jobs) as pool:
        todo = [(cell, work) for cell in missing]
        for number, row in enumerate(pool.imap_unordered(_run, todo), 1):
            report.add(**row)
            report.restate(summarise)
            report.write(args.json)
            print(
                f"{number}/{len(missing)} {row['cell']}: accuracy {row['accuracy']:.3f}, "
                f"{row['seconds']:.0f} s",
                flush=True,
            )
    report.restate(summarise)
    report.show(args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
