"""`umbra check`: a step takes as much as estimated; the command's output."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.architectures import ARCHITECTURES
from fakes.commands import SEARCH, Popen
from fakes.constants import constants
from fakes.full_rows import RowShape, full_rows
from fakes.slowness import limit
from programs.memory_peak import Case
from transformers import AutoConfig, AutoModelForCausalLM

from umbra.cli import main
from umbra.deploy.check.aside import count_of
from umbra.deploy.check.estimate import Estimate, _pass, peak  # pyright: ignore[reportPrivateUsage]
from umbra.deploy.check.machine import GIB, Machine
from umbra.deploy.check.model_sizes import (
    PLAIN,
    ModelSizes,
    cache_numbers,
    count_plain,
    read_sizes,
    sizes_of,
)
from umbra.proto.errors import UsageError
from umbra.services.config import TrainerConfig
from umbra.services.config.loader import load_config
from umbra.services.modeling.architectures import PROVEN
from umbra.services.modeling.lora import add_adapter
from umbra.services.modeling.row_sizes import CPU_PASS, rows_within
from umbra.services.trainer.distributed import sharding
from umbra.services.trainer.learner import Learner

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


@pytest.fixture(scope="module")
def measured() -> dict[str, int]:
    """Return the memory of each case, in bytes: measured by the kernel, in another process."""
    lines = [json.dumps(dataclasses.asdict(case)) for case in CASES.values()]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    env = {**os.environ, "PYTHONPATH": SEARCH}
    program = Popen([sys.executable, str(PROGRAM)], text=True, env=env, **pipes)
    out, said = program.communicate("\n".join(lines), timeout=limit(300))
    assert program.returncode == 0, said
    found = [json.loads(line)["bytes"] for line in out.splitlines()]
    return dict(zip(CASES, found, strict=True))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
def test_a_step_takes_no_more_than_is_estimated(name: str, measured: dict[str, int]) -> None:
    case = CASES[name]
    with constants({"device": "cpu", **case.trainer}) as keys:
        trainer = TrainerConfig(**keys)
        sizes = sized(case.config(), trainer)
        device, _ = _pass(trainer, sizes, "cpu", case.rows * case.width, case.width)
    assert LEAST * measured[name] <= peak(device) <= MOST * measured[name]


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


@pytest.mark.parametrize("name", sorted({a.name for a in ARCHITECTURES.values()}))
def test_parameters_are_those_of_the_model(name: str) -> None:
    """Of every architecture that Umbra is right for, and a step of it can be tried."""
    architecture = ARCHITECTURES[name]
    config = architecture.config()
    if config.model_type not in PROVEN:
        pytest.skip("refused before it is estimated")
    model = AutoModelForCausalLM.from_config(config)
    sizes = sized(config, TrainerConfig())
    whole = sum(p.numel() for p in model.parameters())
    assert sizes.parameters == sizes.trained == whole
    assert sizes.outside[0] + sizes.layers * sizes.layer[0] >= whole
    assert count_plain(config, TrainerConfig()) in (None, count_of(config, TrainerConfig()))


SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "vocab_size": 101, "pad_token_id": None,
}  # fmt: skip
PLAIN_CONFIGS: dict[str, dict[str, Any]] = {
    "as they are": {},
    "tied": {"tie_word_embeddings": True},
    "wide heads": {"head_dim": 24},
    "another activation": {"hidden_act": "gelu"},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "scaled positions": {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    "an odd dtype": {"dtype": "float64"},
    "padding outside": {"pad_token_id": 10**6},
}


@pytest.mark.parametrize("change", PLAIN_CONFIGS)
@pytest.mark.parametrize("kind", PLAIN)
def test_models_that_are_counted_without_a_build(kind: str, change: str) -> None:
    """Counts and a build agree, with each adapter; whatever else is left to the build."""
    config = AutoConfig.for_model(kind, **SIZES | PLAIN_CONFIGS[change])
    usual = change in ("as they are", "tied", "wide heads")
    for rank, targets, known in (
        (0, [], True),
        (4, [], True),
        (4, ["q_proj", "down_proj"], True),
        (4, ["mlp.up_proj"], False),
        (4, ["lm_head"], False),
    ):
        trainer = TrainerConfig(lora_rank=rank, lora_targets=targets)
        plain = count_plain(config, trainer)
        assert (plain is not None) == (usual and known)
        assert plain is None or plain == count_of(config, trainer)


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe"])
def test_an_adapter_is_counted_apart(name: str) -> None:
    config, trainer = ARCHITECTURES[name].config(), TrainerConfig(lora_rank=4)
    model = AutoModelForCausalLM.from_config(config)
    whole = sum(p.numel() for p in model.parameters())
    add_adapter(model, trainer, seed=0)
    sizes = sized(config, trainer)
    assert sizes.parameters == whole
    assert sizes.trained == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert 0 < sizes.trained < whole


@pytest.mark.parametrize(("config", "latent", "numbers"), [
    ("qwen3", True, 2 * 2 * 1 * 32),
    ("deepseek-v3", True, None),
    ("deepseek-v3", False, None),
])  # fmt: skip
def test_numbers_in_the_cache(config: str, latent: bool, numbers: int | None) -> None:
    made = ARCHITECTURES[config].config()
    if numbers is None and latent:
        numbers = 2 * (made.kv_lora_rank + made.qk_rope_head_dim)
    elif numbers is None:
        key = made.qk_nope_head_dim + made.qk_rope_head_dim
        numbers = 2 * made.num_attention_heads * (key + made.v_head_dim)
    assert cache_numbers(made, latent=latent) == numbers


@pytest.fixture
def run_file(tmp_path: Path, tiny_model_dir: Path) -> Path:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "1", "answer": "1"}\n', encoding="utf-8")
    path = tmp_path / "run.toml"
    path.write_text(
        f'model.path = "{tiny_model_dir}"\ndata.prompts = "{prompts}"\n'
        "generator.max_context = 64\ntrainer = { pack_tokens = 64, micro_tokens = 128 }\n"
    )
    return path


def test_the_command(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(run_file), "--gpu", "l4-24"]) == 0
    text = capsys.readouterr().out
    for part in ("memory:    GPU 0 ", "% left", "host ", "/dev/shm "):
        assert part in text
    assert main(["check", str(run_file), "--gpu", "l4-24", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["estimate"]
    assert found["fits"] is True
    assert found["processes"][0]["device"][0]["name"] == "weights, float32"


def test_rows_of_auto_are_those_of_the_trainer(run_file: Path) -> None:
    auto = ("trainer.pack_tokens=auto", "trainer.micro_tokens=auto")
    config = load_config(str(run_file), overrides=auto)
    machine = Machine(host=1 << 34)
    sizes = read_sizes(config)
    chosen = rows_within(config.trainer, sizes.config, CPU_PASS, "cpu", config.sampling.max_tokens)
    numbers = [f"trainer.{name}={value}" for name, value in chosen._asdict().items()]
    known = load_config(str(run_file), overrides=numbers)
    assert Estimate(config, sizes, machine).needs == Estimate(known, sizes, machine).needs


def test_what_the_sums_do_not_know_is_refused_by_name(run_file: Path) -> None:
    config = load_config(str(run_file), overrides=["trainer.expert_parallel=2"], environ={})
    with pytest.raises(UsageError, match="expert_parallel = 2: the estimate"):
        Estimate(config, read_sizes(config), Machine((GIB,)))


def test_what_does_not_fit_is_a_problem_with_a_remedy(
    run_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["check", str(run_file)]) == 0
    assert "memory:    host" in capsys.readouterr().out
    monkeypatch.setattr(
        "umbra.deploy.check.command.this_machine", lambda: Machine(host=1 << 30, shm=1)
    )
    assert main(["check", str(run_file), "--json"]) == 2
    told = json.loads(capsys.readouterr().out)
    problems = [one for one in told["checks"] if one["level"] == "problem"]
    assert {one["subject"] for one in problems} == {"memory"}
    assert any("/dev/shm has 1 B" in one["text"] for one in problems)
    assert any("the host has 1 GiB" in one["text"] for one in problems)
    assert all(one["remedy"] for one in problems)
