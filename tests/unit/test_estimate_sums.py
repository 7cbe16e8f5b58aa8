"""`umbra check`: sums over settings, the fullest micro-batch, and verdicts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from umbra.deploy.check import rank
from umbra.deploy.check.fit import GPUS, Machine, estimate, gpu_bytes
from umbra.deploy.check.items import GIB, Facts, ModelSizes, PassPeaks, RowShape, Sized
from umbra.deploy.check.needs import arena, fullest, needs
from umbra.deploy.check.trace import full_rows
from umbra.proto.errors import UsageError
from umbra.services.config import RunConfig
from umbra.services.config.loader import load_config
from umbra.services.modeling.packing import pack


def settings(*overrides: str) -> RunConfig:
    return load_config(overrides=["model.path=m", *overrides], environ={})


@pytest.mark.parametrize(
    ("pack_tokens", "micro_tokens", "max_context", "expected"),
    [
        (256, 4096, 129, [RowShape(16, 256, True)]),
        (
            256,
            4096,
            1025,
            [RowShape(8, 511, True), RowShape(9, 455, True), RowShape(4, 1024, False)],
        ),
        (
            256,
            512,
            1025,
            [RowShape(1, 511, True), RowShape(2, 256, True), RowShape(1, 1024, False)],
        ),
    ],
)
def test_the_fullest_micro_batch(
    pack_tokens: int, micro_tokens: int, max_context: int, expected: list[RowShape]
) -> None:
    config = settings(
        f"trainer.pack_tokens={pack_tokens}",
        f"trainer.micro_tokens={micro_tokens}",
        f"generator.max_context={max_context}",
    )
    assert fullest(config) == expected


@pytest.mark.parametrize("longest", [40, 100, 300])
def test_no_micro_batch_is_fuller(longest: int) -> None:
    """Whatever the lengths of the samples: neither tokens nor pairs of a masked row."""
    config = settings(
        "trainer.pack_tokens=64", "trainer.micro_tokens=512", f"generator.max_context={longest}"
    )
    known = fullest(config)
    generator = torch.Generator().manual_seed(longest)
    for _ in range(50):
        lengths = torch.randint(2, longest + 1, (60,), generator=generator)
        for micro in pack(_tokens(lengths), pack_tokens=64, micro_tokens=512):
            rows, width = micro.input_ids.shape
            packed = micro.segment is not None
            assert rows * width <= max(r.count * (r.width + 1) for r in known)
            assert not packed or rows * width**2 <= max(
                r.count * r.width**2 for r in known if r.packed
            )


def _tokens(lengths: torch.Tensor) -> Any:
    from umbra.services.modeling.micro_batch import Tokens

    total = int(lengths.sum())
    starts = lengths.cumsum(0) - lengths
    learned = torch.ones(total, dtype=torch.bool)
    learned[starts] = False
    owner = torch.arange(len(lengths)).repeat_interleave(lengths)
    return Tokens(
        torch.zeros(total, dtype=torch.int64),
        lengths,
        learned.nonzero().squeeze(1),
        owner[learned],
    )


def test_full_rows_are_full() -> None:
    packed, alone = full_rows(RowShape(3, 16)), full_rows(RowShape(3, 16, packed=False))
    for micro in (packed, alone):
        assert micro.input_ids.shape == (3, 16)
        assert micro.tokens == len(micro.targets) == 48
    assert packed.segment is not None
    assert alone.segment is None


GB = 10**9
SIZES = ModelSizes((Sized("w", (8, 10**9), True, 0), Sized("e", (2, 10**9), True, -1)), 1000, 100)
FACTS = Facts(
    SIZES,
    training=PassPeaks(10 * GB, 2 * GB, 3 * GB, 12 * GB, 14 * GB),
    scoring=PassPeaks(1 * GB, 0, 1 * GB, 0, 0),
    prefill=PassPeaks(1 * GB, 0, 1 * GB, 0, 0),
    rows=RowShape(2, 512, packed=True),
)


def amounts(config: RunConfig, *, gpu: bool = True) -> dict[str, int]:
    """Bytes of the trainer, by purpose, GPU and host together."""
    (trainer, *_) = needs(config, FACTS, gpu=gpu)
    return {item.name: item.bytes for item in (*trainer.device, *trainer.host)}


def test_a_trainer_on_one_gpu() -> None:
    found = amounts(settings("checkpoint.every=10"))
    assert found["weights, float32"] == 40 * GB
    assert found["gradients, float32"] == 40 * GB
    assert found["moments, adamw"] == 80 * GB
    assert found["copy for checkpoints"] == 120 * GB
    assert found["activations, 2 x 512 tokens"] == 8 * GB
    assert found["masks and scores"] == 2 * GB
    assert not any(name.startswith("gathered") for name in found)


def test_ranks_share_what_is_sharded() -> None:
    found = amounts(settings("trainer.ranks=2"))
    assert found["weights, float32"] == 20 * GB
    assert found["moments, adamw"] == 40 * GB
    assert found["gathered parameters"] == found["gathered gradients"] == 2 * 2 * GB
    assert found["a layer, gathered"] == 2 * 8 * GB
    assert found["the next one and its buffer"] == 2 * 2 * 8 * GB
    assert found["a layer's gradients, and a buffer"] == (2 + 4) * 8 * GB
    assert found["a layer's gradients, summed"] == (2 + 4 + 4 + 2) * 8 * GB
    assert found["gradients outside of layers, summed"] == (4 + 2) * 2 * GB
    on_cpu = amounts(settings("trainer.ranks=2"), gpu=False)
    assert on_cpu["the next one and its buffer"] == 0
    assert found["rows of a tensor while it is read"] == 4 * 4 * GB


def test_sgd_without_momentum_has_no_moments() -> None:
    keys = ("trainer.optimizer=sgd", "trainer.betas=[0.0, 0.9]")
    assert amounts(settings(*keys))["moments, sgd"] == 0
    assert amounts(settings("trainer.optimizer=sgd"))["moments, sgd"] == 40 * GB


def test_a_critic_of_its_own_counts_once_more() -> None:
    one, two = amounts(settings()), amounts(settings("trainer.objective=ppo_critic"))
    assert two["critic: moments, adamw"] == one["moments, adamw"]


def places(*overrides: str) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of the trainer on its GPU and in host memory, by purpose."""
    (trainer, *_) = needs(settings(*overrides), FACTS, gpu=True)
    device, host = ({i.name: i.bytes for i in items} for items in (trainer.device, trainer.host))
    return device, host


