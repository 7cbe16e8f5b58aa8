"""Reports of a step: where its seconds go, traces, trackers of metrics, and rollouts as text."""

import gzip
import json
import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing, nullcontext
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock, call

import msgspec
import pytest
import torch
from accelerate import PartialState
from click.testing import CliRunner
from fakes.looks import heard, status
from fakes.trajectories import trajectory

from umbra.deploy.commands.runs import command
from umbra.deploy.run_folder import RunFolder, read_rollouts, rollout_text
from umbra.proto.errors import UsageError
from umbra.proto.records import Branch, EvalReport, Trajectory, VersionSpan
from umbra.services.config import RunConfig
from umbra.services.config.loader import load_config
from umbra.services.trainer.metrics import Row
from umbra.services.trainer.rollout_log import EVERY_S, TOLD_CHARS, RolloutLog, spread
from umbra.services.trainer.sinks import Sinks, open_sinks
from umbra.services.trainer.speed import Phases, traced

CPU = torch.device("cpu")


def test_phases_add_up_to_the_step() -> None:
    """Between two readings of the clock pass 1, 2, 3, ... seconds."""
    clock = accumulate(range(100))
    phases = Phases(CPU, lambda: float(next(clock)))  # at 0
    with phases("before the first step"):  # at 1
        pass
    assert phases.take() == {"other": 3, "step": 3}, "who asks for none keeps none"
    with phases("wait"):  # from 6 to 10
        pass
    with phases("train"):  # from 15
        for _ in range(2):
            with phases("forward"):  # from 21 to 28, from 36 to 45
                pass
    # to 55; the step ends at 66
    assert phases.take() == {
        "wait": 4, "train": 40, "train/forward": 16, "train/other": 24, "other": 19, "step": 63,
    }  # fmt: skip
    assert phases.take() == {"other": 12, "step": 12}, "it restarts"


def test_a_trace_has_the_phases_of_its_step_alone(tmp_path: Path) -> None:
    phases, file = Phases(CPU), tmp_path / "profile" / "step-2.json.gz"
    for step in (1, 2, 3):
        with (
            traced(file) if step == 2 else nullcontext(),
            phases(f"train {step}"),
            phases("forward"),
        ):
            torch.mm(torch.ones(8, 8), torch.ones(8, 8))
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    names = {event["name"] for event in events if event.get("cat") == "user_annotation"}
    assert names == {"train 2", "forward"}


@pytest.fixture(autouse=True)
def accelerate_state() -> Iterator[None]:
    """Accelerate's trackers want its state, which a trainer has from its learner."""
    had = PartialState._shared_state != {}
    PartialState(cpu=True)
    yield
    if not had:
        PartialState._reset_state()


def config(also: str) -> RunConfig:
    return load_config(overrides=[f'metrics.also=["{also}"]'], environ={})


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


def report(version: int, accuracy: float, **scores: float) -> EvalReport:
    return EvalReport(version=version, done=True, samples=8, accuracy=accuracy, scores=scores)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    """A trainer that goes on from step 2 hides what its former life has written after it. The
    buffer tells the last evaluations again and again."""
    first, second = report(0, 0.25), report(2, 0.5, **{"pass@4": 0.75})
    with open_sinks(config("tensorboard"), tmp_path, 0) as sinks:
        for step, seen in enumerate(([first], [first, second], [second]), start=1):
            row: Row = {"reward/mean": step / 4, "grad_norm": None}
            sinks.write(step, row)
            sinks.write_evals(seen)
    with open_sinks(config("tensorboard"), tmp_path, 2) as sinks:
        sinks.write(3, {"reward/mean": 0.5})
    assert curves(tmp_path / "tensorboard") == {
        "reward/mean": [(1, 0.25), (2, 0.5), (3, 0.5)],
        "eval/accuracy": [(0, 0.25), (2, 0.5)],
        "eval/pass_at_4": [(2, 0.75)],
    }


AT_4 = call({"eval/accuracy": 0.5, "eval/pass_at_4": 0.75}, step=2)
# W&B counts no steps by itself, and takes no earlier one.
OF_WANDB = {"eval/accuracy": 0.5, "eval/pass@4": 0.75, "eval/version": 2}
TRACKERS = {  # their modes, how they get an evaluation, and what they are told of the run
    "wandb": ("online", call(OF_WANDB, step=None, commit=False), {"mode", "dir", "id", "resume"}),
    "trackio": ("", AT_4, {"resume"}),
    "swanlab": ("offline", AT_4, {"mode", "log_dir"}),
}


@pytest.mark.parametrize("name", TRACKERS)
def test_trackers_get_steps_and_evaluations_at_their_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """One that goes on is the same run, and has told the older evaluations."""
    mode, evaluation, keys = TRACKERS[name]
    package = MagicMock()
    monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setenv(f"{name.upper()}_MODE", mode)
    monkeypatch.setenv(f"{name.upper()}_PROJECT", "mine")
    with open_sinks(config(name), tmp_path / "run-7", 2) as sinks:
        sinks.write(3, {"loss": 0.5, "grad_norm": None})
        sinks.write_evals([report(0, 0.25), report(2, 0.5, **{"pass@4": 0.75})])
    run, given = package.init.return_value, package.init.call_args.kwargs
    assert run.log.call_args_list == [call({"loss": 0.5}, step=3), evaluation]
    assert given.keys() == keys | {"project", "config", "name"}
    assert (given["project"], given["name"]) == ("mine", "run-7")
    assert (given.get("id", "run-7"), given.get("resume", "allow")) == ("run-7", "allow")
    assert given["config"]["metrics"]["also"] == [name]
    if name == "wandb":
        run.define_metric.assert_called_once_with("eval/*", step_metric="eval/version")
    run.finish.assert_called_once_with()


