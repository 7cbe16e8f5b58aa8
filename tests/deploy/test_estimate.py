"""Estimates of memory: of a step as measured, of processes by their settings, and verdicts."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from fakes.architectures import ARCHITECTURES
from fakes.commands import SEARCH, Popen
from fakes.constants import constants
from fakes.full_rows import RowShape, full_rows
from fakes.slowness import limit
from programs.memory_peak import Case
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from umbra.deploy.check.aside import count_of
from umbra.deploy.check.estimate import (
    Estimate,
    _pass,  # pyright: ignore[reportPrivateUsage]
    fullest,
    needs,
    peak,
    published,
)
from umbra.deploy.check.machine import GIB, Machine
from umbra.deploy.check.model_sizes import PLAIN, ModelSizes, cache_numbers, count_plain, sizes_of
from umbra.proto.errors import UsageError
from umbra.services.config import RunConfig, TrainerConfig
from umbra.services.config.loader import load_config
from umbra.services.config.rules import check_feasible
from umbra.services.modeling.architectures import PROVEN
from umbra.services.modeling.lora import add_adapter
from umbra.services.modeling.micro_batch import Tokens
from umbra.services.modeling.packing import pack
from umbra.services.trainer.distributed import sharding
from umbra.services.trainer.learner import Learner

# -- a step, as measured ---------------------------------------------------------------------------

PROGRAM = Path(__file__).parents[1] / "programs" / "memory_peak.py"
LEAST, MOST = 0.95, 1.3  # times the measured bytes

SMALL: dict[str, Any] = {
    "vocab_size": 2000, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip
LARGE_VOCABULARY = {**SMALL, "vocab_size": 40_000, "num_hidden_layers": 1}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
CASES = {
    "short rows": Case("Qwen3", SMALL, 4, 256),
    "a long row": Case("Qwen3", SMALL, 1, 1024),
    "recomputed": Case("Qwen3", SMALL, 4, 256, {"activation_checkpointing": True}),
    "bf16": Case("Qwen3", SMALL, 4, 256, {"precision": "bf16"}),
    "an adapter": Case("Qwen3", SMALL, 4, 256, {"lora_rank": 8}),
    "all logits": Case("Qwen3", LARGE_VOCABULARY, 2, 256),
    "logits in chunks": Case("Qwen3", LARGE_VOCABULARY, 2, 256, {"logits_mib": 16.0}),
    "experts": Case("Qwen3Moe", {**SMALL, "num_hidden_layers": 3, **EXPERTS}, 4, 256),
    "windows": Case("Gemma2", {**SMALL, "sliding_window": 128}, 2, 256),
}


def sized(config: Any, trainer: TrainerConfig) -> ModelSizes:
    return sizes_of(config, count_of(config, trainer))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_step_takes_no_more_than_is_estimated() -> None:
    """Each case is measured by the kernel, in another process."""
    lines = [json.dumps(dataclasses.asdict(case)) for case in CASES.values()]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    env = {**os.environ, "PYTHONPATH": SEARCH}
    program = Popen([sys.executable, str(PROGRAM)], text=True, env=env, **pipes)
    out, said = program.communicate("\n".join(lines), timeout=limit(300))
    assert program.returncode == 0, said
    shares: dict[str, float] = {}
    for (name, case), line in zip(CASES.items(), out.splitlines(), strict=True):
        with constants({"device": "cpu", **case.trainer}) as keys:
            trainer = TrainerConfig(**keys)
            sizes = sized(case.config(), trainer)
            device, _ = _pass(trainer, sizes, "cpu", case.rows * case.width, case.width)
        shares[name] = peak(device) / json.loads(line)["bytes"]
    assert {name: share for name, share in shares.items() if not LEAST <= share <= MOST} == {}


def test_inputs_of_recomputed_layers_are_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes that a GPU would move to the host are the bytes that a step on a CPU asks for."""
    keys = {"activation_checkpointing": True, "offload": "all", "precision": "no"}
    trainer = TrainerConfig(device="cpu", **keys)
    config = ARCHITECTURES["qwen3"].config(layers=3)
    _, (away,) = _pass(trainer, sized(config, trainer), "cuda", 2 * 32, 32)
    asked: list[int] = []

    class Counted(torch.autograd.graph.save_on_cpu):
        def __init__(self, pin_memory: bool) -> None:
            super().__init__(pin_memory)
            pack = self.pack_hook

            def counted(tensor: torch.Tensor) -> Any:
                asked.append(tensor.nbytes)
                return pack(tensor)

            self.pack_hook = counted

    monkeypatch.setattr(sharding, "save_on_cpu", Counted)
    learner = Learner(AutoModelForCausalLM.from_config(config), trainer, steps=1)
    micro = full_rows(RowShape(2, 32))
    logprobs, _ = learner.score(micro, torch.ones(len(micro.targets)))
    learner.backward(logprobs.sum())
    assert sum(asked) == away.bytes == 3 * 2 * 32 * config.hidden_size * 4