def test_bf16_weights_have_float32_copies() -> None:
    device, host = places("trainer.weights=bf16", "trainer.ranks=2")
    assert device["weights, bfloat16"] == 10 * GB
    assert device["float32 copies"] == device["gradients, float32"] == 20 * GB
    assert device["gradients of a micro-batch"] == 10 * GB
    assert device["of these, outside of layers"] == 2 * GB
    assert host["weights kept aside"] == 10 * GB
    device, _ = places("trainer.weights=bf16", "trainer.offload=optimizer", "trainer.ranks=2")
    assert {"weights, bfloat16", "gradients of a micro-batch"} <= device.keys()
    assert not {"float32 copies", "gradients, float32", "moments, adamw"} & device.keys()


@pytest.mark.parametrize(
    ("offload", "ranks", "away", "here"),
    [
        ("optimizer", 1, {"float32 copies", "gradients", "moments"}, {"weights"}),
        ("all", 1, {"float32 copies", "gradients", "moments"}, {"weights"}),
        ("optimizer", 2, {"float32 copies", "gradients", "moments"}, {"weights"}),
        ("all", 2, {"weights", "gradients", "moments"}, set()),
        ("activations", 2, set(), {"weights", "gradients", "moments"}),
    ],
)
def test_what_is_offloaded_is_in_host_memory(
    offload: str, ranks: int, away: set[str], here: set[str]
) -> None:
    device, host = places(f"trainer.offload={offload}", f"trainer.ranks={ranks}")
    found = [
        {n.partition(",")[0] for n in place} & (away | here | {"float32 copies"})
        for place in (device, host)
    ]
    assert found == [here, away]
    assert ("gradients of a micro-batch" in device) == ("float32 copies" in away)


def test_a_critic_has_float32_weights_beside_its_moments() -> None:
    keys = ("trainer.objective=ppo_critic", "trainer.weights=bf16", "trainer.optimizer=adamw8bit")
    device, host = places(*keys, "trainer.offload=optimizer")
    assert device["critic: weights, float32"] == 40 * GB
    assert device["critic: moments, adamw"] == 80 * GB
    assert not any(name.startswith("critic") for name in host)
    device, host = places(*keys, "trainer.offload=all", "trainer.ranks=2")
    assert host["critic: weights, float32"] == 20 * GB
    assert "critic: moments, adamw" not in device


def test_moments_in_8_bits_are_those_that_are_kept() -> None:
    """Widths that are narrow, that blocks fill and that they don't; and vectors."""
    adamw8bit = pytest.importorskip("umbra.services.trainer.adamw8bit")
    shapes = [(7, 512), (5, 300), (9, 31), (40,), (3, 16, 40)]
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = adamw8bit.AdamW8bit(parameters, 1e-3, (0.9, 0.95), 0.0)
    kept = 0
    for parameter in parameters:
        moments = {name: optimizer._zeros(parameter, name) for name in adamw8bit.MOMENTS}
        state = optimizer.unpack(parameter, moments)
        kept += sum(t.nbytes for t in state.values())
    sizes = ModelSizes(tuple(Sized("", shape, True, 0) for shape in shapes), 0, 1)
    config = settings("trainer.optimizer=adamw8bit")
    assert rank.moments(config.trainer, sizes) == kept
    assert rank.BLOCK == adamw8bit.BLOCK


