"""Updates of a policy on given batches, as one rank of a trainer does them."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from accelerate.state import AcceleratorState
from fakes.constants import constants
from fakes.trajectories import trajectory
from torch import Tensor
from torch.distributed.tensor import DTensor

from umbra.proto.records import Sampling, Support, Trajectory, VersionSpan, pack_float32, pack_int32
from umbra.services.config import RunConfig
from umbra.services.config.loader import as_dict, load_config
from umbra.services.modeling.model_directory import weights_checksum
from umbra.services.trainer.batch import make_batch
from umbra.services.trainer.checkpoints.folder import CheckpointFolder
from umbra.services.trainer.checkpoints.saver import Saver
from umbra.services.trainer.checkpoints.state import ModelState, resume
from umbra.services.trainer.critic import open_critic
from umbra.services.trainer.distributed.ranks import Ranks
from umbra.services.trainer.learner import Learner
from umbra.services.trainer.make_model import make_model
from umbra.services.trainer.metrics import Row
from umbra.services.trainer.mismatch import MismatchCheck
from umbra.services.trainer.policy import open_policy
from umbra.services.trainer.update import PolicyUpdate

# Plain descent: Adam would turn rounding in near-zero gradients into full steps.
PLAIN = {
    "optimizer": "sgd",
    "betas": [0.0, 0.9],
    "learning_rate": 0.1,
    "warmup_steps": 0,
    "device": "cpu",
    "threads": 1,
    "pack_tokens": 48,
    "micro_tokens": 48,
}

QUICK = {"warmup_steps": 0, "device": "cpu", "threads": 1, "pack_tokens": 48, "learning_rate": 1e-3}


def narrow_model(factory: pytest.TempPathFactory) -> Path:
    """A directory with a model that a CPU thread trains in no time: four query, two key heads."""
    torch.set_num_threads(1)
    path: Path = factory.mktemp("models") / "tiny"
    make_model(path, hidden=32, ff=64, init_std=0.1)
    return path


def configured(directory: Path, **keys: Any) -> RunConfig:
    """The defaults but for these keys, of [trainer] where no section is named."""
    named = {key if "." in key else f"trainer.{key}": value for key, value in keys.items()}
    overrides = [f"{key}={as_text(value)}" for key, value in named.items()]
    return load_config(overrides=[*overrides, f"model.path={directory}"], environ={})


@dataclass(frozen=True)
class Trained:
    """Results of a training; `weights` are empty but on rank 0."""

    rows: list[dict[str, Any]]
    weights: dict[str, Tensor]
    local: dict[str, tuple[int, int]]  # elements of each parameter here, and in all
    critic: Path | None = None  # where it was written


class Alone:
    """Results of one rank from batches in each case, which it is trained in once.

    Args:
        cases: settings by name; `model` is another one than `directory`.
        folder: receives the files of critics.
    """

    def __init__(
        self,
        directory: Path,
        batches: list[list[Trajectory]],
        cases: dict[str, dict[str, Any]],
        folder: Path,
    ) -> None:
        self._directory, self._batches, self._folder = directory, batches, folder
        self.cases = cases
        self._found: dict[str, Trained] = {}

    def __getitem__(self, case: str) -> Trained:
        if case not in self._found:
            out = self._folder / f"{case}.critic"
            settings = dict(self.cases[case])
            directory = Path(settings.pop("model", self._directory))
            self._found[case] = train(directory, self._batches, Ranks(), out, **settings)
        return self._found[case]


def train(
    directory: Path,
    batches: list[list[Trajectory]],
    ranks: Ranks,
    out: Path | None = None,
    *,
    checkpoints: Path | None = None,
    until: int | None = None,
    lag: int | None = None,
    **trainer: Any,
) -> Trained:
    """One update after another, from the model in `directory`; a critic is written to `out`.

    Settings with a point are keys of other sections. If `checkpoints` is given, from the newest one
    there, with one more at the end; `until` is the last step that is trained, if not all are. With
    a `lag` the samples are so many versions old, and are compared with the versions they are of.
    """
    with constants(PLAIN | trainer) as settings:
        config = configured(directory, **settings, **{"run.steps": len(batches)})
        AcceleratorState._reset_state()  # a process has one precision, but here
        model, _, files = open_policy(directory)
        learner = Learner(model, config.trainer, config.run.steps, ranks, files=files)
        critic = open_critic(config, learner)
        mismatch_check = None if lag is None else MismatchCheck(config, learner)
        update = PolicyUpdate(config, learner, critic, mismatch_check)
        rows: list[dict[str, Any]] = []
        models = [learner.state(weights_checksum(directory) if config.trainer.lora_rank else "")]
        models += [critic.state] if critic is not None else []
        begin, end = 0, until or len(batches)
        if checkpoints is not None:
            folder = CheckpointFolder(checkpoints, config.checkpoint, node=ranks.node)
            begin = resume(folder, models, ranks)
        for version in range(begin, end):
            made = batches[version]
            if lag is not None:
                made = [aged(trajectory, version - lag) for trajectory in made]
            batch = make_batch(made, model.config.vocab_size, routers=learner.replayed)
            row = update(batch, version, lambda: True)
            assert row is not None
            row.pop("mismatch/seconds", None)  # each rank has its own
            rows.append(row)
        if critic is not None:
            critic.settle()
        if checkpoints is not None:
            save(checkpoints, models, ranks, config, step=end, row=rows[-1])
        if critic is not None:
            assert out is not None
            critic.export(out)
            critic.close()
        local = {
            name: (p.to_local().numel() if isinstance(p, DTensor) else p.numel(), p.numel())
            for name, p in learner.model.named_parameters()
        }
        weights = learner.weights()
        AcceleratorState._reset_state()
        return Trained(rows, weights, local, out)


def aged(made: Trajectory, version: int) -> Trajectory:
    """The same, sampled by `version`, or by the first one."""
    span = VersionSpan(version=max(0, version), start=0, end=made.response_tokens)
    return msgspec.structs.replace(made, spans=[span])


def save(
    path: Path, models: list[ModelState], ranks: Ranks, config: RunConfig, *, step: int, row: Row
) -> None:
    folder = CheckpointFolder(path, config.checkpoint, node=ranks.node)
    with closing(Saver(folder, models, ranks, 0, as_dict(config))) as saver:
        (outcome,) = saver.last(step, row)
        assert not outcome.error


def as_text(value: object) -> str:
    """As `--set` takes it."""
    return value if isinstance(value, str) else json.dumps(value)


def make_batches(count: int, *, groups: int = 3) -> list[list[Trajectory]]:
    """Groups of random responses of different lengths; each has its prompt and temperature."""
    generator = torch.Generator().manual_seed(3)

    def tokens(length: int) -> list[int]:
        return torch.randint(5, 100, (length,), generator=generator).tolist()

    batches: list[list[Trajectory]] = []
    for step in range(count):
        made: list[Trajectory] = []
        for group in range(groups):
            prompt = tokens(4 + 5 * group)
            for member in range(4):
                length = 2 + 3 * member + group
                mask = [int(at % 4 != 2) for at in range(length)]
                logprobs = (-4.6 + 0.2 * torch.randn(length, generator=generator)).tolist()
                made.append(
                    trajectory(
                        prompt,
                        tokens(length),
                        logprobs,
                        sample_id=f"s{step}-{group}-{member}",
                        group_id=f"g{step}-{group}",
                        prompt_id=f"p{group}",
                        loss_mask=bytes(mask),
                        reward=float(member % 3) + 0.1 * group,
                        sampling=Sampling(temperature=0.5 + 0.3 * group),
                        support=Support(
                            sizes=b"".join(bytes((2 * one, 0)) for one in mask),
                            ids=pack_int32([5 + group, 50 + member] * sum(mask)),
                            logprobs=pack_float32([-1.0, -2.0] * sum(mask)),
                        ),
                    )
                )
        batches.append(made)
    return batches
