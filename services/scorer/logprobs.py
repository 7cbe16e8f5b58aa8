"""Stages "ref_logp" and "logp": logprobs of the response tokens under a model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from umbra.proto.errors import UsageError
from umbra.proto.records import Score, Task, Trajectory
from umbra.services.config import RunConfig, TrainerConfig
from umbra.services.config.generation import environment_of
from umbra.services.config.trajectory_rules import RunFacts, find_fault
from umbra.services.modeling.attention import Attention
from umbra.services.modeling.experts import NO_ROUTERS
from umbra.services.modeling.micro_batch import Tokens
from umbra.services.modeling.packing import pack
from umbra.services.modeling.pretrained import load_tokenizer
from umbra.services.modeling.row_sizes import memory_of, scoring_rows
from umbra.services.modeling.scorer import Scorer


class LogprobWorker:
    """A scorer with one model.

    Args:
        model: a causal language model on its device.
        config: the trainer's, whose packing and attention are read.
        refresh: brings the newest weights into the model and returns their version; -1 for a model
            that stays as it is.
        replay: route tokens to the experts that the generator's engine chose.
        max_tokens: the longest response of a turn, by which rows are sized; 0: unknown.

    Raises:
        UsageError: there is nothing to replay with this model.
    """

    def __init__(
        self,
        model: Any,
        config: TrainerConfig,
        refresh: Callable[[], int] = lambda: -1,
        *,
        replay: bool = False,
        max_tokens: int = 0,
    ) -> None:
        self._device: torch.device = model.device
        self.rows = scoring_rows(
            config,
            model.config,
            sum(parameter.numel() for parameter in model.parameters()),
            model.dtype.itemsize,
            memory_of(self._device, 1),
            self._device.type,
            max_tokens,
        )
        attention = Attention.prepare(model, self._device)
        self._scorer = Scorer(model, int(config.logits_mib * 2**20), attention).eval()
        self._facts = RunFacts(model.get_input_embeddings().num_embeddings)
        self._replay = replay
        if replay:
            if self._scorer.routers is None:
                raise UsageError(NO_ROUTERS)
            self._facts.routing, self._facts.routers = True, self._scorer.routers.kind
        self._refresh = refresh

    @torch.inference_mode()
    def score(self, tasks: Sequence[Task], alive: Callable[[], None]) -> Iterator[list[Score]]:
        """Return logprobs for each of `tasks`, all by the same weights, or an error."""
        version = self._refresh()
        valid: list[Task] = []
        valid_lines: list[list[Trajectory]] = []
        for task in tasks:
            if fault := find_fault(task.made, self._facts):
                error = f"{fault} (the scorer's model must be of the generator's family)"
                yield [Score(sample_id=task.sample_id, attempt=task.attempt, error=error)]
            else:
                valid.append(task)
                valid_lines.append(task.made.lines)
        if not valid:
            return
        trajectories = [line for lines in valid_lines for line in lines]
        tokens = Tokens.of(trajectories, replay=self._replay)
        temperatures = torch.tensor([t.sampling.temperature for t in trajectories])
        logprobs = torch.zeros(len(tokens.learned))
        for micro in pack(tokens, **self.rows._asdict()):
            alive()
            temperature = temperatures[tokens.owner[micro.source]]
            new, _ = self._scorer(micro.to(self._device), temperature, with_entropy=False)
            logprobs[micro.source] = new.cpu()
        index = itertools.count()
        for task, lines in zip(valid, valid_lines, strict=True):
            pieces = [_spread(line, logprobs[tokens.owner == next(index)]) for line in lines]
            result = {"logprobs": b"".join(pieces), "version": version}
            yield [Score(sample_id=task.sample_id, attempt=task.attempt, **result)]


def score_by_model(
    workers: Mapping[str, LogprobWorker], tasks: Sequence[Task], alive: Callable[[], None]
) -> Iterator[list[Score]]:
    """Score each task with the model of its environment; the model of "" is for all others."""
    by_model: dict[str, list[Task]] = {}
    for task in tasks:
        name = environment_of(task.prompt_id)
        by_model.setdefault(name if name in workers else "", []).append(task)
    for name, group in by_model.items():
        yield from workers[name].score(group, alive)


def check_tokens(config: RunConfig, path: str) -> None:
    """Refuse a reference model to which the policy's token ids mean something else.

    Raises:
        UsageError: the two vocabularies, ids included, differ.
    """
    if path == config.model.path:
        return
    trust = config.model.trust_remote_code
    own = load_tokenizer(config.model.path, trust=trust)
    theirs = load_tokenizer(path, "scorer.model", trust=trust)
    if own.get_vocab() != theirs.get_vocab():
        raise UsageError(
            f"scorer.model: {path} has other tokens than model.path, which it has to score: choose "
            "a model with the same tokenizer"
        )


def _spread(trajectory: Trajectory, logprobs: Tensor) -> bytes:
    """Return `logprobs` of the sampled tokens as float32 [T], 0 for the environment's."""
    mask = np.frombuffer(trajectory.loss_mask, "u1").astype(bool)
    values = np.zeros(len(mask), "<f4")
    values[mask] = logprobs.numpy()
    return values.tobytes()