def test_ranks_that_share_rows_have_a_part_each() -> None:
    config = ARCHITECTURES["qwen3"].config(layers=3)

    def kept(ranks: int) -> int:
        trainer = TrainerConfig(sequence_parallel=ranks, ranks=ranks, precision="no")
        device, _ = _pass(trainer, sized(config, trainer), "cuda", 512, 512)
        return device[0].bytes

    assert 0.45 * kept(1) < kept(2) < 0.75 * kept(1)


@pytest.mark.parametrize("longest", [40, 300])
def test_no_micro_batch_is_fuller(longest: int) -> None:
    """Count tokens, and pairs of masked rows, of samples with random lengths."""
    tokens, width = fullest(64, 512, longest)
    assert (tokens, width) == (512, 64 if longest == 40 else 127)
    generator = torch.Generator().manual_seed(longest)
    for _ in range(10):
        lengths = torch.randint(2, longest + 1, (60,), generator=generator)
        total = int(lengths.sum())
        learned = torch.ones(total, dtype=torch.bool)
        learned[lengths.cumsum(0) - lengths] = False
        owner = torch.arange(len(lengths)).repeat_interleave(lengths)[learned]
        ids, places = torch.zeros(total, dtype=torch.int64), learned.nonzero().squeeze(1)
        for micro in pack(Tokens(ids, lengths, places, owner), pack_tokens=64, micro_tokens=512):
            rows, columns = micro.input_ids.shape
            assert rows * columns <= tokens + rows
            assert micro.segment is None or rows * columns**2 <= (tokens + rows) * width


# -- numbers of a model ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted({a.name for a in ARCHITECTURES.values()}))
def test_parameters_are_those_of_the_model(name: str) -> None:
    """Of every architecture that Umbra is right for, and a step of it can be tried."""
    config = ARCHITECTURES[name].config()
    if config.model_type not in PROVEN:
        pytest.skip("refused before it is estimated")
    model = AutoModelForCausalLM.from_config(config)
    sizes = sized(config, TrainerConfig())
    whole = sum(p.numel() for p in model.parameters())
    assert sizes.parameters == sizes.trained == whole
    assert sizes.outside[0] + sizes.layers * sizes.layer[0] >= whole
    assert count_plain(config, TrainerConfig()) in (None, count_of(config, TrainerConfig()))
    if name in ("qwen3", "qwen3-moe"):
        adapter = TrainerConfig(lora_rank=4)
        add_adapter(model, adapter, seed=0)
        sizes = sized(config, adapter)
        assert sizes.parameters == whole
        assert sizes.trained == sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert 0 < sizes.trained < whole


