"""`umbra check`: sums over settings, the fullest micro-batch, and verdicts."""

from typing import Any

import msgspec
import pytest
import torch
from transformers import Qwen3Config

from umbra.deploy.check.estimate import Estimate, Need, fullest, needs, published
from umbra.deploy.check.machine import Machine
from umbra.deploy.check.model_sizes import ModelSizes
from umbra.services.config import RunConfig
from umbra.services.config.loader import load_config
from umbra.services.modeling.packing import pack


def settings(*overrides: str) -> RunConfig:
    rows = ["trainer.pack_tokens=512", "trainer.micro_tokens=1024", "generator.max_context=513"]
    return load_config(overrides=["model.path=m", *rows, *overrides], environ={})


@pytest.mark.parametrize(
    ("pack_tokens", "micro_tokens", "max_context", "expected"),
    [
        (256, 4096, 129, (4096, 256)),
        (256, 4096, 1025, (4096, 511)),
        (256, 512, 1025, (1024, 511)),
        (256, 512, 401, (512, 400)),
    ],
)
def test_the_fullest_micro_batch(
    pack_tokens: int, micro_tokens: int, max_context: int, expected: tuple[int, int]
) -> None:
    assert fullest(pack_tokens, micro_tokens, max_context) == expected


@pytest.mark.parametrize("longest", [40, 300])
def test_no_micro_batch_is_fuller(longest: int) -> None:
    """Whatever the lengths of the samples: neither tokens nor pairs of a masked row."""
    tokens, width = fullest(64, 512, longest)
    generator = torch.Generator().manual_seed(longest)
    for _ in range(10):
        lengths = torch.randint(2, longest + 1, (60,), generator=generator)
        for micro in pack(_tokens(lengths), pack_tokens=64, micro_tokens=512):
            rows, columns = micro.input_ids.shape
            assert rows * columns <= tokens + rows
            assert micro.segment is None or rows * columns**2 <= (tokens + rows) * width


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


GB, GPU = 10**9, 10**12
SIZES = ModelSizes(
    parameters=10 * GB, adapter=0, trained=10 * GB, outside=(2 * GB, 2 * GB),
    layer=(8 * GB, 8 * GB), largest=8 * GB, layers=1, hidden=100, vocabulary=100,
    cache=1000, activations=2000, config=Qwen3Config(),
)  # fmt: skip
HOST = 10**15


def by_name(need: Need) -> dict[str, int]:
    return {item.name: item.bytes for item in (*need.device, *need.host)}


def amounts(config: RunConfig, *, gpu: bool = True) -> dict[str, int]:
    (trainer, *_) = needs(config, SIZES, gpu=GPU * gpu, host=HOST)
    return by_name(trainer)


def test_a_trainer_on_one_gpu() -> None:
    found = amounts(settings("checkpoint.every=10"))
    assert found["weights, float32"] == 40 * GB
    assert found["gradients, float32"] == 40 * GB
    assert found["moments, adamw"] == 80 * GB
    assert found["copy for checkpoints"] == 120 * GB
    assert found["activations, 1,024 tokens in rows of 512"] > 0
    assert found["masks and scores"] == 0, "flex has none"
    assert not any(name.startswith("gathered") for name in found)


def test_ranks_share_what_is_sharded() -> None:
    found = amounts(settings("trainer.ranks=2"))
    assert found["weights, float32"] == 20 * GB
    assert found["moments, adamw"] == 40 * GB
    assert found["gathered parameters"] == found["gathered gradients"] == 2 * 2 * GB
    assert found["gathered layers"] == 3 * 2 * 8 * GB
    assert found["a layer's gradients while they are summed"] == (2 + 4 + 4 + 2) * 8 * GB
    on_cpu = amounts(settings("trainer.ranks=2"), gpu=False)
    assert on_cpu["gathered layers"] == 4 * 8 * GB
    assert found["rows of a layer while it is read"] == 4 * 4 * GB


