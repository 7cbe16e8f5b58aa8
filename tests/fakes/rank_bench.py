"""Updates of a policy on given batches, as one rank of a trainer does them."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import msgspec
import pytest
import torch
from accelerate.state import AcceleratorState
from fakes.constants import constants
from fakes.slowness import seconds
from fakes.trajectories import trajectory
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from umbra.proto.errors import UsageError
from umbra.proto.records import Sampling, Support, Trajectory, VersionSpan, pack_float32, pack_int32
from umbra.services.config import RunConfig, TrainerConfig
from umbra.services.config.loader import as_dict, load_config
from umbra.services.modeling.model_directory import weights_checksum
from umbra.services.trainer.batch import make_batch
from umbra.services.trainer.checkpoints.folder import CheckpointFolder
from umbra.services.trainer.checkpoints.saver import Saver
from umbra.services.trainer.checkpoints.state import resume
from umbra.services.trainer.critic import open_critic
from umbra.services.trainer.distributed.ranks import Ranks, join_ranks
from umbra.services.trainer.learner import REASONS, Learner
from umbra.services.trainer.make_model import END, SPECIAL_TOKENS, make_model
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
    """Results of a training; `weights` (of a critic as well) are empty but on rank 0."""

    rows: list[Row]
    weights: dict[str, Tensor]
    local: dict[str, tuple[int, int]]  # elements of each parameter here, and in all


class Trainer:
    """The parts of a trainer, as one rank has them, on given batches.

    If it gets a folder for checkpoints it resumes from the newest one. With a `lag` samples are so
    many versions old, and are compared with the versions they are of.
    """

    folder: CheckpointFolder
    saver: Saver
    row: Row

    def __init__(
        self,
        directory: Path,
        checkpoints: Path | None = None,
        batches: list[list[Trajectory]] | None = None,
        ranks: Ranks | None = None,
        lag: int | None = None,
        **keys: Any,
    ) -> None:
        self.batches, self._lag = batches or make_batches(4), lag
        self.config = config = configured(directory, **(QUICK | keys))
        AcceleratorState._reset_state()  # a process has one precision, but here
        model, _, files = open_policy(directory)
        ranks, steps = ranks or Ranks(), len(self.batches)
        self.learner = Learner(model, config.trainer, steps, ranks, files=files)
        self.critic = open_critic(config, self.learner)
        check = None if lag is None else MismatchCheck(config, self.learner)
        self.update = PolicyUpdate(config, self.learner, self.critic, check)
        self.step, self.saves = 0, checkpoints is not None
        if checkpoints is not None:
            base = weights_checksum(directory) if config.trainer.lora_rank else ""
            models = [self.learner.state(base), *([self.critic.state] if self.critic else [])]
            self.folder = CheckpointFolder(checkpoints, config.checkpoint, node=ranks.node)
            self.step = resume(self.folder, models, ranks)
            self.saver = Saver(self.folder, models, ranks, self.step, as_dict(config))

    def learn(self, made: list[Trajectory], version: int) -> Row:
        """Make one update, by weights of `version`."""
        vocabulary, routers = self.learner.model.config.vocab_size, self.learner.replayed
        row = self.update(make_batch(made, vocabulary, routers=routers), version, lambda: True)
        assert row is not None
        return row

    def train(self, until: int) -> Self:
        """Take steps up to `until`, with checkpoints as configured."""
        while self.step < until:
            made = self.batches[self.step]
            if self._lag is not None:
                made = [aged(trajectory, self.step - self._lag) for trajectory in made]
            self.row = self.learn(made, self.step)
            self.step += 1
            if self.saves:
                self.saver.after(self.step, self.row)
        return self

    def save(self) -> Path:
        """Make a checkpoint of the last step."""
        assert not any(outcome.error for outcome in self.saver.last(self.step, self.row))
        return self.folder.of(self.step)

    def close(self) -> None:
        if self.saves:
            self.saver.close()
        if self.critic is not None:
            self.critic.close()


def train(
    directory: Path,
    batches: list[list[Trajectory]],
    ranks: Ranks | None = None,
    *,
    checkpoints: Path | None = None,
    until: int | None = None,
    **keys: Any,
) -> Trained:
    """One update after another, from the model in `directory` or from the newest of `checkpoints`.

    Where there are `checkpoints`, one is made at the end; `until` is the last step that is trained,
    if not all are.
    """
    with (
        constants(PLAIN | keys) as settings,
        closing(Trainer(directory, checkpoints, batches, ranks, **settings)) as trainer,
        TemporaryDirectory() as out,
    ):
        rows: list[Row] = []
        for step in range(trainer.step, until or len(batches)):
            rows.append(trainer.train(step + 1).row)
            rows[-1].pop("mismatch/seconds", None)  # each rank has its own
        if trainer.critic is not None:
            trainer.critic.settle()
        if trainer.saves:
            trainer.save()
        weights = trainer.learner.weights()
        if trainer.critic is not None:
            for file in trainer.critic.export(Path(out) / "critic").glob("*.safetensors"):
                weights |= {f"critic/{name}": value for name, value in load_file(file).items()}
        local = {
            name: (p.to_local().numel() if isinstance(p, DTensor) else p.numel(), p.numel())
            for name, p in trainer.learner.model.named_parameters()
        }
        AcceleratorState._reset_state()
        return Trained(rows, weights, local)


def learn(
    directory: Path,
    batches: list[list[Trajectory]],
    cases: dict[str, dict[str, Any]],
    timeout_s: float = 30.0,
) -> dict[str, Any]:
    """As one of several ranks, return the results in each of `cases`, or why it is refused.

    Where all cases set `sequence_parallel` ranks share rows, where all set `expert_parallel` they
    divide experts. `checkpoints` that are a list have one folder for each host.
    """
    torch.compiler.set_stance("force_eager")  # compiling takes longer than the cases
    found: dict[str, Any] = {}
    config = TrainerConfig(
        device="cpu",
        rank_timeout_s=seconds(timeout_s),
        sequence_parallel=min(case.get("sequence_parallel", 1) for case in cases.values()),
        expert_parallel=min(case.get("expert_parallel", 1) for case in cases.values()),
    )
    with join_ranks(config) as ranks:
        for name, case in cases.items():
            if isinstance(folders := case.get("checkpoints"), list):
                case["checkpoints"] = folders[ranks.node]
            try:
                found[name] = train(directory, batches, ranks, **case)
            except UsageError as error:
                found[name] = str(error)
    return found


def aged(made: Trajectory, version: int) -> Trajectory:
    """The same, sampled by `version`, or by the first one."""
    span = VersionSpan(version=max(0, version), start=0, end=made.response_tokens)
    return msgspec.structs.replace(made, spans=[span])


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


# -- batches whose recorded logprobs are off by noise ----------------------------------------------

TEMPERATURE = 0.7
HEAD = 5  # tokens that are told of each
VERSION = 3
END_ID = SPECIAL_TOKENS.index(END)
Gradients = dict[str, Tensor]


def update(
    directory: Path, trajectories: list[Trajectory], *stages: str, critic: Any = None, **keys: Any
) -> tuple[Gradients, Row]:
    """The gradients of an update of version `VERSION`, which are kept instead of used; its row."""
    buffer = {"buffer.stages": [*stages], "sampling.max_tokens": 8}
    trainer = Trainer(directory, **buffer, **keys)
    gradients: Gradients = {}

    def keep(step: int, fault: str = "") -> Row:
        del step, fault
        model = trainer.learner.model
        gradients.update(
            {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        )
        model.zero_grad()
        columns = ("grad_norm", "lr", "skipped", *(f"skipped/{reason}" for reason in REASONS))
        return dict.fromkeys(columns, 0.0)

    with closing(trainer), pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.learner, "update", keep)
        if critic is not None:
            patch.setattr(trainer.update, "_critic", critic)
        return gradients, trainer.learn(trajectories, VERSION)


@torch.no_grad()
def noisy_trajectories(
    model: Any, *, groups: int = 3, size: int = 4, spread: float = 0.3, version: int = 2
) -> list[Trajectory]:
    """Groups of random responses of 2 to 7 tokens; every third is cut off, without an end token.

    Behaviour, proximal and reference logprobs are the model's plus noise of deviation `spread`
    each; of the likeliest tokens the sampler's are less by `spread`. The last token of each is of
    `version`, the others of the one before.
    """
    generator = torch.Generator().manual_seed(7)

    def draw(low: int, high: int, count: int) -> list[int]:
        return torch.randint(low, high, (count,), generator=generator).tolist()

    def noisy(logprobs: Tensor) -> list[float]:
        return (logprobs + spread * torch.randn(len(logprobs), generator=generator)).tolist()

    made: list[Trajectory] = []
    for group in range(groups):
        prompt = draw(5, 30, 2 + group)
        for member in range(size):
            response = draw(5, 30, draw(2, 8, 1)[0])
            cut = len(made) % 3 == 0
            if not cut:
                response[-1] = END_ID
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
            distribution = (logits.float() / TEMPERATURE).log_softmax(-1)
            logprobs = distribution.gather(1, torch.tensor(response)[:, None])[:, 0]
            likeliest = distribution.topk(HEAD)
            last = len(response) - 1
            made.append(
                trajectory(
                    prompt,
                    response,
                    noisy(logprobs),
                    ref_logprobs=pack_float32(noisy(logprobs)),
                    proximal_logprobs=pack_float32(noisy(logprobs)),
                    sample_id=f"s{group}-{member}",
                    group_id=f"g{group}",
                    prompt_id=f"p{group}",
                    spans=[
                        VersionSpan(version=version - 1, start=0, end=last),
                        VersionSpan(version=version, start=last, end=last + 1),
                    ],
                    finish_reason="length" if cut else "stop",
                    reward=draw(0, 100, 1)[0] / 7,  # none is its group's mean
                    sampling=Sampling(temperature=TEMPERATURE),
                    support=Support(
                        sizes=HEAD.to_bytes(2, "little") * len(response),
                        ids=pack_int32(likeliest.indices.flatten().tolist()),
                        logprobs=pack_float32(likeliest.values.flatten().sub(spread).tolist()),
                    ),
                )
            )
    return made
