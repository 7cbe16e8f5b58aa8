"""Sinks for metrics of the steps besides metrics.jsonl, by Accelerate's trackers."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate.tracking import (
    GeneralTracker,
    MLflowTracker,
    SwanLabTracker,
    TensorBoardTracker,
    TrackioTracker,
    WandBTracker,
)

from umbra.proto.errors import UsageError
from umbra.proto.records import EvalReport
from umbra.services.config import RunConfig
from umbra.services.config.loader import as_dict
from umbra.services.trainer.metrics import Row

log = logging.getLogger(__name__)

_HINTS = {
    "wandb": "; log in with `wandb login`, or set WANDB_MODE=offline",
    "swanlab": "; log in with `swanlab login`, or set SWANLAB_MODE=offline",
    "mlflow": "; MLFLOW_TRACKING_URI names its server",
}


@dataclass
class Sinks:
    """Accelerate's trackers, by their names in `metrics.also`.

    One that fails, as where its disk is full or its server gone, is named once and left out:
    training does not depend on it. Evaluations before step `begun` are in the trackers already.
    """

    trackers: dict[str, GeneralTracker]
    begun: int = 0
    _evals: list[EvalReport] = field(default_factory=list)  # those that were written

    def write(self, step: int, row: Row) -> None:
        self._each({name: value for name, value in row.items() if value is not None}, step)

    def write_evals(self, reports: Sequence[EvalReport]) -> None:
        """Hand on the new ones, over their version, which may be earlier than the newest step."""
        for report in reports:
            if report not in self._evals and report.version >= self.begun:
                self._evals.append(report)
                scores = {"accuracy": report.accuracy, **report.scores}
                values = {f"eval/{name}": value for name, value in scores.items()}
                self._each(values, report.version, evaluation=True)

    def _each(self, values: dict[str, float], step: int, *, evaluation: bool = False) -> None:
        for name, tracker in list(self.trackers.items()):
            try:
                if name != "wandb":  # most take no @ in a name
                    tracker.log({k.replace("@", "_at_"): v for k, v in values.items()}, step)
                elif evaluation:  # it takes no earlier step
                    tracker.log({**values, "eval/version": step}, commit=False)
                else:
                    tracker.log(values, step)
            except Exception as error:  # noqa: BLE001 - of classes that only these packages have
                log.warning("no more metrics to %s: %s", name, error)
                del self.trackers[name]


@contextmanager
def open_sinks(config: RunConfig, run_dir: Path, step: int) -> Iterator[Sinks]:
    """Open the configured sinks for steps after `step`; UsageError says which cannot be."""
    with ExitStack() as stack:
        sinks = Sinks({}, step)
        for name in dict.fromkeys(config.metrics.also):
            try:
                tracker: Any = _tracker(name, config, run_dir, step)
                tracker.start()
                if name == "wandb":
                    tracker.tracker.define_metric("eval/*", step_metric="eval/version")
            except ImportError:
                raise UsageError(
                    f"metrics.also = {name} needs {name}: pip install 'umbra-rl[{name}]'"
                ) from None
            except Exception as error:
                raise UsageError(f"metrics.also = {name}: {error}{_HINTS.get(name, '')}") from error
            sinks.trackers[name] = tracker
            stack.callback(tracker.finish)
        yield sinks


def _tracker(name: str, config: RunConfig, run_dir: Path, step: int) -> GeneralTracker:
    """Return the run's tracker `name`; a resumed run gets the same one."""
    run, project = run_dir.name, os.environ.get(f"{name.upper()}_PROJECT", "umbra")
    if name == "tensorboard":
        # Steps after `step` were lost with a trainer; their rows are hidden.
        return TensorBoardTracker(name, run_dir, purge_step=step + 1 if step else None)
    if name == "mlflow":
        return MLflowTracker(project, run_id=_mlflow_run(run), run_name=run)
    settings: dict[str, Any] = {"name": run, "config": as_dict(config)}
    if name == "trackio":
        return TrackioTracker(project, resume="allow", **settings)
    settings["mode"] = os.environ.get(f"{name.upper()}_MODE", "online")
    options = {"id": run, "resume": "allow"} if settings["mode"] == "online" else {}
    if name == "swanlab":
        return SwanLabTracker(project, log_dir=str(run_dir / name), **options, **settings)
    return WandBTracker(project, dir=str(run_dir), **{"id": run, **options}, **settings)


def _mlflow_run(run: str) -> str | None:
    """Return MLflow's id of the run of this name, if there is one."""
    import mlflow  # pyright: ignore[reportMissingImports]

    runs = mlflow.search_runs(
        search_all_experiments=True,
        filter_string=f"attributes.run_name = '{run}'",
        max_results=1,
        output_format="list",
    )
    return runs[0].info.run_id if runs else None