def places(*overrides: str) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of the trainer on its GPU and in host memory, by purpose."""
    (trainer, *_) = needs(settings(*overrides), SIZES, gpu=GPU, host=HOST)
    device, host = ({i.name: i.bytes for i in items} for items in (trainer.device, trainer.host))
    return device, host


def test_bf16_weights_have_float32_copies() -> None:
    device, host = places("trainer.weights=bf16", "trainer.ranks=2")
    assert device["weights, bfloat16"] == 10 * GB
    assert device["float32 copies"] == device["gradients, float32"] == 20 * GB
    assert device["gradients of a micro-batch"] == 10 * GB
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
    keys = ("trainer.objective=ppo_critic", "trainer.weights=bf16", "trainer.optimizer=sgd")
    device, host = places(*keys, "trainer.offload=optimizer")
    assert device["critic: weights, float32"] == 40 * GB
    assert device["critic: moments, adamw"] == 80 * GB
    assert not any(name.startswith("critic") for name in host)
    device, host = places(*keys, "trainer.offload=all", "trainer.ranks=2")
    assert host["critic: weights, float32"] == 20 * GB
    assert "critic: moments, adamw" not in device


def test_a_generator_and_its_cache() -> None:
    config = settings(
        "generator.engine=vllm", "generator.tensor_parallel=2", "generator.slots=10",
        "generator.max_context=100", "generator.device=cuda:2", "weight_hub.plane=tcp",
    )  # fmt: skip
    _, generator = needs(config, SIZES, gpu=GPU, host=HOST)
    found = by_name(generator)
    assert generator.gpus == ((2, 3),)
    assert found["weights, bfloat16"] == 10 * GB
    assert found["KV cache, 10 x 100 tokens"] == 2 * 1000 * 1000 // 2
    assert found["a fetched version"] == 20 * GB


def test_an_adapter_that_is_published_by_itself() -> None:
    sizes = msgspec.structs.replace(SIZES, adapter=2 * 10**6)
    config = settings("trainer.lora_rank=2", "trainer.lora_publish=adapter")
    assert published(config, sizes, gpu=True) == 2 * 2 * 10**6
    _, generator = needs(config, sizes, gpu=GPU, host=HOST)
    found = by_name(generator)
    assert found["weights, bfloat16"] == 20 * GB, "the base"
    assert found["adapter"] == 2 * 2 * 10**6
    assert "a fetched version" not in found, "it is loaded from the arena"
    merged = settings("trainer.lora_rank=2")
    assert published(merged, sizes, gpu=True) == 20 * GB


def test_scorers_with_a_model_are_counted() -> None:
    config = settings('buffer.stages=["ref_logp", "logp"]', "scorer.count.logp=2")
    names = {need.name: need.count for need in needs(config, SIZES, gpu=GPU, host=HOST)}
    assert names["scorer ref_logp"] == 1
    assert names["scorer logp"] == 2


def test_teachers_take_what_their_own_sizes_say() -> None:
    config = settings('buffer.stages=["ref_logp", "logp"]')
    other = msgspec.structs.replace(SIZES, parameters=3 * GB)
    sizes = msgspec.structs.replace(SIZES, teachers=(other, other))
    found = {need.name: need.host for need in needs(config, sizes, gpu=0, host=HOST)}
    weights = {name: own[1].bytes // GB for name, own in found.items() if name.startswith("scorer")}
    assert weights == {"scorer ref_logp": 4 * 6, "scorer logp": 4 * 10}


def test_on_a_cpu_all_of_it_is_memory_of_the_host() -> None:
    found = Estimate(settings(), SIZES, Machine(host=10**15, shm=10**15))
    assert not found.loads
    assert all(not need.device and not need.gpus for need in found.needs)
    assert found.host > 160 * GB
    assert not found.faults


def fault(machine: Machine, *overrides: str) -> str:
    found = Estimate(settings(*overrides), SIZES, machine)
    assert found.faults
    return "; ".join(found.faults)


LARGE = Machine((10**12,), "large", 10**13, 10**13)


@pytest.mark.parametrize(
    ("machine", "overrides", "parts"),
    [
        (
            Machine((100 * GB,), "g", 10**13, 10**13),
            ["generator.device=cuda:1"],
            ["GPU 0 has 93.1 GiB (g), a trainer rank needs", "moments", "trainer.ranks"],
        ),
        (
            Machine((179 * GB,), "g", 10**13, 10**13),
            [],
            ["trainer rank and generator need", "give the generator other GPUs"],
        ),
        (
            msgspec.structs.replace(LARGE, shm=30 * GB),
            [],
            ["/dev/shm has 27.9 GiB", "37.3 GiB", "weight_hub.slots = 2"],
        ),
        (msgspec.structs.replace(LARGE, host=100 * GB), [], ["the host has 93.1 GiB of memory"]),
        (
            Machine((25 * GB,), "g", 10**13, 10**13),
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


def test_room_for_a_quarter_of_the_slots_is_told() -> None:
    """Before, it is in the short form alone, beside what to change for more memory."""
    keys = ["generator.engine=vllm", "generator.device=cuda:1", "generator.max_context=100000"]
    for slots in ("128", "2000", "20000"):
        run = settings(*keys, f"generator.slots={slots}")
        found = Estimate(run, SIZES, msgspec.structs.replace(LARGE, gpus=(250 * GB,)))
        assert not found.faults
        assert found.room is not None
        assert (found.room < int(slots) / 4) == bool(found.notes)
        assert f"KV cache has {found.room:.0f} full contexts; for more room, " in found.in_short()
    assert f"of generator.slots = {slots}: lower generator.max_context" in found.notes[0]