def test_what_a_tracker_refuses_is_the_users_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = Mock(**{"init.side_effect": ValueError("no key")})
    monkeypatch.setitem(sys.modules, "wandb", refusing)
    with pytest.raises(UsageError, match="wandb: no key; log in with"):
        with open_sinks(config("wandb"), tmp_path, 0):
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
        with open_sinks(config(package), tmp_path, 0):
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


# A tokenizer whose tokens are bytes, so that a character may have several.
BYTES = Mock(decode=lambda ids, **_: bytes(ids).decode(errors="replace"))


def rewarded(reward: float, **changes: Any) -> Trajectory:
    return trajectory(
        list(b"ask"), list(b"answer"), sample_id=f"s{reward:g}", reward=reward, **changes
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.chdir(tmp_path)
    made = RunFolder.create("runs", "run")
    made.config.write_text("{}")
    return made


def logged(
    folder: RunFolder, count: int, steps: Iterable[tuple[int, list[Trajectory]]], **more: Any
) -> list[dict[str, Any]]:
    """The rows of these steps as they were told; they are in the folder too."""
    rows: list[dict[str, Any]] = []
    with closing(RolloutLog(folder.path, BYTES, count, rows.append, **more)) as log:
        for step, trajectories in steps:
            log.step(step, trajectories)
    return rows


def test_of_each_step_some_from_the_worst_to_the_best(folder: RunFolder) -> None:
    rewards = {1: (0.5, 3.0, 0.25, -1.0, 2.0), 2: (7.0, 6.0)}
    logged(folder, 3, ((step, [*map(rewarded, own)]) for step, own in rewards.items()))
    found = [(row["step"], row["reward"]) for row in read_rollouts(folder)]
    assert found == [(1, -1.0), (1, 0.5), (1, 3.0), (2, 6.0), (2, 7.0)]
    assert spread([rewarded(1.0), rewarded(2.0)], 1)[0].reward == 1.0


def test_a_rollout_has_its_facts(folder: RunFolder) -> None:
    response = "a☃b ☃?".encode()  # versions change within both snowmen
    mixed = trajectory(
        list(b"?"), list(response), sample_id="s", reward=1.0, reward_parts={"right": 1.0},
        loss_mask=b"\1" * 5 + b"\0" * 1 + b"\1" * (len(response) - 6), turns=2,
        spans=[
            VersionSpan(version=3, start=0, end=2),
            VersionSpan(version=5, start=2, end=8),
            VersionSpan(version=6, start=8, end=len(response)),
        ],
    )  # fmt: skip
    logged(folder, 4, [(7, [mixed])])
    (row,) = read_rollouts(folder)
    assert row["response"] == "a☃b ☃?"
    assert row["staleness"] == 3
    text = rollout_text(row)
    assert "reward 1 (right 1), 10 tokens, 2 turns, stop, staleness 3" in text
    assert text.endswith("?\n>>> a☃b ☃?\n")


def test_one_is_told_now_and_then_and_is_short(folder: RunFolder) -> None:
    long = trajectory(list(b"x" * 3 * TOLD_CHARS), list(b"y\x1b[2J"), reward=0.5)
    # The clock is read at the start, twice for the first, once for each of two, and for the last.
    clock = iter([0.0, 0.0, 0.0, 1.0, EVERY_S / 2, EVERY_S, EVERY_S])
    rows = logged(folder, 2, [(step, [long]) for step in (1, 2, 3, 4)], clock=clock.__next__)
    assert [row["step"] for row in rows] == [1, 4]
    assert len(rows[0]["prompt"]) == TOLD_CHARS + 1
    (seen,) = heard(("rollout", rows[0])).look(status()).rollouts
    assert (seen.step, seen.response) == (1, "y [2J"), "nothing that steers a terminal"


def test_a_model_that_says_what_steers_terminals(folder: RunFolder) -> None:
    logged(folder, 1, [(1, [rewarded(1.0)])])
    row = json.loads(folder.samples.read_text())
    folder.samples.write_text(json.dumps({**row, "response": "\x1b[2Jcleared\nx"}) + "\n")
    done = CliRunner().invoke(command, ["--samples", "4"])
    assert "\x1b" not in done.output
    assert ">>>  [2Jcleared\nx\n" in done.output


def test_branches_of_a_sample_are_one_row(folder: RunFolder) -> None:
    one, two = rewarded(1.0), trajectory(list(b"again"), list(b"other"))
    branch = Branch(**{name: getattr(two, name) for name in Branch.__struct_fields__})
    branched = msgspec.structs.replace(one, branches=[branch])
    logged(folder, 4, [(1, [branched])])
    (row,) = read_rollouts(folder)
    assert (row["branches"], row["tokens"], row["response"]) == (2, 11, "answer")
    assert "11 tokens, 2 branches" in rollout_text(row)
