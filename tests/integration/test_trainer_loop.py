"""The trainer against a buffer and a hub that live in the test: real model, real optimizer."""

import json
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import msgspec
import pytest
import torch
from fakes.fixtures import Closes
from fakes.policy_rollouts import GROUP_SIZE, GROUPS, config, rollouts
from msgspec.structs import replace
from torch import Tensor
from trainer.test_reports import curves
from transformers import AutoModelForCausalLM, AutoTokenizer

from umbra.proto import messages as m
from umbra.proto.deadline import Pace
from umbra.proto.errors import (
    DeadlineError,
    DivergedError,
    PeerLostError,
    RejectedError,
    UmbraError,
    UsageError,
)
from umbra.proto.records import EvalReport, Ledger, Manifest, Trajectory
from umbra.services.config import TrainerConfig
from umbra.services.process.command import ServiceContext
from umbra.services.process.metrics import MetricsFile
from umbra.services.trainer import member, service
from umbra.services.trainer.batch import BatchError
from umbra.services.trainer.policy import load_policy
from umbra.services.weights.manifest import checksums


@dataclass
class World:
    """Buffer, hub and session in one: rolls out with whatever weights were published last."""

    directory: Path
    level: bool = False
    starve: bool = False
    refuses_checkpoints: bool = False
    wants_checkpoint: bool = False
    evals: Sequence[EvalReport] = ()
    stop_at: str = "nowhere"
    dead_at: tuple[type[m.Message], ...] = ()  # the buffer ends with us there
    dead_step: int = 1
    failure: UmbraError | None = None
    broken: bool = False  # a sample of the second batch
    made: dict[int, list[Trajectory]] = field(default_factory=dict[int, list[Trajectory]])

    def __post_init__(self) -> None:
        self.model = load_policy(self.directory)[0].eval()
        self.asked: list[m.Message] = []
        self.published: dict[int, dict[str, Tensor]] = {}
        self.stopping = threading.Event()
        self.stop_reason = ""
        self.left = False
        self.data = self
        self.stats = self.emit = lambda *_, **values: msgspec.json.encode(values)

    # the session
    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.left = True

    def weights(self, *, deadline_s: float) -> Self:
        return self

    def progress(self, activity: str, count: int = 1) -> None:
        if activity.startswith(self.stop_at):
            self.stopping.set()

    # the buffer
    def call(
        self,
        body: m.Message,
        reply: type[m.Message],
        *,
        timeout_s: float,
        stopping: threading.Event | None = None,
    ) -> m.Message:
        self.asked.append(body)
        if isinstance(body, self.dead_at) and getattr(body, "step", 1) == self.dead_step:
            assert stopping is not None  # else it would wait for the whole grace
            self.stopping.set()
            raise DeadlineError("stopped while waiting for the buffer")
        match body:
            case m.LeaseBatch(step=step):
                if self.starve and len(self.asked) > 20:
                    self.stopping.set()
                if self.starve or self.asked.count(body) == 1:
                    return m.BatchLease(step=step, trajectories=[], waiting_for="2 groups")
                if self.wants_checkpoint and step > 1:
                    return m.BatchLease(step=step, trajectories=[], checkpoint=True)
                made = rollouts(self.model, step - 1, level=self.level, seed=step)
                made = self.made.setdefault(step, made)
                if self.broken and step == 2:
                    made[3] = replace(made[3], reward=1e308)
                return m.BatchLease(step=step, trajectories=made, evals=list(self.evals[:step]))
            case m.CommitBatch(step=step):
                assert all(isinstance(value, float) for value in body.metrics.values())
                return m.CommitAck(version=step, ledger=Ledger())
            case m.CheckpointSaved() if self.refuses_checkpoints:
                raise RejectedError("no such step", code="wrong_step")
            case m.CheckpointSaved(step=step):
                self.wants_checkpoint &= not step  # until it may let batches go
                return m.Ok()
            case m.FinishRun():
                return m.RunFinished(ledger=Ledger(issued=1, trained=1), evals=list(self.evals))
            case _:
                raise AssertionError(body)

    def committed(self) -> list[int]:
        return [body.step for body in self.asked if isinstance(body, m.CommitBatch)]

    def unchanged(self) -> bool:
        first, last = self.published[0], self.published[2]
        return all(torch.equal(tensor, last[name]) for name, tensor in first.items())


