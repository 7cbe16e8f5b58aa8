"""A generator that differs from the trainer on equal weights ends the run: each cause, for real.

The torch engine makes the samples and the trainer learns from them, on tiny models. In each case
one thing is broken at the generator's side.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from fakes.architectures import ARCHITECTURES
from fakes.constants import constants
from fakes.rank_bench import configured
from fakes.trajectories import trajectory
from fakes.versions import finish, load
from torch import Tensor

from umbra.proto.errors import DivergedError, MismatchError
from umbra.proto.records import Sampling, Trajectory, pack_float32, unpack_float32, unpack_int32
from umbra.services.generator.engines.engine import EngineOutput, EngineRequest
from umbra.services.generator.engines.torch_engine import TorchEngine
from umbra.services.trainer.batch import make_batch
from umbra.services.trainer.learner import Learner
from umbra.services.trainer.make_model import make_tokenizer
from umbra.services.trainer.metrics import Row
from umbra.services.trainer.mismatch import MismatchCheck
from umbra.services.trainer.update import PolicyUpdate

VOCABULARY = len(make_tokenizer())
PROMPT, LENGTH = 12, 24
GROUPS, SIZE = 3, 3
PLAIN = Sampling(temperature=1.0, max_tokens=LENGTH)


@dataclass
class Generator:
    """The torch engine; what it does wrong is put into its parts."""

    model: Any
    samplings: Sequence[Sampling] = (PLAIN,)  # of the groups, in turn
    says: Sequence[Sampling] = ()  # what it writes down instead

    def __post_init__(self) -> None:
        torch.set_num_threads(1)
        self.engine = TorchEngine(
            self.model, stop_ids=[], slots=GROUPS * SIZE, max_context=64, version=0
        )

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        load(self.engine, weights.items(), version, "keep")

    def batch(self, step: int, between: Callable[[], None] = lambda: None) -> list[Trajectory]:
        """One batch; `between` happens in the middle of all samples."""
        draw = torch.Generator().manual_seed(step)
        prompts = torch.randint(0, VOCABULARY, (GROUPS, PROMPT), generator=draw).tolist()
        names = {f"s{step}-{g}-{m}": prompts[g] for g in range(GROUPS) for m in range(SIZE)}
        self.engine.submit(
            EngineRequest(
                name, prompt, self.samplings[number // SIZE % len(self.samplings)], LENGTH
            )
            for number, (name, prompt) in enumerate(names.items())
        )
        for _ in range(LENGTH // 2):
            assert not self.engine.poll()
        between()
        done = finish(self.engine)
        made = [self.trajectory(output, names[output.request_id]) for output in done]
        return sorted(made, key=lambda t: t.sample_id)

    def trajectory(self, output: EngineOutput, prompt: list[int]) -> Trajectory:
        tokens, said = output.token_ids, self.says or self.samplings
        group = output.request_id.rpartition("-")[0]
        return trajectory(
            prompt,
            tokens,
            output.logprobs,
            sample_id=output.request_id,
            group_id=group,
            spans=output.spans,
            finish_reason="length",
            reward=sum(token % 2 for token in tokens) / len(tokens) + 0.01 * tokens[0],
            sampling=said[int(group[-1]) % len(said)],
            support=output.support,
            generator="generator-0",
        )


class Trainer:
    def __init__(self, model: Any, **keys: Any) -> None:
        settings = {
            "device": "cpu", "threads": 1, "warmup_steps": 0, "learning_rate": 3e-3,
            "pack_tokens": 128, "mismatch_every": 2, **keys,
        }  # fmt: skip
        with constants(settings) as keys:
            config = configured(Path("m"), **keys)
            self.learner = Learner(model, config.trainer, steps=20)
            check = MismatchCheck(config, self.learner)
            self.update = PolicyUpdate(config, self.learner, None, check)
        self.version = 0

    def train(self, trajectories: Sequence[Trajectory]) -> Row:
        batch = make_batch(list(trajectories), VOCABULARY)
        row = self.update(batch, self.version, lambda: True)
        assert row is not None
        self.version += 1
        return row

    def weights(self) -> dict[str, Tensor]:
        return {n: p.detach().clone() for n, p in self.learner.model.named_parameters()}


def corrupted(model: Any) -> Any:
    """With two experts of each layer exchanged, as a wrong order on loading leaves them."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name and parameter.dim() == 3:
                parameter[[0, 1]] = parameter[[1, 0]].clone()
    return model


HOTTER = Sampling(temperature=0.7, max_tokens=LENGTH)
FAULTS: dict[str, Callable[[Any], Generator]] = {
    "experts": lambda twin: Generator(corrupted(twin)),
    "temperature": lambda twin: Generator(twin, [HOTTER], says=[PLAIN]),
}


def broken(cause: str) -> tuple[Any, Generator]:
    """The trainer's model, and a generator of the same weights with this fault, if it is one."""
    model = ARCHITECTURES["qwen3-moe" if "experts" in cause else "llama"].model()
    return model, FAULTS.get(cause, Generator)(copy.deepcopy(model))


@pytest.mark.parametrize("cause", ["none", "none, experts"])
def test_what_agrees_goes_on(cause: str) -> None:
    """Three versions, each in use at both sides: on-policy tokens of all of them are compared."""
    model, generator = broken(cause)
    trainer = Trainer(model, mismatch_every=1)
    for step in range(3):
        row = trainer.train(generator.batch(step))
        assert row["mismatch/compared"] == GROUPS * SIZE * LENGTH
        assert 0 <= (row["mismatch/judged"] or 0) < 1e-7
        generator.load(trainer.weights(), trainer.version)


