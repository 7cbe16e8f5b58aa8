"""What is chosen for GPUs, with made-up ones; the memory is that of the estimate."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest
from click.testing import CliRunner
from transformers import Qwen3Config

from umbra.cli import cli
from umbra.deploy.check.hardware import GpuShares, Machine, ShareRequest
from umbra.deploy.check.machine import GpusSeen
from umbra.deploy.check.machine_defaults import (
    choose,
    for_hardware,
    for_this_machine,
    in_one_line,
    positions,
    shares_aside,
    this_machine,
)
from umbra.deploy.check.share import MARGIN, shares
from umbra.deploy.files.run_folder import RunFolder
from umbra.deploy.run.up import other_programs
from umbra.proto.errors import StartupError, UmbraError
from umbra.services.config import RunConfig
from umbra.services.config.loader import given_keys, load_config, load_tree

GIB = 1 << 30
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


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("trainer.weights=bf16", "on a CPU, trainer.weights = bf16 needs trainer.precision = bf16"),
        ("trainer.offload=all", "on a CPU, trainer.offload = all moves what recomputed layers"),
    ],
)
def test_what_the_trainer_would_refuse_on_a_cpu_is_refused_first(setting: str, says: str) -> None:
    config = load_config(overrides=[setting], environ={})
    assert says in for_hardware(config, (), Machine(vllm=True), _never)[2]
    at_home = load_config(overrides=[setting, "trainer.device=cuda"], environ={})
    assert "on a CPU" not in for_hardware(at_home, (), Machine(vllm=True), _never)[2]


def chosen(hardware: Machine, *settings: str, positions: int = 40_960) -> RunConfig:
    config = load_config(overrides=settings, environ={})
    given = given_keys(load_tree(overrides=settings, environ={}))
    return choose(config, given, hardware, positions)


def test_without_a_gpu_the_defaults_are_those_of_the_page() -> None:
    before = load_config(environ={})
    after = choose(before, (), Machine(vllm=True), 40_960)
    generator = msgspec.structs.replace(before.generator, engine="torch")
    assert after == msgspec.structs.replace(before, generator=generator)
    assert for_hardware(before, (), Machine(vllm=True), _never) == (after, [], "")


def _never(request: ShareRequest) -> GpuShares:
    raise AssertionError("nothing is shared")


def test_engine_context_and_tokens_of_one_gpu() -> None:
    run = chosen(ONE)
    assert run.generator.engine == "vllm"
    assert (run.generator.max_context, run.sampling.max_tokens) == (8192, 6144)
    assert (run.trainer.pack_tokens, run.trainer.micro_tokens) == (8192, 8192)
    assert run.generator.device == "auto"
    assert run.trainer.precision_on("cuda") == "bf16"
    assert run.weight_hub.dtype_on("cuda") == "bfloat16"
    assert chosen(NO_VLLM).generator.engine == "torch"
    short = chosen(ONE, positions=2048)
    assert (short.generator.max_context, short.sampling.max_tokens) == (2048, 1536)


@pytest.mark.parametrize(
    "setting",
    [
        "generator.engine=torch",
        "generator.max_context=512",
        "sampling.max_tokens=100",
        "generator.device=cuda:0",
        "trainer.micro_tokens=1024",
        "trainer.pack_tokens=512",
    ],
)
def test_what_the_user_has_set_stays(setting: str) -> None:
    path, _, text = setting.partition("=")
    section, _, key = path.partition(".")
    assert str(getattr(getattr(chosen(FOUR, setting), section), key)) == text


def test_long_answers_get_a_context_in_which_they_fit() -> None:
    assert chosen(ONE, "sampling.max_tokens=10000").generator.max_context == 20_000
    assert chosen(ONE, "generator.max_context=1000").sampling.max_tokens == 750
    limited = chosen(ONE, "sampling.max_tokens=10000", positions=16_384)
    assert limited.generator.max_context == 16_384


def test_with_several_gpus_each_side_has_its_own() -> None:
    run = chosen(FOUR)
    assert (run.generator.device, run.trainer.micro_tokens) == ("cuda:1", "auto")
    assert chosen(FOUR, "trainer.ranks=2").generator.device == "cuda:2"
    whole = chosen(FOUR, "trainer.ranks=3", "generator.tensor_parallel=2")
    assert whole.generator.device == "auto"  # there are not as many: the run is refused later
    assert chosen(FOUR, "trainer.device=cpu").generator.device == "auto"
    assert chosen(FOUR, "generator.count=3").generator.device == "cuda:1"
    assert chosen(FOUR, "generator.count=4").generator.device == "auto"


def test_generators_get_the_gpus_that_follow_the_first_one(tmp_path: Path) -> None:
    run = chosen(FOUR, "generator.count=3")
    programs = other_programs(run, RunFolder(tmp_path), "tcp://127.0.0.1:1")
    argvs = {one.name: " ".join(one.argv) for one in programs}
    assert "--device" not in argvs["generator-0"]  # the run file's own, cuda:1
    assert argvs["generator-1"].endswith("--device cuda:2")
    assert argvs["generator-2"].endswith("--device cuda:3")


def shared(
    model: Path, gpu: float, *settings: str, vllm: bool = True
) -> tuple[RunConfig, GpuShares]:
    hardware = Machine((int(gpu * GIB),), "made-up", vllm=vllm)
    run = chosen(hardware, f"model.path={model}", *settings)
    given = given_keys(load_tree(overrides=settings, environ={}))
    return run, shares(ShareRequest(run, sorted(given), hardware.gpu, "made-up"))


def test_vllm_takes_what_the_trainer_leaves(model: Path) -> None:
    found: dict[int, float] = {}
    for gpu in (8, 16):
        _, share = shared(model, gpu)
        found[gpu] = share.engine_args["gpu_memory_utilization"]
        assert share.slots == 128
    trainer = {gpu: (0.95 - share) * gpu / MARGIN for gpu, share in found.items()}
    assert trainer[8] == pytest.approx(trainer[16], abs=0.2)  # it needs as much on either
    assert 1 < trainer[8] < 4
    run, _ = shared(model, 8)
    taken = msgspec.structs.replace(run.generator, engine_args={"gpu_memory_utilization": 0.3})
    with_share = msgspec.structs.replace(run, generator=taken)
    kept = shares(ShareRequest(with_share, [], 16 * GIB, "made-up"))
    assert kept.engine_args == {"gpu_memory_utilization": 0.3}


def test_the_torch_engine_has_as_many_slots_as_fit(model: Path) -> None:
    run, found = shared(model, 3, vllm=False)
    assert run.generator.engine == "torch"
    assert 1 <= found.slots < 128
    _, refused = shared(model, 3, "generator.slots=128", vllm=False)
    assert "A run is smaller with trainer.lora_rank" in refused.refused


def test_a_gpu_that_is_too_small_is_refused(model: Path) -> None:
    _, found = shared(model, 4)
    assert "the KV cache of a generator has room for" in found.refused


def test_what_is_not_estimated_is_left_as_it_is(model: Path) -> None:
    run, found = shared(model, 8, "trainer.expert_parallel=2", "trainer.ranks=2", vllm=False)
    assert found == GpuShares(run.generator.slots, {})


def test_who_starts_a_run_asks_another_process(model: Path, monkeypatch: Any) -> None:
    config = load_config(overrides=[f"model.path={model}"], environ={})
    run, told, _ = for_hardware(config, {"model.path"}, ONE, shares_aside)
    assert run.generator.engine_args == shared(model, 8)[1].engine_args
    assert told[:2] == ["generator.engine = vllm", "generator.max_context = 8192"]
    monkeypatch.setattr("umbra.deploy.check.machine_defaults.PATIENCE_S", 0.001)
    with pytest.raises(StartupError, match="cannot be estimated how trainer and generator share"):
        for_hardware(config, {"model.path"}, ONE, shares_aside)


def test_gpus_that_do_not_answer_are_not_taken_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent() -> NoReturn:
        raise UmbraError("it took longer than 180 s")

    monkeypatch.setattr("umbra.deploy.check.machine_defaults.driver_version", lambda: "550.1")
    monkeypatch.setattr("umbra.deploy.check.machine_defaults.gpus_seen", silent)
    with pytest.raises(StartupError, match="what GPUs it sees: it took longer than 180 s"):
        this_machine()
    monkeypatch.setattr("umbra.deploy.check.machine_defaults.driver_version", lambda: "")
    assert not this_machine().gpus


@pytest.mark.parametrize("sides", [(), ("trainer",), ("trainer", "generator")])
def test_only_a_run_for_cpus_begins_where_torch_sees_none_of_the_gpus(
    sides: tuple[str, ...], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = "The NVIDIA driver on your system is too old (found version 12040)"
    monkeypatch.setattr("umbra.deploy.check.machine_defaults.driver_version", lambda: "550.90")
    monkeypatch.setattr("umbra.deploy.check.machine_defaults.gpus_seen", lambda: GpusSeen([], old))
    given = [f"model.path={model}", *(f"{side}.device=cpu" for side in sides)]
    config = load_config(overrides=given, environ={})
    if len(sides) == 2:
        chosen, told = for_this_machine(config, {})
        assert not told
        assert in_one_line(chosen).startswith(
            "trainer on cpu (float32), engine torch on cpu (float"
        )
        return
    with pytest.raises(StartupError) as caught:
        for_this_machine(config, {})
    assert f"torch sees no GPU ({old}): give this process the GPUs" in str(caught.value)
    assert "set generator.device and trainer.device to cpu" in str(caught.value)


def test_an_estimate_tells_what_is_chosen_and_what_does_not_fit(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text(f'[model]\npath = "{model}"\n', encoding="utf-8")
    result = CliRunner().invoke(cli, ["check", str(tmp_path / "run.toml"), "--gpu", "l4-24"])
    assert "chosen:    generator.engine = vllm" in result.output, result.output
    assert "gpu_memory_utilization" in result.output
    tiny = Machine((GIB,), "made-up", vllm=True)
    config = load_config(overrides=[f"model.path={model}"], environ={})
    run, _, refused = for_hardware(config, {"model.path"}, tiny, shares)
    assert refused and run.generator.engine_args == {}, "the run is shown as it is"


def test_positions_of_models(model: Path, tmp_path: Path) -> None:
    assert positions(str(model)) == 40_960
    (tmp_path / "config.json").write_text('{"text_config": {"max_position_embeddings": 99}}')
    assert positions(str(tmp_path)) == 99
    assert positions(str(tmp_path / "nowhere")) == 0
