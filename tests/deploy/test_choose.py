"""What is chosen for GPUs, with made-up ones; the memory is that of the estimate."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest
from transformers import Qwen3Config

from umbra.deploy.check import choose as choosing
from umbra.deploy.check import hardware
from umbra.deploy.check.choose import choose, for_hardware, for_this_machine, in_one_line
from umbra.deploy.check.estimate import MARGIN, divide
from umbra.deploy.check.hardware import GIB, GpusSeen, Machine, this_machine
from umbra.deploy.files.run_folder import RunFolder
from umbra.deploy.run.up import other_programs
from umbra.proto.errors import StartupError, UmbraError
from umbra.services.config import RunConfig
from umbra.services.config.loader import given_keys, load_config, load_tree

ONE = Machine((8 * GIB,), "made-up", vllm=True)
FOUR = Machine((8 * GIB,) * 4, "made-up", vllm=True)
NO_VLLM = Machine((8 * GIB,), "made-up", vllm=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 2 M parameters, made for many tokens."""
    config = Qwen3Config(
        vocab_size=2048, hidden_size=128, intermediate_size=384, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=40_960,
        architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip
    directory = tmp_path_factory.mktemp("model")
    config.save_pretrained(directory)
    return directory


def test_what_the_trainer_would_refuse_on_a_cpu_is_refused_first() -> None:
    config = load_config(overrides=["trainer.weights=bf16"], environ={})
    says = "on a CPU, trainer.weights = bf16 needs trainer.precision = bf16"
    assert says in for_hardware(config, (), Machine(vllm=True)).refused


def chosen(machine: Machine, *settings: str, positions: int = 40_960) -> RunConfig:
    config = load_config(overrides=settings, environ={})
    given = given_keys(load_tree(overrides=settings, environ={}))
    return choose(config, given, machine, positions)


def test_without_a_gpu_the_defaults_are_those_of_the_page() -> None:
    before = load_config(environ={})
    after = for_hardware(before, (), Machine(vllm=True))
    generator = msgspec.structs.replace(before.generator, engine="torch")
    assert after.config == msgspec.structs.replace(before, generator=generator)
    assert not after.chosen and not after.refused


@pytest.mark.parametrize(
    ("machine", "given", "key", "value"),
    [
        (ONE, "", "generator.engine", "vllm"),
        (ONE, "", "generator.max_context", 8192),
        (ONE, "", "sampling.max_tokens", 6144),
        (ONE, "", "trainer.pack_tokens", 8192),
        (ONE, "", "trainer.micro_tokens", 8192),
        (ONE, "", "generator.device", "auto"),
        (NO_VLLM, "", "generator.engine", "torch"),
        # Long answers get a context in which they fit.
        (ONE, "sampling.max_tokens=10000", "generator.max_context", 20_000),
        (ONE, "sampling.max_tokens=30000", "generator.max_context", 40_960),
        (ONE, "generator.max_context=1000", "sampling.max_tokens", 750),
        # With several GPUs each side has its own, if there are as many.
        (FOUR, "", "generator.device", "cuda:1"),
        (FOUR, "", "trainer.micro_tokens", "auto"),
        (FOUR, "trainer.ranks=2", "generator.device", "cuda:2"),
        (FOUR, "trainer.device=cpu", "generator.device", "auto"),
        (FOUR, "generator.count=3", "generator.device", "cuda:1"),
        (FOUR, "generator.count=4", "generator.device", "auto"),
        # What the user has set stays.
        (FOUR, "generator.engine=torch", "generator.engine", "torch"),
        (FOUR, "generator.max_context=512", "generator.max_context", 512),
        (FOUR, "sampling.max_tokens=100", "sampling.max_tokens", 100),
        (FOUR, "generator.device=cuda:0", "generator.device", "cuda:0"),
        (FOUR, "trainer.micro_tokens=1024", "trainer.micro_tokens", 1024),
    ],
)
def test_what_is_chosen(machine: Machine, given: str, key: str, value: Any) -> None:
    section, _, name = key.partition(".")
    run = chosen(machine, *filter(None, [given]))
    assert getattr(getattr(run, section), name) == value


def test_generators_get_the_gpus_that_follow_the_first_one(tmp_path: Path) -> None:
    run = chosen(FOUR, "generator.count=3")
    programs = other_programs(run, RunFolder(tmp_path), "tcp://127.0.0.1:1")
    argvs = {one.name: " ".join(one.argv) for one in programs}
    assert "device=" not in argvs["generator-0"]  # the run file's own, cuda:1
    assert argvs["generator-1"].endswith("--set generator.device=cuda:2")
    assert argvs["generator-2"].endswith("--set generator.device=cuda:3")


def shared(model: Path, gpu: float, *settings: str, vllm: bool = True) -> tuple[RunConfig, str]:
    machine = Machine((int(gpu * GIB),), "made-up", vllm=vllm)
    given = given_keys(load_tree(overrides=settings, environ={}))
    return divide(chosen(machine, f"model.path={model}", *settings), given, machine)


def test_vllm_takes_what_the_trainer_leaves(model: Path) -> None:
    key, found = "gpu_memory_utilization", dict[int, float]()
    for gpu in (8, 16):
        run, _ = shared(model, gpu)
        found[gpu] = run.generator.engine_args[key]
        assert run.generator.slots == 128
    trainer = {gpu: (0.95 - share) * gpu / MARGIN for gpu, share in found.items()}
    assert trainer[8] == pytest.approx(trainer[16], abs=0.2)  # it needs as much on either
    assert 1 < trainer[8] < 4
    kept, _ = shared(model, 16, f"generator.engine_args.{key}=0.3")
    assert kept.generator.engine_args == {key: 0.3}


def test_the_torch_engine_has_as_many_slots_as_fit(model: Path) -> None:
    run, _ = shared(model, 3, vllm=False)
    assert 1 <= run.generator.slots < 128
    _, refused = shared(model, 3, "generator.slots=128", vllm=False)
    assert "A run is smaller with trainer.lora_rank" in refused
    assert "the KV cache of a generator has room for" in shared(model, 4)[1]
    unknown = ("trainer.expert_parallel=2", "trainer.ranks=2")
    assert shared(model, 8, *unknown, vllm=False)[0].generator.slots == 128


def test_who_starts_a_run_asks_another_process(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(overrides=[f"model.path={model}"], environ={})
    monkeypatch.setattr(choosing, "this_machine", lambda: ONE)
    run, told = for_this_machine(config, {"model": {"path": str(model)}})
    assert run.generator.engine_args == shared(model, 8)[0].generator.engine_args
    assert told[:2] == ["generator.engine = vllm", "generator.max_context = 8192"]
    monkeypatch.setattr(choosing, "PATIENCE_S", 0.001)
    with pytest.raises(StartupError, match="cannot be estimated how trainer and generator share"):
        for_this_machine(config, {})


def test_gpus_that_do_not_answer_are_not_taken_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent() -> NoReturn:
        raise UmbraError("it took longer than 180 s")

    monkeypatch.setattr(hardware, "driver_version", lambda: "550.1")
    monkeypatch.setattr(hardware, "gpus_seen", silent)
    with pytest.raises(StartupError, match="what GPUs it sees: it took longer than 180 s"):
        this_machine()
    monkeypatch.setattr(hardware, "driver_version", lambda: "")
    assert not this_machine().gpus


def test_only_a_run_for_cpus_begins_where_torch_sees_none_of_the_gpus(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = "The NVIDIA driver on your system is too old (found version 12040)"
    monkeypatch.setattr(hardware, "driver_version", lambda: "550.90")
    monkeypatch.setattr(hardware, "gpus_seen", lambda: GpusSeen([], old))
    given = [f"model.path={model}", "trainer.device=cpu"]
    with pytest.raises(StartupError) as caught:
        for_this_machine(load_config(overrides=given, environ={}), {})
    assert f"torch sees no GPU ({old}): give this process the GPUs" in str(caught.value)
    config = load_config(overrides=[*given, "generator.device=cpu"], environ={})
    run, told = for_this_machine(config, {})
    assert not told
    assert in_one_line(run).startswith("trainer on cpu (float32), engine torch on cpu (float")
