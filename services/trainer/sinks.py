"""Where the metrics of the steps go besides metrics.jsonl: TensorBoard, Weights & Biases."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

from umbra.proto.errors import UsageError
from umbra.proto.records import EvalReport
from umbra.services.runtime.config import RunConfig
from umbra.services.runtime.config.loader import as_dict
from umbra.services.trainer.metrics import Row

log = logging.getLogger(__name__)


class Sink(Protocol):
    """Takes the numbers of a step. Steps come in order."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Keep the values of `step`.

        Raises:
            OSError: they cannot be written.
        """
        ...

    def write_eval(self, version: int, values: Mapping[str, float]) -> None:
        """Keep what came of the evaluation of `version`, which may be earlier than the last step.

        Raises:
            OSError: they cannot be written.
        """
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


class Sinks:
    """Several of them. One that fails is told once and left out: training does not depend on it.

    Args:
        begun: step that training begins after; earlier evaluations are in the sinks already.
    """

    def __init__(self, sinks: Sequence[Sink], begun: int = 0) -> None:
        self._sinks = list(sinks)
        self._begun = begun
        self._evals: list[EvalReport] = []  # those that were written

    def write(self, step: int, row: Row) -> None:
        """Hand the numbers in `row` to all."""
        values = {name: value for name, value in row.items() if value is not None}
        self._each(lambda sink: sink.write(step, values))

    def write_evals(self, reports: Sequence[EvalReport]) -> None:
        """Hand on those of the evaluations that are new."""
        for report in reports:
            if report in self._evals or report.version < self._begun:
                continue
            self._evals.append(report)
            values = {"accuracy": report.accuracy, **report.scores}
            named = {f"eval/{name}": value for name, value in values.items()}
            self._write_eval(report.version, named)

    def _write_eval(self, version: int, values: Mapping[str, float]) -> None:
        self._each(lambda sink: sink.write_eval(version, values))

    def _each(self, write: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                write(sink)
            except OSError as error:
                log.warning("no more metrics to %s: %s", type(sink).__name__, error)
                self._sinks.remove(sink)


@contextmanager
def open_sinks(config: RunConfig, run_dir: Path, step: int) -> Iterator[Sinks]:
    """The sinks that the configuration asks for, for steps after `step`.

    Raises:
        UsageError: a package is missing, or does not let us in; says which.
    """
    with ExitStack() as stack:
        sinks: list[Sink] = []
        if config.metrics.tensorboard:
            sinks.append(TensorBoard(run_dir / "tensorboard", step))
            stack.callback(sinks[-1].close)
        if config.metrics.wandb != "off":
            sinks.append(WeightsAndBiases(config, run_dir))
            stack.callback(sinks[-1].close)
        yield Sinks(sinks, step)


class TensorBoard:
    """Event files that TensorBoard reads.

    Args:
        folder: that of the files.
        step: what is there of later ones was lost with a trainer, and is hidden.
    """

    def __init__(self, folder: Path, step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UsageError(
                "metrics.tensorboard needs tensorboard: pip install 'umbra-rl[tensorboard]'"
            ) from None
        self._writer = SummaryWriter(str(folder), purge_step=step + 1 if step else None)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One curve for each name (it may have no @ there); its first part is the group."""
        for name, value in values.items():
            self._writer.add_scalar(name.replace("@", "_at_"), value, step)
        self._writer.flush()

    def write_eval(self, version: int, values: Mapping[str, float]) -> None:
        """The same: a curve may go back."""
        self.write(version, values)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class WeightsAndBiases:
    """A run at Weights & Biases, under the id of the run; one that goes on is the same one."""

    def __init__(self, config: RunConfig, run_dir: Path) -> None:
        try:
            import wandb
        except ImportError:
            raise UsageError("metrics.wandb needs wandb: pip install 'umbra-rl[wandb]'") from None
        mode = config.metrics.wandb
        assert mode != "off"
        try:
            self._run = wandb.init(
                project=config.metrics.wandb_project,
                id=run_dir.name,
                name=run_dir.name,
                dir=str(run_dir),
                mode=mode,
                resume="allow" if mode == "online" else None,
                config=as_dict(config),
            )
            self._run.define_metric("eval/*", step_metric="eval/version")
        except wandb.Error as error:
            raise UsageError(
                f"metrics.wandb = {mode}: {error}; log in with `wandb login`, or use offline"
            ) from error

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log them as one step."""
        self._run.log(dict(values), step=step)

    def write_eval(self, version: int, values: Mapping[str, float]) -> None:
        """Log them with the newest step, drawn over their own version: no step may be earlier."""
        self._run.log({**values, "eval/version": version}, commit=False)

    def close(self) -> None:
        """Upload what is left, or close the file."""
        self._run.finish()
