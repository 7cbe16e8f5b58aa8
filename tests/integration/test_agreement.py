"""A generator that differs from the trainer on equal weights ends the run: each cause, for real.

The torch engine makes the samples and the trainer learns from them, on tiny models. In each case
one thing is broken at the generator's side.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import torch
from fakes.constants import constants
from fakes.rank_bench import as_text
from fakes.trajectories import trajectory
from fakes.versions import in_memory, load
from torch import Tensor, nn
from transformers import MistralConfig, MistralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from umbra.proto.errors import DivergedError, MismatchError
from umbra.proto.records import Sampling, Trajectory, pack_float32
from umbra.services.config.loader import load_config
from umbra.services.generator.engines.engine import EngineOutput, EngineRequest
from umbra.services.generator.engines.torch_engine import TorchEngine
from umbra.services.modeling.attention_backends import slot_mask
from umbra.services.trainer.batch import make_batch
from umbra.services.trainer.learner import Learner
from umbra.services.trainer.metrics import Row
from umbra.services.trainer.mismatch import MismatchCheck
from umbra.services.trainer.update import PolicyUpdate

VOCABULARY, PROMPT, LENGTH = 96, 12, 24
GROUPS, SIZE = 3, 3
PLAIN = Sampling(temperature=1.0, max_tokens=LENGTH)
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,  # so that attention matters
    "max_position_embeddings": 128,
}


def mistral() -> Any:
    torch.manual_seed(1)
    return MistralForCausalLM(MistralConfig(**COMMON, sliding_window=None)).eval()


def experts() -> Any:
    torch.manual_seed(2)
    mixture: Any = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = Qwen3MoeConfig(**COMMON, **mixture)
    config._attn_implementation = "sdpa"
    return Qwen3MoeForCausalLM(config).eval()


@dataclass
class Generator:
    """The torch engine; what it does wrong is put into its parts."""

    model: Any
    sampling: Sampling = PLAIN
    says: Sampling | None = None  # what it writes down instead
    record: Callable[[list[int]], list[int]] = list
    kind: type[TorchEngine] = TorchEngine
    name: str = "generator-0"
    engine: TorchEngine = field(init=False)

    def __post_init__(self) -> None:
        torch.set_num_threads(1)
        self.engine = self.kind(
            self.model, stop_ids=[], slots=GROUPS * SIZE, max_context=64, version=0
        )

    def prompts(self, step: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(step)
        return [
            torch.randint(0, VOCABULARY, (PROMPT,), generator=generator).tolist()
            for _ in range(GROUPS)
        ]

    def load(self, weights: dict[str, Tensor], version: int) -> None:
        load(self.engine, weights.items(), version, "keep")

    def batch(self, step: int, between: Callable[[], None] | None = None) -> list[Trajectory]:
        """One batch; `between` happens in the middle of all samples."""
        prompts = self.prompts(step)
        names = {f"s{step}-{g}-{m}": prompts[g] for g in range(GROUPS) for m in range(SIZE)}
        self.engine.submit(
            EngineRequest(name, prompt, self.sampling, LENGTH) for name, prompt in names.items()
        )
        done: list[EngineOutput] = []
        turns = 0
        while len(done) < len(names):
            done += self.engine.poll()
            turns += 1
            if turns == LENGTH // 2 and between is not None:
                between()
        made = [self.trajectory(output, names[output.request_id]) for output in done]
        return sorted(made, key=lambda t: t.sample_id)

    def trajectory(self, output: EngineOutput, prompt: list[int]) -> Trajectory:
        tokens = output.token_ids
        return trajectory(
            self.record(prompt),
            self.record(tokens),
            output.logprobs,
            sample_id=output.request_id,
            group_id=output.request_id.rpartition("-")[0],
            spans=output.spans,
            finish_reason="length",
            reward=sum(token % 2 for token in tokens) / len(tokens) + 0.01 * tokens[0],
            sampling=self.says or self.sampling,
            support=output.support,
            generator=self.name,
        )


class Trainer:
    def __init__(self, model: Any, **keys: Any) -> None:
        settings = {
            "device": "cpu", "threads": 1, "warmup_steps": 0, "learning_rate": 3e-3,
            "pack_tokens": 128, "mismatch_every": 2, **keys,
        }  # fmt: skip
        with constants(settings) as keys:
            overrides = [f"trainer.{k}={as_text(v)}" for k, v in keys.items()]
            config = load_config(overrides=[*overrides, "model.path=m"], environ={})
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


class Windowed(nn.Module):
    """A model that sees the last `window` positions alone."""

    def __init__(self, model: Any, window: int) -> None:
        super().__init__()
        self.inner, self.window = model, window
        self.config, self.dtype, self.device = model.config, model.dtype, model.device

    def get_input_embeddings(self) -> Any:
        return self.inner.get_input_embeddings()

    def set_attn_implementation(self, name: str) -> None:
        self.inner.set_attn_implementation(name)

    def forward(self, **inputs: Any) -> Any:
        mask, positions = inputs["attention_mask"], inputs["position_ids"][0]
        newest = positions[: len(mask.newest)]
        small = slot_mask(newest, mask.shape[-1], mask.contexts, self.window, mask.newest.dtype)
        return self.inner(**{**inputs, "attention_mask": small})


class Stale(TorchEngine):
    """An engine whose new requests find the cache of their prompts as the first weights left it."""

    old: dict[str, Tensor]

    def _pass(self, newest: Tensor, readings: Sequence[Any]) -> Tensor:
        if readings:
            now = {n: p.detach().clone() for n, p in self._model.named_parameters()}
            if not hasattr(self, "old"):
                self.old = now
            self._put(self.old)
            super()._pass(newest[:, :0], readings)
            self._put(now)
        return super()._pass(newest, [])

    def _put(self, weights: Mapping[str, Tensor]) -> None:
        manifest, data = in_memory(weights)
        self._weights.load(manifest, data)


def renumbered(ids: list[int]) -> list[int]:
    """The ids of another tokenizer for the same text."""
    return [(7 * token + 3) % VOCABULARY for token in ids]


def corrupted(model: Any) -> Any:
    """With two experts of each layer exchanged, as a wrong order on loading leaves them."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name and parameter.dim() == 3:
                parameter[[0, 1]] = parameter[[1, 0]].clone()
    return model