@pytest.mark.parametrize("kind", PLAIN)
def test_models_that_are_counted_without_a_build(kind: str) -> None:
    """Counts and a build agree, with each adapter; whatever else is left to the build."""
    sizes: dict[str, Any] = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 101,
        "num_key_value_heads": 2, "intermediate_size": 48, "pad_token_id": None,
    }  # fmt: skip
    usual: tuple[dict[str, Any], ...] = ({}, {"tie_word_embeddings": True}, {"head_dim": 24})
    unusual: tuple[dict[str, Any], ...] = (
        {"hidden_act": "gelu"},
        {"attention_bias": True, "mlp_bias": True},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        {"dtype": "float64"},
        {"pad_token_id": 10**6},
    )
    for change in (*usual, *unusual):
        config = AutoConfig.for_model(kind, **sizes | change)
        for rank, targets in ((0, []), (4, []), (4, ["q_proj", "down_proj"]), (4, ["lm_head"])):
            trainer = TrainerConfig(lora_rank=rank, lora_targets=targets)
            plain = count_plain(config, trainer)
            assert (plain is not None) == (change in usual and targets != ["lm_head"])
            assert plain is None or plain == count_of(config, trainer)


def test_numbers_in_the_cache() -> None:
    assert cache_numbers(ARCHITECTURES["qwen3"].config(), latent=True) == 2 * 2 * 1 * 32
    latent = ARCHITECTURES["deepseek-v3"].config()
    compressed = latent.kv_lora_rank + latent.qk_rope_head_dim
    assert cache_numbers(latent, latent=True) == 2 * compressed
    head = latent.qk_nope_head_dim + latent.qk_rope_head_dim + latent.v_head_dim
    assert cache_numbers(latent, latent=False) == 2 * latent.num_attention_heads * head


# -- processes by their settings -------------------------------------------------------------------

GB, GPU, HOST = 10**9, 10**12, 10**15
SIZES = ModelSizes(
    parameters=10 * GB, adapter=0, trained=10 * GB, outside=(2 * GB, 2 * GB),
    layer=(8 * GB, 8 * GB), largest=8 * GB, layers=1, hidden=100, vocabulary=100,
    cache=1000, activations=2000, config=Qwen3Config(),
)  # fmt: skip
ADAPTER = msgspec.structs.replace(SIZES, adapter=2 * 10**6)
SMALLER = msgspec.structs.replace(SIZES, parameters=3 * GB)
TAUGHT = msgspec.structs.replace(SIZES, teachers=(SMALLER, SMALLER))


def settings(*overrides: str) -> RunConfig:
    rows = ["trainer.pack_tokens=512", "trainer.micro_tokens=1024", "generator.max_context=513"]
    return load_config(overrides=["model.path=m", *rows, *overrides], environ={})


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            "checkpoint.every=10",
            {"weights, float32": 40, "gradients, float32": 40, "moments, adamw": 80,
             "host: copy for checkpoints": 120, "masks and scores": 0, "gathered layers": None},
        ),
        (
            "trainer.ranks=2",
            {"weights, float32": 20, "moments, adamw": 40, "gathered parameters": 4,
             "gathered gradients": 4, "gathered layers": 3 * 2 * 8,
             "a layer's gradients while they are summed": (2 + 4 + 4 + 2) * 8},
        ),
        (
            "trainer.ranks=2 trainer.device=cpu",
            {"host: gathered layers": 4 * 8, "host: rows of a layer while it is read": 4 * 4},
        ),
        (
            "trainer.ranks=2 trainer.weights=bf16",
            {"weights, bfloat16": 10, "float32 copies": 20, "gradients, float32": 20,
             "gradients of a micro-batch": 10, "host: weights kept aside": 10},
        ),
        (
            "trainer.ranks=2 trainer.weights=bf16 trainer.offload=optimizer",
            {"weights, bfloat16": 10, "gradients of a micro-batch": 10, "float32 copies": None,
             "gradients, float32": None, "moments, adamw": None, "host: float32 copies": 20},
        ),
        (
            "trainer.offload=all",
            {"weights, float32": 40, "gradients of a micro-batch": 40, "host: float32 copies": 40,
             "host: gradients, float32": 40, "host: moments, adamw": 80},
        ),
        (
            "trainer.ranks=2 trainer.offload=all",
            {"weights, float32": None, "host: weights, float32": 20, "host: float32 copies": None,
             "host: gradients, float32": 20, "host: moments, adamw": 40},
        ),
        (
            "trainer.objective=ppo_critic trainer.weights=bf16 trainer.optimizer=sgd "
            "trainer.offload=optimizer",
            {"critic: weights, float32": 40, "critic: moments, adamw": 80,
             "host: critic: moments, adamw": None},
        ),
        (
            "trainer.objective=ppo_critic trainer.offload=all trainer.ranks=2",
            {"host: critic: weights, float32": 20, "critic: moments, adamw": None},
        ),
    ],
)  # fmt: skip
def test_a_trainer_rank(keys: str, expected: dict[str, int | None]) -> None:
    check(settings(*keys.split()), SIZES, "trainer rank", expected)


