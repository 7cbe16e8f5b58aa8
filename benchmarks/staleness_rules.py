"""What helps against staleness: rules for rate, momentum, trust region and weights, side by side.

    python benchmarks/staleness_rules.py --json FILE --jobs 2
    python benchmarks/staleness_rules.py --json FILE --rules ppo tis_opsm --seeds 0 --tasks sort

One process per cell: production engine, environment, objective and optimizer, but no services, so
that staleness is exact: the batch of step t is sampled from the weights after step t - k (from the
first weights while t < k). The first k batches teach no more than one, so each run goes on for k
more steps: equal samples is the accuracy before them, equal updates on new samples that after them.
Short runs have a constant rate, so that every step counts; those of `WHOLE` are made again with the
demo's own steps, peak rate and decay. FILE is written after each cell and continued.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec
import torch
from report import Report, spread
from staleness import SAMPLES, base_model, tenths
from staleness_cells import MINIBATCH_RATE, PLANS, SAME

from umbra.deploy.demo import DEMOS
from umbra.proto.records import SampleTask, Trajectory
from umbra.services.config import RunConfig
from umbra.services.config.loader import load_config
from umbra.services.config.trajectory_rules import sampling_of
from umbra.services.generator.engines.torch_engine import TorchEngine
from umbra.services.generator.pools import open_environments
from umbra.services.generator.rollout import RolloutSettings
from umbra.services.generator.runner import RolloutRunner
from umbra.services.modeling.chat import Chat
from umbra.services.modeling.models import load_tokenizer, stop_ids
from umbra.services.trainer.batch import make_batch
from umbra.services.trainer.learner import Learner
from umbra.services.trainer.objectives.objective import (
    Constants,
    Objective,
    TokenInputs,
    TokenLosses,
)
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
    objective: type[Objective] = Objective


class Topr(Objective):
    """Tapered off-policy REINFORCE (arXiv 2503.14286).

    A log pi where A > 0, and where A < 0 the same times min(1, pi / mu) of the sequence.
    """

    def __call__(self, tokens: TokenInputs, constants: Constants) -> TokenLosses:
        """The losses of `tokens`."""
        found = super().__call__(tokens, constants)
        drift = (tokens.logprobs - tokens.behaviour).detach()
        weight = tokens.sequences.sum(drift).exp().clamp(max=1.0)
        weight = torch.where(tokens.advantages > 0, 1.0, weight)
        return dataclasses.replace(found, losses=-weight * tokens.advantages * tokens.logprobs)


OPSM = ("objective=tis_opsm",)
RULES: dict[str, Rule] = {
    "naive": Rule(("objective=naive",)),
    "ppo": Rule(("objective=ppo",)),
    "tis_opsm": Rule(OPSM),
    # Rates by staleness (staleness-aware SGD, arXiv 1511.05950), and by what the batch is worth.
    "rate / sqrt(1 + k)": Rule(OPSM, lambda k, _ess: (1 + k) ** -0.5),
    "rate / (1 + k)": Rule(OPSM, lambda k, _ess: 1 / (1 + k)),
    "rate * ess": Rule(OPSM, lambda _k, ess: ess),
    "rate * sqrt(ess)": Rule(OPSM, lambda _k, ess: ess**0.5),
    "rate * 1.5": Rule(OPSM, lambda _k, _ess: 1.5),
    "rate * 1.5 ess": Rule(OPSM, lambda _k, ess: 1.5 * ess),
    # Delay acts like momentum (arXiv 1605.09774), so Adam's own may be too much.
    "beta2 0.999": Rule((*OPSM, "betas=[0.9, 0.999]")),
    "beta1 0.5": Rule((*OPSM, "betas=[0.5, 0.95]")),
    "beta1 0": Rule((*OPSM, "betas=[0.0, 0.95]")),
    "beta1 0.5, beta2 0.999": Rule((*OPSM, "betas=[0.5, 0.999]")),
    "beta1 0, beta2 0.999": Rule((*OPSM, "betas=[0.0, 0.999]")),
    # The trust region: narrower and wider masks, and truncation.
    "opsm 0.05": Rule((*OPSM, "mask_threshold=0.05")),
    "opsm 0.5": Rule((*OPSM, "mask_threshold=0.5")),
    "tis at 1": Rule((*OPSM, "is_cap=1.0")),
    "tis at 5": Rule((*OPSM, "is_cap=5.0")),
    "sequence tis": Rule((*OPSM, "is_level=sequence")),
    "gradient clipped at 0.2": Rule((*OPSM, "max_grad_norm=0.2")),
    "ppo, high clip 0.5": Rule(("objective=ppo", "clip_high=0.5")),
    "ppo + opsm": Rule(("objective=ppo", "mask=opsm")),
    "kl to behaviour": Rule((*OPSM, "kl_to=behaviour", "kl_estimator=k3", "kl_coef=0.05")),
    "prime_rl": Rule(("objective=prime_rl",)),
    "cispo": Rule(("objective=cispo",)),
    "icepop": Rule(("objective=icepop",)),
    "m2po": Rule(("objective=m2po",)),
    "gspo": Rule(("objective=gspo",)),
    "gspo, clip 0.2": Rule(("objective=gspo", "clip_low=0.2", "clip_high=0.2")),
    "sapo": Rule(("objective=sapo",)),
    "topr": Rule(("objective=ppo",), objective=Topr),
    "ess, beta1 0.5": Rule((*OPSM, "betas=[0.5, 0.95]"), lambda _k, ess: ess),
    "1.5 ess, beta1 0.5, beta2 0.999": Rule(
        (*OPSM, "betas=[0.5, 0.999]"), lambda _k, ess: 1.5 * ess
    ),
    "1.5 ess, kl to behaviour": Rule(
        (*OPSM, "kl_to=behaviour", "kl_estimator=k3", "kl_coef=0.05"), lambda _k, ess: 1.5 * ess
    ),
    "ess, tis at 1": Rule((*OPSM, "is_cap=1.0"), lambda _k, ess: ess),
}

WHOLE = ("ppo", "tis_opsm", "rate * 1.5 ess")  # tried in runs as long as the demo's


@dataclass(frozen=True)
class Cell:
    """One run."""

    task: str
    rule: str
    staleness: int
    minibatches: int
    seed: int
    whole: bool

    @property
    def panel(self) -> str:
        """What it is compared in."""
        return f"{self.task}, {self.minibatches} update{'s' * (self.minibatches > 1)} a batch"

    @property
    def key(self) -> str:
        """Names the cell in the file."""
        length = ", whole run" if self.whole else ""
        return f"{self.panel}{length}, {self.rule}, k={self.staleness}, seed {self.seed}"


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
        self._pool = open_environments(config, config.environment, chat)
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
    common = [*SAME, f"minibatches={cell.minibatches}", "threads=1"]
    if not cell.whole:
        common += [f"learning_rate={rate:g}", f"max_grad_norm={plan.max_grad_norm:g}"]
        common += ["schedule=constant"]
    keys = [one for one in common if one.partition("=")[0] not in given]
    return load_config(
        DEMOS / f"{cell.task}.toml",
        overrides=[
            *(f"trainer.{key}" for key in (*rule.keys, *keys)),
            *([] if cell.whole else [f"run.steps={plan.steps}"]),
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
    rule = RULES.get(cell.rule, RULES["naive"])
    update = PolicyUpdate(config, learner)
    update._objective = rule.objective(config.trainer.pieces)
    player = Player(folder / "base", copy.deepcopy(model).eval(), config, _rows(folder, "prompts"))
    held_out = Player(
        folder / "base", copy.deepcopy(model).eval(), config, _rows(folder, "heldout")
    )
    versions = deque([_weights(model)], cell.staleness + 1)
    groups, size = config.buffer.batch_groups, config.buffer.group_size
    ess, rewards, essays = 1.0, [], []
    accuracy = later = 0.0
    try:
        for step in range(config.run.steps + cell.staleness):
            version = max(0, step - cell.staleness)
            made = player.play(
                versions[0], version, range(step * groups, (step + 1) * groups), size
            )
            rewards.append(mean(one.reward for one in made))
            batch = make_batch(made, model.config.vocab_size)
            learner._config = msgspec.structs.replace(
                config.trainer,
                learning_rate=config.trainer.learning_rate * rule.pace(step - version, ess),
            )
            row = update(batch, step, lambda: True)
            assert row is not None
            if (measured := row.get("ess")) is not None:
                ess = float(measured)
                essays.append(ess)
            versions.append(_weights(model))
            if step + 1 == config.run.steps:
                accuracy = _accuracy(held_out, versions[-1])
        later = _accuracy(held_out, versions[-1]) if cell.staleness else accuracy
    finally:
        player.close()
        held_out.close()
    found: Row = {
        "cell": cell.key,
        "whole": cell.whole,
        "panel": cell.panel,
        "rule": cell.rule,
        "staleness": cell.staleness,
        "seed": cell.seed,
        "accuracy": accuracy,
        "later": later,
        "ess": mean(essays[-15:]) if essays else None,
        "curve": " ".join(f"{mean(one):.2f}" for one in tenths(rewards)),
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
    for seed, length in product(args.seeds, args.lengths):
        whole = length == "whole"
        rules = [rule for rule in args.rules if rule in WHOLE or not whole]
        for rule in (ON_POLICY, *rules):
            for task, updates in product(args.tasks, [1] if whole else args.minibatches):
                level = 0 if rule == ON_POLICY else args.staleness
                yield Cell(task, rule, level, updates, seed, whole)


def summarise(report: Report) -> None:
    """Tables of accuracies, and what each rule loses against on-policy runs."""
    for name in ("short", "whole"):
        rows = [row for row in report.rows if row["whole"] == (name == "whole")]
        if rows:
            _compare(report, name, rows)


def _compare(report: Report, name: str, rows: list[Row]) -> None:
    panels = sorted({row["panel"] for row in rows}, reverse=True)
    base = {_place(row): row["accuracy"] for row in rows if row["rule"] == ON_POLICY}
    lines: list[tuple[float, list[str]]] = []
    for rule in dict.fromkeys(row["rule"] for row in rows):
        mine = [row for row in rows if row["rule"] == rule and _place(row) in base]
        told: list[str] = []
        for column, equal in (("accuracy", "samples"), ("later", "updates")):
            lost = {
                panel: [100 * (base[_place(r)] - r[column]) for r in mine if r["panel"] == panel]
                for panel in panels
            }
            losses = [mean(values) for values in lost.values() if values]
            told += [f"{mean(losses):.1f}", f"{max(losses):.1f}"]
            report.figure(f"{name}_{equal}_loss_{rule}", mean(losses))
            report.figure(f"{name}_{equal}_most_{rule}", max(losses))
        seeds = str(len({row["seed"] for row in mine}))
        cells = [
            spread([row["accuracy"] for row in mine if row["panel"] == panel], ".3f")
            for panel in panels
        ]
        lines.append((float(told[2]), [rule, seeds, *cells, *told]))
    losses = ["loss, equal samples: mean", "most", "equal updates: mean", "most"]
    report.table(
        name,
        ["rule", "seeds", *panels, *losses],
        [line for _, line in sorted(lines, key=lambda one: one[0])],
    )


def _place(row: Row) -> tuple[str, int]:
    return row["panel"], row["seed"]


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
    lengths = ["short", "whole"]
    parser.add_argument("--lengths", nargs="+", default=lengths, choices=lengths)
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
