"""Throughput and staleness for 8 to 2,048 generators, synchronous and asynchronous (simulated).

    python benchmarks/scale.py [--json FILE] [--quick]

The broker is the production class in simulated time (`simulator/`); generators, trainer and weight
pushes are models whose times stand below, chosen for a reasoning model of about 7 B parameters. A
batch grows with the cluster: 8 samples per generator in groups of 8. Nothing here is measured.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec
from report import Report
from simulator.broker import BrokerSpeed, Client, SimulatedBroker, Timeline
from simulator.generator import Engine, SimGenerator, chance

from umbra.proto.messages import (
    BatchLease,
    CommitAck,
    CommitBatch,
    FinishRun,
    LeaseBatch,
    RunFinished,
)
from umbra.proto.records import VersionSpan
from umbra.services.config.loader import load_config

GROUP = 8
PER_GENERATOR = 8  # samples of a batch
GENERATORS = (8, 32, 128, 512, 2048)
LARGEST_SYNCHRONOUS = 512  # beyond it the simulation only takes longer
FEW = 64  # generators that ask for work once a second; more ask less often
ENGINE = Engine(
    slots=16, step_s=0.012, token_s=1e-4, prompt_token_s=3.5e-5, pause_s=0.3,
    prompt_tokens=300, median=2000, sigma=1.0, most=16384,
)  # fmt: skip
TRAIN_S, TOKENS_PER_S = 1.0, 5000.0  # of a step, and of each GPU
SNAPSHOT_S, SWITCH_S = 0.2, 4.0  # of new weights; of changing roles on the same GPUs
PUSH_S, SPREAD_S = 2.5, 0.2  # until generators serve a version, and up to so much later


@dataclass(frozen=True)
class Mode:
    """A way to use `generators` GPUs that generate and a fourth as many that train."""

    name: str
    run_ahead: int
    max_staleness: int
    colocated: bool = False  # all GPUs generate, then all train


MODES = (
    Mode("synchronous, all take turns", 0, 0, colocated=True),
    Mode("synchronous, fixed split", 0, 0),
    Mode("one step off", 1, 1),
    Mode("asynchronous", 2, 4),
)


class _Head(msgspec.Struct):
    """Fields of a trajectory that the trainer reads."""

    reward_parts: dict[str, float]
    spans: list[VersionSpan]


class SimTrainer:
    """Trains `steps` steps, each for a time that depends on its tokens, then ends the run."""

    def __init__(self, run: Simulation, gpus: int, steps: int) -> None:
        self.version = 0
        self.finished: RunFinished | None = None
        self.trained_s = 0.0  # within the window
        self.ages: list[list[int]] = []  # of the samples of each step
        self._run = run
        self._client = Client(run.broker, run.timeline, "trainer", "trainer")
        self._gpus = gpus
        self._last = steps

    def start(self) -> None:
        """Join, publish version 0 and train."""
        self._client.join(self._publish)

    def _publish(self) -> None:
        def write() -> None:
            self._run.published(self.version)
            if self.version < self._last:
                self._lease()
            else:
                self._client.ask(FinishRun(reason="done"), RunFinished, self._end)

        self._run.timeline.after(SNAPSHOT_S, write)

    def _end(self, reply: RunFinished) -> None:
        self.finished = reply

    def _lease(self) -> None:
        body = LeaseBatch(step=self.version + 1, wait_s=1.0)
        self._client.ask(body, BatchLease, self._leased)

    def _leased(self, lease: BatchLease) -> None:
        if not lease.trajectories:
            self._lease()
            return
        heads = [msgspec.msgpack.decode(one, type=_Head) for one in lease.trajectories]  # type: ignore[arg-type]
        tokens = sum(sum(head.reward_parts.values()) for head in heads)
        ages = [self.version - min(span.version for span in head.spans) for head in heads]
        seconds = TRAIN_S + tokens / (TOKENS_PER_S * self._gpus) + 2 * self._run.switch_s

        def commit() -> None:
            def committed(ack: CommitAck) -> None:
                self.version = ack.version
                self.ages.append(ages)
                self._run.stepped(self.version)
                self._publish()

            self._client.ask(CommitBatch(step=self.version + 1), CommitAck, committed)

        self.trained_s += seconds
        self._run.timeline.after(seconds, commit)


class Simulation:
    """A run of `steps` steps in one mode with so many generators and a fourth as many trainers."""

    def __init__(self, mode: Mode, generators: int, steps: int) -> None:
        trainers = max(1, generators // 4)
        batch = generators * PER_GENERATOR
        engine, count = ENGINE, generators
        if mode.run_ahead == 0:
            # The first that ask would take all of a batch: slots for an even share.
            count = generators + trainers if mode.colocated else generators
            engine = replace(ENGINE, slots=-(-batch // count))
        config = load_config(
            overrides=[
                f"run.steps={steps}",
                f"buffer.group_size={GROUP}",
                f"buffer.batch_groups={batch // GROUP}",
                f"buffer.run_ahead={mode.run_ahead}",
                f"buffer.max_staleness={mode.max_staleness}",
                "buffer.lease_s=1000000",
                "buffer.dead_after_s=120",
            ],
            environ={},
        )
        self.timeline = Timeline()
        self.broker = SimulatedBroker(self.timeline, config, BrokerSpeed())
        self.switch_s = SWITCH_S if mode.colocated else 0.0
        self.trainer = SimTrainer(self, count if mode.colocated else trainers, steps)
        wait_s = max(1.0, count / FEW)
        self.generators = [
            SimGenerator(self.timeline, f"generator-{n}", self.broker, engine, wait_s)
            for n in range(count)
        ]
        self._slots = count * engine.slots
        # Before these steps the pipeline fills; after them less is generated, since the run ends.
        self._first, self._last = min(mode.run_ahead + 1, steps - 1), steps - mode.run_ahead
        self._begin = (0.0, 0.0)  # time and slot seconds where the window begins
        self._figures: dict[str, float] = {}

    def published(self, version: int) -> None:
        """Let each generator serve `version` a push later."""
        for number, generator in enumerate(self.generators):
            late = SPREAD_S * chance(f"{number} has version {version}")
            self.timeline.after(PUSH_S + late, lambda g=generator, v=version: g.load(v))

    def stepped(self, version: int) -> None:
        """Begin or end the window over which figures are taken."""
        if version == self._first:
            self._begin = self._counts()
            self.broker.restart_counts()
            self.trainer.trained_s = 0.0
        if version == self._last:
            self._figures = self._close()

    def run(self) -> dict[str, Any]:
        """Simulate the run and return its figures."""
        self.trainer.start()
        for generator in self.generators:
            generator.start()
        self.timeline.run(until=lambda: self.trainer.finished is not None)
        assert self.trainer.finished is not None
        ledger = self.trainer.finished.ledger
        ended = sum(ledger.ended.values())
        return {
            **self._figures,
            "issued": ledger.issued,
            "trained": ledger.trained,
            "ended": ended,
            "balance": ledger.issued - ledger.trained - ended,
        }

    def _counts(self) -> tuple[float, float]:
        return self.timeline.now, sum(one.decoder.slot_seconds for one in self.generators)

    def _close(self) -> dict[str, float]:
        seconds, slot_s = (b - a for a, b in zip(self._begin, self._counts(), strict=True))
        broker = self.broker
        steps = self.trainer.ages[self._first : self._last]
        ages = [age for step in steps for age in step]
        return {
            "samples_per_s": len(ages) / seconds,
            "step_s": seconds / len(steps),
            "slots": slot_s / seconds / self._slots,
            "trains": self.trainer.trained_s / seconds,
            "staleness": mean(ages),
            "staleness_max": max(ages),
            "broker_busy": broker.busy_s / seconds,
            "broker_per_s": broker.requests / seconds,
            "broker_wait_ms": 1e3 * broker.waited_s / max(1, broker.requests),
        }


def steps_for(mode: Mode, generators: int) -> int:
    """More steps where chance is larger."""
    return mode.run_ahead * 2 + (12 if generators <= 32 else 6 if generators <= 512 else 4)


# -- figures ---------------------------------------------------------------------------------------


def summarise(report: Report) -> None:
    """State samples/s by generators and mode, and more of the asynchronous mode."""
    rates = {(row["mode"], row["generators"]): row["samples_per_s"] for row in report.rows}
    ours, turns = MODES[-1].name, MODES[0].name
    lines: list[list[Any]] = []
    for row in report.rows:
        if row["mode"] == ours:
            count = row["generators"]
            lines.append(
                [
                    count,
                    *(rates.get((mode.name, count)) for mode in MODES),
                    f"{row['slots']:.0%}",
                    f"{row['trains']:.0%}",
                    f"{row['staleness']:.2f} ({row['staleness_max']:.0f})",
                    f"{row['broker_busy']:.1%}",
                    f"{row['broker_wait_ms']:.1f}",
                ]
            )
    columns = ["generators", *(mode.name for mode in MODES), "slots in use", "trainer trains"]
    columns += ["staleness mean (max)", "broker busy", "a request waits ms"]
    report.table("generators", columns, lines)
    over = [
        rate / rates[turns, count]
        for (mode, count), rate in rates.items()
        if mode == ours and (turns, count) in rates
    ]
    report.figure("over_turns_least", min(over))
    report.figure("over_turns_most", max(over))
    each = [rate / count for (mode, count), rate in rates.items() if mode == ours]
    report.figure("per_generator_least", min(each))
    report.figure("per_generator_most", max(each))
    report.goal("asynchronous over taking turns, the least", min(over), ">=", 2.0)
    report.goal("unbalanced samples", max(abs(row["balance"]) for row in report.rows), "<=", 0)


def main() -> int:
    """Simulate all, print and write; 0 if every goal is met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="at most 32 generators")
    args = parser.parse_args()
    report = Report("scale (simulated)", timed=False)
    for count in GENERATORS[:2] if args.quick else GENERATORS:
        for mode in MODES:
            if mode.run_ahead == 0 and count > LARGEST_SYNCHRONOUS:
                continue
            row = Simulation(mode, count, steps_for(mode, count)).run()
            report.add(generators=count, mode=mode.name, **row)
            print(f"{count}, {mode.name}: {row['samples_per_s']:.3g} samples/s", flush=True)
    report.restate(summarise)
    return 0 if report.show(args.json) else 1


if __name__ == "__main__":
    sys.exit(main())