@pytest.mark.parametrize("cause", [*FAULTS])
def test_a_generator_that_differs_ends_the_run_before_anything_is_learned(cause: str) -> None:
    model, generator = broken(cause)
    trainer = Trainer(model)
    before = trainer.weights()
    batch = generator.batch(0)
    with pytest.raises(MismatchError) as caught:
        trainer.train(batch)
    told = str(caught.value)
    assert told.startswith("stopped before step 1: generator generator-0 and the trainer do not")
    assert "above 0.0001 (trainer.max_mismatch, float32); worst at token " in told
    assert "of the response of sample s0-" in told
    assert "version 0): log-probability -" in told
    assert caught.value.exit_code == DivergedError.exit_code == 7
    torch.testing.assert_close(trainer.weights(), before, atol=0, rtol=0)


def test_the_token_that_is_named_is_the_worst() -> None:
    model, generator = broken("none")
    batch = generator.batch(0)
    logprobs = unpack_float32(batch[4].logprobs)
    for at, off in ((5, 2.0), (6, 9.0), (7, 3.0)):
        logprobs[at] -= off
    batch[4] = msgspec.structs.replace(batch[4], logprobs=pack_float32(logprobs))
    token = unpack_int32(batch[4].response_ids)[6]
    said = f"worst at token 6 of the response of sample {batch[4].sample_id} .id {token}, version 0"
    with pytest.raises(MismatchError, match=f"{said}.*{logprobs[6]:.4g} by the generator"):
        Trainer(model).train(batch)


@pytest.mark.parametrize("arrives", [True, False])
def test_an_adapter_that_never_arrives_ends_the_run_at_the_first_push(arrives: bool) -> None:
    model, generator = broken("none")
    base = [(name, tensor.detach().clone()) for name, tensor in model.named_parameters()]
    trainer = Trainer(model, learning_rate=1e-2, mismatch_every=1, lora_rank=4)
    trainer.train(generator.batch(0))
    generator.load(trainer.learner.weights() if arrives else dict(base), 1)
    with nullcontext() if arrives else pytest.raises(MismatchError, match="stopped before step 2"):
        trainer.train(generator.batch(1))


def test_tokens_after_an_update_in_flight_are_not_compared() -> None:
    """Their cache is of older weights, so they differ for a reason; those before them count."""
    model, generator = broken("none")
    trainer = Trainer(model, learning_rate=3e-2, mismatch_every=1)
    assert trainer.train(generator.batch(0))["mismatch/compared"] == GROUPS * SIZE * LENGTH
    new = trainer.weights()
    mixed = generator.batch(1, between=lambda: generator.load(new, 1))
    assert [span.version for span in mixed[0].spans] == [0, 1]
    row = trainer.train(mixed)
    assert row["mismatch/compared"] == 0, "none of these samples began at version 1"
    assert (row["mismatch/k3"] or 0) > 1e-4, "they are far apart"


@pytest.mark.parametrize("late", [False, True], ids=["agrees", "temperature changes"])
def test_where_generation_runs_ahead_weights_are_kept_aside(late: bool) -> None:
    """Every sample is two versions old when it is trained on, so none is ever on-policy.

    1. The weights of a version are kept. 2. Tokens of it come two steps later. Result: they are
    compared with these weights, training is as without, and a fault that begins late is found.
    """
    model, generator = broken("none")
    plain = Trainer(copy.deepcopy(model), mismatch_every=0, max_mismatch=1e9)
    trainer = Trainer(model)
    waiting: list[list[Trajectory]] = [generator.batch(0), generator.batch(1)]
    compared: list[float] = []
    ends = pytest.raises(MismatchError, match=r"version [67]\)") if late else nullcontext()
    with ends:
        for step in range(2, 12):
            if late and step == 8:
                generator.samplings = [Sampling(temperature=0.8, max_tokens=LENGTH)]
                generator.says = [PLAIN]
            waiting.append(generator.batch(step))
            batch = waiting.pop(0)
            row = trainer.train(batch)
            compared.append(row["mismatch/compared"] or 0)
            assert (row["mismatch/judged"] or 0) < 1e-7
            plain.train(batch)
            torch.testing.assert_close(trainer.weights(), plain.weights(), atol=0, rtol=0)
            generator.load(trainer.weights(), trainer.version)
    assert trainer.version >= 6
    assert late or sum(count > 0 for count in compared[3:]) >= 2, compared


@pytest.mark.parametrize("wrong", [False, True], ids=["agrees", "temperature"])
@pytest.mark.parametrize(
    "samplings",
    [
        [{"top_k": 40, "top_p": 0.8}],
        [{"top_k": 20, "min_p": 0.1}],
        [{"temperature": 0.4}, {"temperature": 0.9}, {"temperature": 1.6}],
    ],
    ids=["top_p", "min_p", "mixed"],
)
def test_logprobs_of_each_distribution_are_compared_as_such(
    samplings: list[dict[str, Any]], wrong: bool
) -> None:
    """Of one that is cut, and of groups that are sampled at temperatures of their own."""
    model, generator = broken("none")
    generator.samplings = [Sampling(max_tokens=LENGTH, **how) for how in samplings]
    if wrong:
        generator.says = generator.samplings
        generator.samplings = [
            msgspec.structs.replace(how, temperature=0.7 * how.temperature)
            for how in generator.samplings
        ]
    trainer, batch = Trainer(model), generator.batch(0)
    if wrong:
        with pytest.raises(MismatchError):
            trainer.train(batch)
        return
    row = trainer.train(batch)
    assert row["mismatch/compared"] == GROUPS * SIZE * LENGTH
    assert (row["mismatch/judged"] or 0) < 1e-7
    assert (row["mismatch/k3"] or 0) < 1e-7, "the loss is of the same distribution"
