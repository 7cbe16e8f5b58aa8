"""Where the metrics of the steps go besides metrics.jsonl: TensorBoard, Weights & Biases."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from accelerate.tracking import TensorBoardTracker, WandBTracker

from umbra.proto.errors import UsageError
from umbra.proto.records import EvalReport
from umbra.services.config import RunConfig
from umbra.services.config.loader import as_dict
from umbra.services.trainer.metrics import Row

log = logging.getLogger(__name__)


class Sinks:
    """Several sinks, each with `log` and `log_eval`.

    One whose disk is full (OSError) is named once and left out: training does not depend on it.

    Args:
        begun: step that training begins after; earlier evaluations are in the sinks already.
    """

    def __init__(self, sinks: Sequence[Any], begun: int = 0) -> None:
        self._sinks = list(sinks)
        self._begun = begun
        self._evals: list[EvalReport] = []  # those that were written

    def write(self, step: int, row: Row) -> None:
        values = {name: value for name, value in row.items() if value is not None}
        self._each("log", values, step)

    def write_evals(self, reports: Sequence[EvalReport]) -> None:
        """Hand on those of the evaluations that are new."""
        for report in reports:
            if report not in self._evals and report.version >= self._begun:
                self._evals.append(report)
                scores = {"accuracy": report.accuracy, **report.scores}
                values = {f"eval/{name}": value for name, value in scores.items()}
                self._each("log_eval", values, report.version)

    def _each(self, method: str, values: dict[str, float], step: int) -> None:
        for sink in list(self._sinks):
            try:
                getattr(sink, method)(values, step)
            except OSError as error:
                log.warning("no more metrics to %s: %s", type(sink).__name__, error)
                self._sinks.remove(sink)


class TensorBoard(TensorBoardTracker):
    """Event files that TensorBoard reads: a curve for each name, whose first part is the group."""

    main_process_only = False  # rank 0 alone makes one

    def log(self, values: dict[str, float], step: int | None = None, **kwargs: Any) -> None:
        """One point on each curve; TensorBoard takes no @ in a name."""
        named = {name.replace("@", "_at_"): value for name, value in values.items()}
        super().log(named, step, **kwargs)

    log_eval = log  # a curve may go back


class WeightsAndBiases(WandBTracker):
    """A run at Weights & Biases, under the id of the run; one that goes on is the same one."""

    def log_eval(self, values: dict[str, float], version: int) -> None:
        """Log them with the newest step, drawn over their own version: no step may be earlier."""
        self.log({**values, "eval/version": version}, commit=False)


@contextmanager
def open_sinks(config: RunConfig, run_dir: Path, step: int) -> Iterator[Sinks]:
    """Open the sinks that the configuration asks for, for steps after `step`.

    Raises:
        UsageError: a package is missing, or does not let us in; says which.
    """
    with ExitStack() as stack:
        sinks: list[TensorBoard | WeightsAndBiases] = []
        sink: TensorBoard | WeightsAndBiases
        for name in dict.fromkeys(config.metrics.also):
            try:
                if name == "tensorboard":
                    # What is there of steps after `step` was lost with a trainer, and is hidden.
                    sink = TensorBoard(name, run_dir, purge_step=step + 1 if step else None)
                    sink.start()
                else:
                    sink = _open_wandb(config, run_dir)
            except ImportError:
                raise UsageError(
                    f"metrics.also = {name} needs {name}: pip install 'umbra-rl[{name}]'"
                ) from None
            sinks.append(sink)
            stack.callback(sink.finish)
        yield Sinks(sinks, step)


def _open_wandb(config: RunConfig, run_dir: Path) -> WeightsAndBiases:
    import wandb

    mode = os.environ.get("WANDB_MODE", "online")
    sink = WeightsAndBiases(
        os.environ.get("WANDB_PROJECT", "umbra"),
        id=run_dir.name,
        name=run_dir.name,
        dir=str(run_dir),
        mode=mode,
        resume="allow" if mode == "online" else None,
        config=as_dict(config),
    )
    try:
        sink.start()
        sink.tracker.define_metric("eval/*", step_metric="eval/version")
    except wandb.Error as error:
        raise UsageError(
            f"metrics.also = wandb: {error}; log in with `wandb login`, or set WANDB_MODE=offline"
        ) from error
    return sink