class HubInTest:
    """Stand-in for `Publisher`: published weights become the rollouts'."""

    place = ("memory", 0)

    def __init__(
        self, world: World, manifest: Manifest, _stopping: threading.Event, pace: Pace
    ) -> None:
        self.world, self.manifest = world, manifest
        self.phase_s = pace.limit_s(manifest.total_bytes)
        self.memory = bytearray()

    def register(self, timeout_s: float) -> None:
        assert timeout_s > self.phase_s, "the hub allocates several slots"

    def check(self) -> None:
        """Nothing that was published is ever lost."""

    close = check

    def slot(self, version: int, timeout_s: float) -> memoryview:
        assert timeout_s == 2 * self.phase_s
        self.memory = bytearray(self.manifest.total_bytes)
        return memoryview(self.memory)

    def publish(self, version: int, snapshot_s: float, sums: list[int]) -> None:
        assert sums == checksums(self.manifest, memoryview(self.memory))
        weights: dict[str, Tensor] = {}
        for entry in self.manifest.tensors:
            area = self.memory[entry.offset : entry.offset + entry.nbytes]
            weights[entry.name] = torch.frombuffer(area, dtype=torch.float32).view(entry.shape)
        self.world.published[version] = weights
        self.world.model.load_state_dict(weights, strict=False)


@pytest.fixture
def start(tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch, closes: Closes) -> Any:
    """A function that runs the trainer in a world and returns its exit code."""
    monkeypatch.setattr(member, "Publisher", HubInTest)

    def run(world: World, **trainer: Any) -> int:
        def join(_: ServiceContext, **facts: Any) -> World:
            assert facts["vocabulary"] > 0
            return world

        monkeypatch.setattr(ServiceContext, "join", join)
        return service.run(
            ServiceContext(
                config=config(directory, **trainer),
                role="trainer",
                name="trainer",
                run_dir=tmp_path,
                stopping=world.stopping,
                log=logging.getLogger("umbra.trainer"),
                metrics=closes(MetricsFile(tmp_path / "metrics.jsonl", "trainer")),
            )
        )

    return run


def rows(tmp_path: Path, kind: str) -> list[dict[str, Any]]:
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


def test_two_steps_then_an_export_that_loads(directory: Path, start: Any, tmp_path: Path) -> None:
    world = World(directory)
    assert start(world, **{"checkpoint.best_metric": "reward_part/rare"}) == 0
    assert world.committed() == [1, 2]
    assert isinstance(world.asked[-1], m.FinishRun)
    assert world.left
    assert sorted(world.published) == [0, 1, 2]
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(world.published[0][name], world.published[1][name])

    steps = rows(tmp_path, "step")
    assert [row["step"] for row in steps] == [1, 2]
    for row in steps:
        assert 0 <= row["mismatch/k3_on_policy"] < 1e-5, "generator and trainer agree"
        assert abs(row["mismatch/k1"]) < 1e-4
        assert row["ess"] == pytest.approx(1.0, abs=1e-4)
        assert (row["staleness/total/max"], row["clip_fraction"], row["truncated"]) == (0, 0, 1)
        assert row["samples"] == GROUPS * GROUP_SIZE
        assert row["grad_norm"] > 0
        assert row["entropy"] > 3
        assert 0.01 < row["memory/peak_gib"] < 1000
    spans = {"wait_batch", "train_step", "commit", "checkpoint", "wait_slot", "snapshot"}
    assert {row["name"] for row in rows(tmp_path, "span")} == spans

    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model", local_files_only=True)
    assert torch.equal(exported.state_dict()[name], world.published[2][name])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model", local_files_only=True)
    assert len(tokenizer("12")["input_ids"]) == 2