@pytest.mark.parametrize(
    ("keys", "sizes", "process", "expected"),
    [
        (
            "generator.engine=vllm generator.tensor_parallel=2 generator.slots=10 "
            "generator.max_context=100 generator.device=cuda:2 weight_hub.plane=tcp",
            SIZES, "generator",
            {"weights, bfloat16": 10, "KV cache, 10 x 100 tokens": 0.001,
             "host: a fetched version": 20, "gpus": ((2, 3),)},
        ),
        (  # the base and an adapter, which is loaded from the arena
            "trainer.lora_rank=2 trainer.lora_publish=adapter", ADAPTER, "generator",
            {"weights, bfloat16": 20, "adapter": 0.004, "host: a fetched version": None},
        ),
        ('buffer.stages=["logp"] scorer.count.logp=2', SIZES, "scorer logp", {"count": 2}),
        ('buffer.stages=["ref_logp"]', SIZES, "scorer ref_logp", {"weights": 20, "count": 1}),
        ('buffer.stages=["ref_logp"]', TAUGHT, "scorer ref_logp", {"weights": 2 * 6}),
    ],
)  # fmt: skip
def test_a_generator_or_scorer(
    keys: str, sizes: ModelSizes, process: str, expected: dict[str, Any]
) -> None:
    check(settings(*keys.split()), sizes, process, expected)


def check(config: RunConfig, sizes: ModelSizes, process: str, expected: dict[str, Any]) -> None:
    """Compare items of a process, in GB; None is for one that is not there."""
    (need,) = (n for n in needs(config, sizes, gpu=GPU, host=HOST) if n.name == process)
    found: dict[str, Any] = {item.name: item.bytes / GB for item in need.device}
    found |= {f"host: {item.name}": item.bytes / GB for item in need.host}
    found |= {"gpus": need.gpus, "count": need.count}
    assert {name: found.get(name) for name in expected} == expected


def test_an_adapter_is_published_by_itself() -> None:
    alone = settings("trainer.lora_rank=2", "trainer.lora_publish=adapter")
    assert published(alone, ADAPTER, gpu=True) == 2 * 2 * 10**6
    assert published(settings("trainer.lora_rank=2"), ADAPTER, gpu=True) == 20 * GB


# -- verdicts --------------------------------------------------------------------------------------


def test_on_a_cpu_all_of_it_is_memory_of_the_host() -> None:
    found = Estimate(settings(), SIZES, Machine(host=HOST, shm=HOST))
    assert not found.loads
    assert all(not need.device and not need.gpus for need in found.needs)
    assert found.host > 160 * GB
    assert not found.faults


def machine(gpu: int = GPU, *, host: int = 10**13, shm: int = 10**13) -> Machine:
    return Machine((gpu,), "g", host, shm)