def test_a_generator_and_its_cache() -> None:
    config = settings(
        "generator.engine=vllm", "generator.tensor_parallel=2", "generator.slots=10",
        "generator.max_context=100", "generator.device=cuda:2",
    )  # fmt: skip
    _, generator = needs(config, FACTS, gpu=True)
    found = {item.name: item.bytes for item in (*generator.device, *generator.host)}
    assert generator.gpus == ((2, 3),)
    assert found["weights, bfloat16"] == 10 * GB
    assert found["KV cache, 10 x 100 tokens"] == 2 * 1000 * 1000 // 2
    assert found["staging of a version"] == 20 * GB


def test_an_adapter_that_is_published_by_itself() -> None:
    adapter = Sized("a", (2, 10**6), True, 0, adapter=True)
    sizes = ModelSizes((*SIZES.tensors, adapter), 1000, 100)
    facts = dataclasses.replace(FACTS, sizes=sizes)
    config = settings("trainer.lora_rank=2", "trainer.lora_publish=adapter")
    assert arena(config, sizes, gpu=True).bytes == 2 * 2 * 2 * 10**6
    _, generator = needs(config, facts, gpu=True)
    found = {item.name: item.bytes for item in (*generator.device, *generator.host)}
    assert found["weights, bfloat16"] == 20 * GB, "the base"
    assert found["adapter"] == 2 * 2 * 10**6
    assert found["staging of a version"] == 2 * 2 * 10**6
    merged = settings("trainer.lora_rank=2")
    assert arena(merged, sizes, gpu=True).bytes == 2 * 20 * GB


def test_scorers_with_a_model_are_counted() -> None:
    config = settings('buffer.stages=["ref_logp", "logp"]', "scorer.logp=2")
    names = {need.name: need.count for need in needs(config, FACTS, gpu=True)}
    assert names["scorer ref_logp"] == 1
    assert names["scorer logp"] == 2


def test_on_a_cpu_all_of_it_is_memory_of_the_host() -> None:
    found = estimate(settings(), FACTS, Machine(0, host=10**15, shm=10**15))
    assert not found.gpus
    assert all(not need.device and not need.gpus for need in found.needs)
    assert found.host > 160 * GB
    assert found.fits


def fault(machine: Machine, *overrides: str) -> str:
    found = estimate(settings(*overrides), FACTS, machine)
    assert not found.fits
    return "; ".join(found.faults)


LARGE = Machine(10**12, "large", 10**13, 10**13)


@pytest.mark.parametrize(
    ("machine", "overrides", "parts"),
    [
        (
            Machine(100 * GB, "g", 10**13, 10**13),
            ["generator.device=cuda:1"],
            ["GPU 0 has 93.1 GiB (g), of which a trainer rank needs", "moments", "trainer.ranks"],
        ),
        (
            Machine(179 * GB, "g", 10**13, 10**13),
            [],
            ["trainer rank and generator need", "give the generator other GPUs"],
        ),
        (
            dataclasses.replace(LARGE, shm=30 * GB),
            [],
            ["/dev/shm has 27.9 GiB", "37.3 GiB", "weight_hub.slots = 2"],
        ),
        (dataclasses.replace(LARGE, host=100 * GB), [], ["the host has 93.1 GiB of memory"]),
        (
            Machine(25 * GB, "g", 10**13, 10**13),
            ["generator.engine=vllm", "generator.max_context=1000000"],
            ["room for 0.0 sequences", "generator.max_context"],
        ),
    ],
)
def test_what_does_not_fit_names_the_key_to_change(
    machine: Machine, overrides: list[str], parts: list[str]
) -> None:
    text = fault(machine, *overrides)
    for part in parts:
        assert part in text


def test_room_for_fewer_sequences_than_slots_is_told() -> None:
    keys = ("generator.engine=vllm", "generator.device=cuda:1", "generator.max_context=100000")
    found = estimate(settings(*keys), FACTS, dataclasses.replace(LARGE, gpu=250 * GB))
    assert found.fits
    assert "sequences of generator.max_context = 100000" not in "".join(found.notes)
    keys = (*keys, "generator.slots=2000")
    found = estimate(settings(*keys), FACTS, dataclasses.replace(LARGE, gpu=250 * GB))
    assert "of generator.slots = 2000" in found.notes[0]


def test_the_gpus_that_are_known() -> None:
    for name in GPUS:
        printed = float(name.rpartition("-")[2])
        assert 0.9 * printed * 1e9 / GIB <= GPUS[name] <= 1.03 * printed
        assert gpu_bytes(name) == int(GPUS[name] * GIB)
    with pytest.raises(UsageError, match=r"--gpu h100: known are .*h100-80"):
        gpu_bytes("h100")