def test_a_batch_without_advantage_is_committed_and_published_unchanged(
    directory: Path, start: Any, tmp_path: Path
) -> None:
    world = World(directory, level=True)
    assert start(world, **{"checkpoint.best_metric": "-kl"}) == 0, "which no such batch has"
    assert world.committed() == [1, 2]
    assert world.unchanged()
    assert [row["updates"] for row in rows(tmp_path, "step")] == [0, 0]
    assert [row["loss"] for row in rows(tmp_path, "step")] == [None, None]


@pytest.mark.parametrize(
    ("stop_at", "dead_at", "committed"),
    [
        ("waiting for batch 2", (), [1]),
        ("training step 2", (), [1]),
        ("nowhere", (m.LeaseBatch,), []),  # a buffer that has ended too is not waited for
        ("nowhere", (m.CommitBatch,), [1]),
        ("nowhere", (m.FinishRun,), [1, 2]),  # while the last evaluation is under way
    ],
)
def test_a_stop_leaves_without_an_export_of_a_part(
    stop_at: str, dead_at: tuple[type[m.Message], ...], committed: list[int],
    directory: Path, start: Any, tmp_path: Path,
) -> None:  # fmt: skip
    world = World(directory, stop_at=stop_at, dead_at=dead_at)
    assert start(world) == 0
    assert world.committed() == committed
    assert world.left
    assert (tmp_path / "model").exists() == (m.FinishRun in dead_at)


