"""Choices for GPUs, with made-up ones; the memory is that of the estimate."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from msgspec.structs import replace
from transformers import Qwen3Config

from umbra import cli
from umbra.deploy.check import choose as choosing
from umbra.deploy.check import machine as looking
from umbra.deploy.check.choose import choose, for_hardware, for_this_machine, in_one_line
from umbra.deploy.check.estimate import MARGIN, divide
from umbra.deploy.check.machine import GIB, GpuReport, Machine, judge_gpus, this_machine
from umbra.deploy.run.up import other_programs
from umbra.deploy.run_folder import RunFolder
from umbra.proto.errors import StartupError, UmbraError
from umbra.services.config import RunConfig
from umbra.services.config.loader import as_dict, given_keys, load_config, load_tree
from umbra.services.modeling import models
from umbra.services.process import host

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


def resolved(*settings: str) -> RunConfig:
    return load_config(overrides=settings, environ={})


def chosen(machine: Machine, *settings: str, positions: int = 40_960) -> RunConfig:
    given = given_keys(load_tree(overrides=settings, environ={}))
    return choose(resolved(*settings), given, machine, positions)


def test_without_a_gpu_the_defaults_are_those_of_the_page() -> None:
    before = resolved()
    after = for_hardware(before, (), Machine(vllm=True))
    assert after.config == replace(before, generator=replace(before.generator, engine="torch"))
    assert not after.changes and not after.refusal
    # What the trainer would refuse on a CPU is refused first.
    refused = for_hardware(resolved("trainer.weights=bf16"), (), Machine(vllm=True)).refusal
    assert "on a CPU, trainer.weights = bf16 needs trainer.precision = bf16" in refused


DEVICE, CONTEXT = "generator.device", "generator.max_context"
THREADS = ("generator.threads", "trainer.threads")
CHOSEN: list[tuple[Machine, str, dict[str, Any]]] = [
    (ONE, "", {"generator.engine": "vllm", DEVICE: "auto", "sampling.max_tokens": 6144}),
    (ONE, "", dict.fromkeys((CONTEXT, "trainer.pack_tokens", "trainer.micro_tokens"), 8192)),
    (NO_VLLM, "", {"generator.engine": "torch"}),
    # Long answers get a context in which they fit.
    (ONE, "sampling.max_tokens=10000", {CONTEXT: 20_000}),
    (ONE, "sampling.max_tokens=30000", {CONTEXT: 40_960}),
    (ONE, f"{CONTEXT}=1000", {"sampling.max_tokens": 750}),
    # With several GPUs each side has its own, if there are as many.
    (FOUR, "", {DEVICE: "cuda:1", "trainer.micro_tokens": "auto", **dict.fromkeys(THREADS, 0)}),
    (FOUR, "trainer.ranks=2", {DEVICE: "cuda:2"}),
    (FOUR, "trainer.device=cpu", {DEVICE: "auto"}),
    (FOUR, "generator.count=3", {DEVICE: "cuda:1"}),
    (FOUR, "generator.count=4", {DEVICE: "auto"}),
    # What the user has set stays.
    (FOUR, "generator.engine=torch", {"generator.engine": "torch"}),
    (FOUR, f"{CONTEXT}=512 {DEVICE}=cuda:0", {CONTEXT: 512, DEVICE: "cuda:0"}),
    # Processes on CPUs share the cores.
    (Machine(cores=8), "", dict.fromkeys(THREADS, 4)),
    (Machine(cores=8), "generator.count=2 trainer.ranks=2", dict.fromkeys(THREADS, 2)),
    (Machine(cores=8), "generator.threads=1", {THREADS[0]: 1, THREADS[1]: 4}),
    (Machine(cores=1), "", dict.fromkeys(THREADS, 0)),
]


@pytest.mark.parametrize(("machine", "given", "values"), CHOSEN)
def test_what_is_chosen(machine: Machine, given: str, values: dict[str, Any]) -> None:
    run = as_dict(chosen(machine, *given.split()))
    found = {key: run[section][name] for key in values for section, _, name in [key.partition(".")]}
    assert found == values


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


def test_a_run_asks_another_process(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolved(f"model.path={model}")
    monkeypatch.setattr(choosing, "this_machine", lambda: ONE)
    run, told = for_this_machine(config, {"model": {"path": str(model)}})
    assert run.generator.engine_args == shared(model, 8)[0].generator.engine_args
    assert told[:2] == ["generator.engine = vllm", "generator.max_context = 8192"]
    monkeypatch.setattr(looking, "REQUEST_S", 0.001)
    with pytest.raises(StartupError, match="cannot be estimated how trainer and generator share"):
        for_this_machine(config, {})


CPUS = ("trainer.device=cpu", "generator.device=cpu")


def test_gpus_that_do_not_answer_are_not_taken_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = Mock(side_effect=UmbraError("it took longer than 180 s"))
    monkeypatch.setattr(looking, "driver_version", lambda: "550.1")
    monkeypatch.setattr(looking, "ask_aside", silent)
    monkeypatch.setattr(looking, "gpu_report", looking.gpu_report.__wrapped__)
    with pytest.raises(StartupError, match=r"sees no GPU: .* took longer than 180 s; see whether"):
        for_this_machine(resolved(), {})
    assert not for_this_machine(resolved(*CPUS), {})[1]
    monkeypatch.setattr(looking, "driver_version", lambda: "")
    assert not this_machine().gpus


OLD = "The NVIDIA driver on your system is too old (found version 12040)"
BLIND = GpuReport([], OLD, torch="2.13.0+cu130", cuda="13.0")


@pytest.mark.parametrize(
    ("seen", "driver", "why", "remedy"),
    [
        (
            BLIND, "550.90.07",
            f"driver 550.90.07 is too old for torch 2.13.0+cu130, which is built for CUDA 13.0 and "
            f"needs 580 or newer ({OLD})", "update the driver, or install a torch from",
        ),
        (
            replace(BLIND, torch="2.13.0+cpu", cuda=""), "580.1",
            "torch 2.13.0+cpu is built for CPUs", "install one from PyPI (CUDA 13, driver 580",
        ),
        (replace(BLIND, node=False), "580.1", "as in a container without", "give it GPUs (docker"),
        (replace(BLIND, visible=""), "550.90", 'CUDA_VISIBLE_DEVICES = "" hides', "unset it"),
        (BLIND, "?", OLD, "see whether nvidia-smi lists"),
    ],
)  # fmt: skip
def test_why_torch_sees_no_gpu(seen: GpuReport, driver: str, why: str, remedy: str) -> None:
    found = judge_gpus(seen, driver, 0)
    assert found.level == "problem"
    assert why in found.text
    assert found.remedy.startswith(remedy)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU")
def test_torch_is_asked_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    seen = looking.gpu_report.__wrapped__()
    assert (seen.gpus, seen.torch, seen.visible) == ([], str(torch.__version__), "")
    assert seen.cuda == (torch.version.cuda or "")
    assert seen.why_not


def test_a_driver_is_found_in_two_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = host.driver_version.__wrapped__
    monkeypatch.setattr(host, "NVIDIA", tmp_path)
    monkeypatch.setattr(host.ctypes, "CDLL", load := Mock())
    assert found() == "?"
    load.assert_called_once_with("libcuda.so.1")
    load.side_effect = OSError
    assert found() == ""
    for kind in ("x86_64 Kernel Module", "Open Kernel Module for x86_64"):
        said = f"NVRM version: NVIDIA UNIX {kind}  550.90.07  Fri\n"
        (tmp_path / "version").write_text(said)
        assert found() == "550.90.07"


def test_only_a_run_for_cpus_begins_where_torch_sees_none_of_the_gpus(
    tiny_model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for module in (looking, models):
        monkeypatch.setattr(module, "driver_version", lambda: "550.90")
    monkeypatch.setattr(looking, "gpu_report", lambda: BLIND)
    given = (f"model.path={tiny_model_dir}", CPUS[0])
    refused = r"sees no GPU: driver 550\.90 is too old.*device to cpu"
    with pytest.raises(StartupError, match=refused):
        for_this_machine(resolved(*given), {})
    run, told = for_this_machine(resolved(*given, CPUS[1]), {})
    assert not told
    assert in_one_line(run).startswith("trainer on cpu (float32), engine torch on cpu (float")
    rows, file = tmp_path / "rows.jsonl", tmp_path / "run.toml"
    rows.write_text('{"prompt": "say a", "answer": "a"}\n')
    file.write_text(f'[model]\npath = "{tiny_model_dir}"\n[data]\nprompts = "{rows}"\n')
    for sets in ([], [f"--set={one}" for one in CPUS]):
        cli.main(["check", str(file), "--no-code", *sets])
        assert ("driver 550.90 is too old" in capsys.readouterr().out) == (not sets)