HOTTER = Sampling(temperature=0.7, max_tokens=LENGTH)
FAULTS: dict[str, Callable[[Any], Generator]] = {
    "window": lambda twin: Generator(Windowed(twin, 8)),
    "experts": lambda twin: Generator(corrupted(twin)),
    "temperature": lambda twin: Generator(twin, HOTTER, says=PLAIN),
    "tokenizer": lambda twin: Generator(twin, record=renumbered),
    "stale prefix cache": lambda twin: Generator(twin, kind=Stale),
}


def broken(cause: str) -> tuple[Any, Generator]:
    """The trainer's model, and a generator of the same weights with this fault, if it is one."""
    model = experts() if "experts" in cause else mistral()
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


@pytest.mark.parametrize("cause", ["window", "experts", "temperature", "tokenizer"])
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
    for name, tensor in trainer.weights().items():
        assert torch.equal(tensor, before[name])


def test_the_token_that_is_named_is_the_worst() -> None:
    model, generator = broken("none")
    trainer = Trainer(model)
    batch = generator.batch(0)
    logprobs = torch.frombuffer(bytearray(batch[4].logprobs), dtype=torch.float32).clone()
    logprobs[5:8] -= torch.tensor([2.0, 9.0, 3.0])
    batch[4] = msgspec.structs.replace(batch[4], logprobs=pack_float32(logprobs.tolist()))
    token = torch.frombuffer(bytearray(batch[4].response_ids), dtype=torch.int32)[6]
    with pytest.raises(MismatchError) as caught:
        trainer.train(batch)
    told = f"worst at token 6 of the response of sample {batch[4].sample_id} (id {token}, version 0"
    assert told in str(caught.value)
    assert f"{float(logprobs[6]):.4g} by the generator" in str(caught.value)


def test_a_stale_prefix_cache_is_noticed_once_the_weights_have_changed() -> None:
    model, generator = broken("stale prefix cache")
    trainer = Trainer(model, learning_rate=1e-2, mismatch_every=1)
    row = trainer.train(generator.batch(0))
    assert (row["mismatch/judged"] or 0) < 1e-7, "there is one version only"
    generator.load(trainer.weights(), 1)
    with pytest.raises(MismatchError, match=r"stopped before step 2: .* version 1\)"):
        trainer.train(generator.batch(1))


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
    try:
        for step in range(2, 12):
            if late and step == 8:
                generator.sampling = Sampling(temperature=0.8, max_tokens=LENGTH)
                generator.says = PLAIN
            waiting.append(generator.batch(step))
            batch = waiting.pop(0)
            row = trainer.train(batch)
            compared.append(row["mismatch/compared"] or 0)
            assert (row["mismatch/judged"] or 0) < 1e-7
            plain.train(batch)
            for (name, one), other in zip(
                trainer.weights().items(), plain.weights().values(), strict=True
            ):
                assert torch.equal(one, other), name
            generator.load(trainer.weights(), trainer.version)
    except MismatchError as error:
        assert late
        assert trainer.version >= 6
        assert "version 6)" in str(error) or "version 7)" in str(error)
    else:
        assert not late
        assert sum(count > 0 for count in compared[3:]) >= 2, compared


@pytest.mark.parametrize("wrong", [False, True], ids=["agrees", "temperature"])
@pytest.mark.parametrize("cut", [{"top_k": 40, "top_p": 0.8}, {"top_k": 20, "min_p": 0.1}])
def test_logprobs_of_a_cut_distribution_are_compared_as_such(
    cut: dict[str, Any], wrong: bool
) -> None:
    model, generator = broken("none")
    generator.sampling = Sampling(temperature=1.0, max_tokens=LENGTH, **cut)
    if wrong:
        generator.says = generator.sampling
        generator.sampling = msgspec.structs.replace(generator.sampling, temperature=0.7)
    trainer, batch = Trainer(model), generator.batch(0)
    if wrong:
        with pytest.raises(MismatchError):
            trainer.train(batch)
        return
    row = trainer.train(batch)
    assert row["mismatch/compared"] == GROUPS * SIZE * LENGTH
    assert (row["mismatch/judged"] or 0) < 1e-7
    assert (row["mismatch/k3"] or 0) < 1e-7, "the loss is of the same distribution"