def test_a_stop_while_a_slot_is_waited_for_leaves_the_row_of_what_is_committed(
    directory: Path, start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, slot = World(directory), HubInTest.slot

    def asked_to_stop(hub: HubInTest, version: int, timeout_s: float) -> memoryview:
        if version == 1:
            world.stopping.set()
            raise DeadlineError("stopped while waiting for a slot")
        return slot(hub, version, timeout_s)

    monkeypatch.setattr(HubInTest, "slot", asked_to_stop)
    assert start(world) == 0
    assert world.committed() == [row["step"] for row in rows(tmp_path, "step")] == [1]
    assert not (tmp_path / "model").exists()


def test_a_batch_whose_commit_is_not_answered_is_in_no_checkpoint(
    directory: Path, start: Any, tmp_path: Path
) -> None:
    """The policy is as it was, in the critic's warm-up, and the critic has learned the batch."""
    world = World(directory, dead_at=(m.CommitBatch,), dead_step=2)
    assert start(world, objective="ppo_critic", **{"critic.warmup_steps": 9}) == 0
    assert world.committed() == [1, 2]
    assert not list((tmp_path / "checkpoints").glob("step-*"))


def test_a_stop_because_of_a_failure_has_its_exit_code(directory: Path, start: Any) -> None:
    world = World(directory, stop_at="waiting", failure=PeerLostError("the broker is silent"))
    assert start(world) == PeerLostError.exit_code


def test_a_batch_is_waited_for_as_long_as_the_run_waits(
    directory: Path, start: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names the missing part now and then; only a stop ends it."""
    world = World(directory, starve=True)
    monkeypatch.setattr(member, "TELL_S", 1e-6)
    with caplog.at_level(logging.WARNING):
        assert start(world) == 0
    assert "no batch for step 1 yet: waiting for 2 groups" in caplog.text
    assert world.left


def test_a_run_that_diverges_ends_with_a_sentence(
    directory: Path, start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every update is left out: the batches are committed as skipped, the weights stay."""
    world = World(directory)
    monkeypatch.setattr(TrainerConfig, "max_skipped", 2)
    monkeypatch.setattr(TrainerConfig, "max_ratio", 1e-9)
    with pytest.raises(DivergedError, match=r"stopped at step 2: .* of the last 2 batches"):
        start(world)
    assert world.committed() == [1, 2]
    commits = [body for body in world.asked if isinstance(body, m.CommitBatch)]
    assert [body.metrics["skipped"] for body in commits] == [1, 1]
    assert [row["skipped/outliers"] for row in rows(tmp_path, "step")] == [1, 1]
    assert world.unchanged()
    assert not (tmp_path / "model").exists()


def test_it_goes_on_from_its_checkpoint(
    directory: Path, start: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """1. A trainer is asked to stop in its second step. 2. Another one. Result: it makes step 2."""
    first = World(directory, stop_at="training step 2")
    assert start(first) == 0
    assert (tmp_path / "checkpoints" / "step-1").is_dir(), "a committed step is saved on leaving"
    second = World(directory)
    assert start(second) == 0
    told = m.CheckpointSaved(step=0)
    assert second.asked[0] == told, "the beginning is as good as the first one"
    assert second.committed() == [2]
    assert sorted(second.published) == [1, 2]
    for name, tensor in second.published[1].items():
        assert torch.equal(tensor, first.published[1][name])
    assert [row["error"] for row in rows(tmp_path, "checkpoint")] == ["", ""]
    assert start(World(directory)) == 0, "a third has no step left"
    assert "not compared" not in caplog.text


def test_versions_of_a_former_life_are_not_compared(directory: Path, start: Any) -> None:
    """1. A trainer is killed. 2. Another one, of another learning rate, gets its batches again."""
    first = World(directory)
    assert start(first, **{"checkpoint.every": 0}) == 0
    second = World(directory, made=first.made)
    assert start(second, learning_rate=1e-3, **{"checkpoint.every": 0}) == 0


def test_a_checkpoint_on_request(directory: Path, start: Any, tmp_path: Path) -> None:
    """Asked for a second time, one checkpoint of two that are kept lets batches go."""
    world = World(directory, wants_checkpoint=True)
    assert start(world) == 0
    told = [body for body in world.asked if isinstance(body, m.CommitBatch | m.CheckpointSaved)]
    assert told[1:3] == [m.CheckpointSaved(step=0), m.CheckpointSaved(step=1)]
    assert [row["step"] for row in rows(tmp_path, "checkpoint")] == [1, 2]


@pytest.mark.parametrize("name", ["rewards", "seconds/step"])  # that is known after a checkpoint
def test_a_best_metric_that_is_not_measured_is_told(directory: Path, start: Any, name: str) -> None:
    world = World(directory)
    with pytest.raises(UsageError, match=f"best_metric: '{name}' is no metric .*reward/mean"):
        start(world, **{"checkpoint.best_metric": name})
    assert world.committed() == [1]


def test_a_checkpoint_of_another_run_is_told(directory: Path, start: Any) -> None:
    assert start(World(directory, stop_at="training step 2")) == 0
    with pytest.raises(UsageError, match=r"step-1 does not belong to the buffer's run .*no such"):
        start(World(directory, refuses_checkpoints=True))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_evaluations_reach_the_curves(directory: Path, start: Any, tmp_path: Path) -> None:
    """One was told with each batch, the last one with the end of the run."""
    evals = [EvalReport(version=v, done=True, samples=8, accuracy=0.25 * v) for v in range(3)]
    assert start(World(directory, evals=evals), **{"metrics.also": '["tensorboard"]'}) == 0
    found = curves(tmp_path / "tensorboard")
    assert found["eval/accuracy"] == [(0, 0.0), (1, 0.25), (2, 0.5)]
    assert [step for step, _ in found["reward/mean"]] == [1, 2]


def test_a_buffer_that_has_nothing_sound_leaves_the_checkpoint_before_it(
    directory: Path, start: Any, tmp_path: Path
) -> None:
    """1. A sound batch, then none that is. 2. Another trainer, whose data are sound."""
    world = World(directory, broken=True)
    with pytest.raises(BatchError, match=r"sample .*: reward is 1e") as failure:
        start(world, **{"checkpoint.every": 1})
    assert failure.value.exit_code == 6 and "\n" not in str(failure.value)
    assert world.committed() == [1]
    assert not (tmp_path / "model").exists()
    sound = World(directory)
    assert start(sound) == 0
    assert sound.committed() == [2], "it goes on from the checkpoint of step 1"
