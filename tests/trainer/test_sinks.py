"""Metrics of the steps for TensorBoard and Weights & Biases."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock, call

import pytest
import torch
from accelerate import PartialState

from umbra.proto.errors import UsageError
from umbra.proto.records import EvalReport
from umbra.services.config import RunConfig
from umbra.services.config.loader import load_config
from umbra.services.trainer.metrics import Row
from umbra.services.trainer.sinks import Sinks, open_sinks


@pytest.fixture(autouse=True)
def accelerate_state() -> Iterator[None]:
    """Accelerate's trackers want its state, which a trainer has from its learner."""
    had = PartialState._shared_state != {}
    PartialState(cpu=True)
    yield
    if not had:
        PartialState._reset_state()


def config(*overrides: str) -> RunConfig:
    return load_config(overrides=overrides, environ={})


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    """A trainer that goes on from step 2 hides what its former life has written after it."""
    settings = config('metrics.also=["tensorboard"]')
    with open_sinks(settings, tmp_path, 0) as sinks:
        for step in (1, 2, 3):
            row: Row = {"reward/mean": step / 4, "grad_norm": None}
            sinks.write(step, row)
    with open_sinks(settings, tmp_path, 2) as sinks:
        sinks.write(3, {"reward/mean": 0.5})
    assert curves(tmp_path / "tensorboard") == {"reward/mean": [(1, 0.25), (2, 0.5), (3, 0.5)]}


def report(version: int, accuracy: float, **scores: float) -> EvalReport:
    return EvalReport(version=version, done=True, samples=8, accuracy=accuracy, scores=scores)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_evaluations_are_curves_over_their_versions(tmp_path: Path, wandb: Mock) -> None:
    """The buffer tells the last ones again and again; a trainer that goes on has told the older."""
    first = report(0, 0.25, **{"pass@4": 0.5})
    second = report(2, 0.5, **{"pass@4": 0.75})
    with open_sinks(config('metrics.also=["tensorboard"]'), tmp_path, 0) as sinks:
        for seen in ([], [first], [first], [first, second], [second]):
            sinks.write_evals(seen)
    assert curves(tmp_path / "tensorboard") == {
        "eval/accuracy": [(0, 0.25), (2, 0.5)],
        "eval/pass_at_4": [(0, 0.5), (2, 0.75)],
    }
    with open_sinks(config('metrics.also=["wandb"]'), tmp_path, 2) as sinks:
        sinks.write(3, {"loss": 0.5})
        sinks.write_evals([first, second])
    run = wandb.init.return_value
    values = {"eval/accuracy": 0.5, "eval/pass@4": 0.75, "eval/version": 2}
    told = [call({"loss": 0.5}, step=3), call(values, step=None, commit=False)]
    assert run.log.call_args_list == told, "W&B counts no steps by itself"
    run.define_metric.assert_called_once_with("eval/*", step_metric="eval/version")


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Mock:
    fake = Mock()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


@pytest.mark.parametrize(("mode", "resume"), [("offline", None), ("online", "allow")])
def test_weights_and_biases(
    tmp_path: Path, wandb: Mock, mode: str, resume: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run-7"
    settings = config('metrics.also=["wandb"]')
    monkeypatch.setenv("WANDB_MODE", mode)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    with open_sinks(settings, folder, 0) as sinks:
        sinks.write(1, {"loss": 0.5, "grad_norm": None})
    run, given = wandb.init.return_value, wandb.init.call_args.kwargs
    assert run.log.call_args_list == [call({"loss": 0.5}, step=1)]
    run.finish.assert_called_once_with()
    assert (given["project"], given["id"], given.get("resume")) == ("mine", "run-7", resume)
    assert (given["mode"], given["dir"]) == (mode, str(folder))
    assert given["config"]["metrics"]["also"] == ["wandb"]


TRACKERS = {"trackio": {"name", "resume"}, "swanlab": {"name", "mode", "log_dir"}}


@pytest.mark.parametrize("name", TRACKERS)
def test_other_trackers_get_evaluations_at_their_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    tracker = MagicMock()
    monkeypatch.setitem(sys.modules, name, tracker)
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    with open_sinks(config(f'metrics.also=["{name}"]'), tmp_path, 1) as sinks:
        sinks.write(3, {"loss": 0.5})
        sinks.write_evals([report(2, 0.5, **{"pass@4": 0.75})])
    values = {"eval/accuracy": 0.5, "eval/pass_at_4": 0.75}
    run = tracker.init.return_value
    assert run.log.call_args_list == [call({"loss": 0.5}, step=3), call(values, step=2)]
    assert tracker.init.call_args.kwargs.keys() == TRACKERS[name] | {"project", "config"}
    run.finish.assert_called_once_with()


def test_what_a_tracker_refuses_is_the_users_mistake(tmp_path: Path, wandb: Mock) -> None:
    wandb.init.side_effect = ValueError("no key")
    with pytest.raises(UsageError, match="wandb: no key; log in with"):
        with open_sinks(config('metrics.also=["wandb"]'), tmp_path, 0):
            pass


@pytest.mark.parametrize("package", ["wandb", "tensorboard", "trackio", "mlflow", "swanlab"])
def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    for name in (package, "tensorboardX"):  # which accelerate would take instead
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.delattr(torch.utils, "tensorboard", raising=False)
    with pytest.raises(UsageError, match=rf"pip install 'umbra-rl\[{package}\]'"):
        with open_sinks(config(f'metrics.also=["{package}"]'), tmp_path, 0):
            pass


def test_a_failing_sink_is_told_once_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    good, full = Mock(), Mock()
    full.log.side_effect = OSError("No space left on device")
    sinks = Sinks({"full": full, "good": good})
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            sinks.write(step, {"loss": 1.0})
    sinks.write_evals([report(2, 0.5)])
    assert [each.args[1] for each in good.log.call_args_list] == [1, 2, 3, 2]
    (told,) = caplog.records
    assert told.message == "no more metrics to full: No space left on device"