@pytest.mark.parametrize(
    ("on", "keys", "parts"),
    [
        (
            machine(100 * GB), ["generator.device=cuda:1"],
            ["GPU 0 has 93.1 GiB (g), a trainer rank needs", "moments", "trainer.ranks"],
        ),
        (
            machine(179 * GB), [],
            ["trainer rank and generator need", "give the generator other GPUs"],
        ),
        (machine(shm=30 * GB), [], ["/dev/shm has 27.9 GiB", "37.3 GiB", "weight_hub.slots = 2"]),
        (machine(host=100 * GB), [], ["the host has 93.1 GiB of memory"]),
        (
            machine(25 * GB), ["generator.engine=vllm", "generator.max_context=1000000"],
            ["room for 0.0 sequences", "generator.max_context"],
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_names_the_key_to_change(
    on: Machine, keys: list[str], parts: list[str]
) -> None:
    text = "; ".join(Estimate(settings(*keys), SIZES, on).faults)
    assert [part for part in parts if part not in text] == []


def test_what_the_sums_do_not_know_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="expert_parallel = 2: the estimate"):
        Estimate(settings("trainer.expert_parallel=2"), SIZES, machine())


def test_room_for_a_quarter_of_the_slots_is_told() -> None:
    """Before, it is in the short form alone, beside what to change for more memory."""
    keys = ["generator.engine=vllm", "generator.device=cuda:1", "generator.max_context=100000"]
    for slots in ("128", "2000", "20000"):
        run = settings(*keys, f"generator.slots={slots}")
        found = Estimate(run, SIZES, machine(250 * GB))
        assert not found.faults
        assert found.room is not None
        assert (found.room < int(slots) / 4) == bool(found.notes)
        assert f"KV cache has {found.room:.0f} full contexts; for more room, " in found.in_short()
    assert f"of generator.slots = {slots}: lower generator.max_context" in found.notes[0]


# -- the recipes for real models -------------------------------------------------------------------

RECIPES = sorted((Path(__file__).parents[2] / "examples" / "recipes").glob("*.toml"))


def qwen3(parameters: float, hidden: int, units: int, layers: int, heads: int, **more: Any) -> Any:
    """Return the published number of parameters, and config.json, of a model."""
    known: dict[str, Any] = {
        "vocab_size": 151_936, "head_dim": 128, "max_position_embeddings": 40_960,
        "tie_word_embeddings": False, "num_key_value_heads": 8, **more,
    }  # fmt: skip
    kind = Qwen3MoeConfig if "num_experts" in more else Qwen3Config
    sizes = {"hidden_size": hidden, "intermediate_size": units, "num_hidden_layers": layers}
    return parameters, kind(num_attention_heads=heads, **sizes, **known)


MODELS = {
    "Qwen3-0.6B": qwen3(0.596e9, 1024, 3072, 28, 16, tie_word_embeddings=True),
    "Qwen3-8B": qwen3(8.19e9, 4096, 12_288, 36, 32),
    "Qwen3-32B": qwen3(32.76e9, 5120, 25_600, 64, 64),
    "Qwen3-30B-A3B": qwen3(
        30.53e9, 2048, 6144, 48, 32, num_key_value_heads=4, norm_topk_prob=True, num_experts=128,
        num_experts_per_tok=8, moe_intermediate_size=768,
    ),
}  # fmt: skip


@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_fits_where_it_says(path: Path) -> None:
    """On H100s, in the least of machines with eight such GPUs, by the model's config alone."""
    eight = {"host": 1800 * GIB, "shm": 512 * GIB}
    h100s = msgspec.structs.replace(Machine.with_gpu("h100-80"), **eight)
    config = load_config(path, environ={})
    check_feasible(config)
    published_parameters, model = MODELS[config.model.path]
    sizes = sized(model, config.trainer)
    assert sizes.parameters == pytest.approx(published_parameters, rel=1e-3)
    found = Estimate(config, sizes, h100s)
    assert not found.faults, found.faults
    assert max(found.loads) == (0 if path.stem.endswith("-1gpu") else 7)
