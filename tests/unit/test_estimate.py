"""`umbra check`: what is counted without memory is what a step takes; what the command says."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from accelerate.state import AcceleratorState
from fakes.architectures import ARCHITECTURES
from fakes.slowness import seconds
from programs.memory_peak import Case
from transformers import AutoModelForCausalLM

from umbra.cli import main
from umbra.deploy.check.facts import gather_facts, kv_numbers
from umbra.deploy.check.fit import Machine
from umbra.deploy.check.items import (
    BACKWARD,
    GIB,
    LOGITS,
    Item,
    ModelSizes,
    PassPeaks,
    RowShape,
    Sized,
    peak,
)
from umbra.deploy.check.trace import LiveBytes, Outline, full_rows, pass_peaks
from umbra.proto.errors import UsageError
from umbra.services.config import TrainerConfig
from umbra.services.config.loader import load_config
from umbra.services.modeling.architectures import PROVEN
from umbra.services.modeling.lora import add_adapter
from umbra.services.modeling.row_sizes import CPU_PASS, rows_within
from umbra.services.trainer.distributed import sharding
from umbra.services.trainer.learner import Learner

PROGRAM = Path(__file__).parents[1] / "programs" / "memory_peak.py"
WITHIN = 0.1

SMALL: dict[str, Any] = {
    "vocab_size": 2000,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
LARGE_VOCABULARY = {**SMALL, "vocab_size": 40_000, "num_hidden_layers": 1}
EXPERTS = {
    **SMALL,
    "num_hidden_layers": 3,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
}
CASES = {
    "short rows": Case("Qwen3", SMALL, 4, 256),
    "a long row": Case("Qwen3", SMALL, 1, 1024),
    "recomputed": Case("Qwen3", SMALL, 4, 512, {"activation_checkpointing": True}),
    "bf16": Case("Qwen3", SMALL, 4, 256, {"precision": "bf16"}),
    "an adapter": Case("Qwen3", SMALL, 4, 256, {"lora_rank": 8}),
    "all logits": Case("Qwen3", LARGE_VOCABULARY, 2, 256),
    "logits in chunks": Case("Qwen3", LARGE_VOCABULARY, 4, 256, {"logits_mib": 16.0}),
    "experts": Case("Qwen3Moe", EXPERTS, 4, 256),
    "windows": Case("Gemma2", {**SMALL, "sliding_window": 128}, 2, 256),
}


def traced(case: Case) -> PassPeaks:
    """What is counted for a case, without memory."""
    trainer = case.settings()
    outline = Outline(case.config(), trainer, torch.float32, "cpu")
    autocast = torch.bfloat16 if trainer.precision == "bf16" else None
    return outline.peaks(RowShape(case.rows, case.width), autocast=autocast)


def test_a_prompt_that_is_read_has_logits_of_its_last_token_alone() -> None:
    """Of all tokens they came in 16,384 chunks, which took minutes to count."""
    case = CASES["all logits"]
    outline = Outline(case.config(), TrainerConfig(), torch.float32, "cpu")
    rows = RowShape(case.rows, case.width)
    whole, last = (outline.peaks(rows, train=False, last=last) for last in (False, True))
    assert len(full_rows(rows, last=True).targets) == 2 * case.rows  # two sequences in a row
    assert last.forward == whole.forward
    assert last.logits < whole.logits / 16


@pytest.fixture(scope="module")
def measured() -> dict[str, int]:
    """What each case really takes, in bytes: measured by the kernel, in another process."""
    lines = [json.dumps(dataclasses.asdict(case)) for case in CASES.values()]
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        timeout=seconds(300),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line)["bytes"] for line in done.stdout.splitlines()]
    return dict(zip(CASES, found, strict=True))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
def test_a_step_takes_what_is_counted(name: str, measured: dict[str, int]) -> None:
    assert traced(CASES[name]).peak == pytest.approx(measured[name], rel=WITHIN)


@pytest.mark.parametrize("trainer", [{}, {"activation_checkpointing": True}, {"lora_rank": 4}])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_of_many_like_layers_a_few_tell(
    trainer: dict[str, Any], autocast: torch.dtype | None
) -> None:
    config = ARCHITECTURES["qwen3"].config(layers=9)

    def make(of: Any) -> Outline:
        return Outline(of, TrainerConfig(**trainer), torch.float32, "cpu")

    whole = make(config)
    sizes = whole.sizes(0)
    assert sizes.alike
    found = pass_peaks(config, sizes, make, rows=RowShape(2, 32), autocast=autocast)
    tried = whole.peaks(RowShape(2, 32), autocast=autocast)
    assert (found.kept, found.attention) == (tried.kept, tried.attention)
    assert found.working == pytest.approx(tried.working, rel=0.01)
    assert tried.peak <= found.peak <= 1.01 * tried.peak


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_inputs_of_recomputed_layers_are_offloaded(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU would move to the host is what a step on a CPU asks to be moved, to the byte."""
    keys = {"activation_checkpointing": True, "offload": "activations", "precision": precision}
    trainer = TrainerConfig(device="cpu", **keys)
    autocast = torch.bfloat16 if precision == "bf16" else None
    config, rows = ARCHITECTURES["qwen3"].config(layers=3), RowShape(2, 32)
    found = Outline(config, trainer, torch.float32, "cuda").peaks(rows, autocast=autocast)
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
    AcceleratorState._reset_state()  # a process has one precision, but here
    learner = Learner(AutoModelForCausalLM.from_config(config), trainer, steps=1)
    micro = full_rows(rows)
    logprobs, _ = learner.score(micro, torch.ones(len(micro.targets)))
    learner.backward(logprobs.sum())
    AcceleratorState._reset_state()
    assert sum(asked) == found.offloaded > 0
    each = 2 * 32 * config.hidden_size * 4
    assert found.offloaded == 3 * each, "the residual stream is float32"
    here = Outline(config, msgspec.structs.replace(trainer, offload="none"), torch.float32, "cuda")
    kept = here.peaks(rows, autocast=autocast)
    assert kept.offloaded == 0
    # The first layer's input is kept by the embedding's output too, which nothing else frees.
    assert kept.kept - found.kept in (2 * each, 3 * each)
    assert found.peak <= kept.peak


def test_a_rank_of_those_that_share_rows_has_its_part() -> None:
    """All but attention's masks and the logits' chunk is halved."""
    config, rows = ARCHITECTURES["qwen3"].config(layers=3), RowShape(1, 512, packed=False)

    def kept(ranks: int) -> int:
        trainer = TrainerConfig(sequence_parallel=ranks, ranks=ranks)
        found = Outline(config, trainer, torch.float32, "cuda").peaks(rows)
        return found.kept - found.attention

    one, two = kept(1), kept(2)
    assert 0.45 * one < two < 0.75 * one


def test_layers_that_differ_are_all_tried() -> None:
    config = ARCHITECTURES["deepseek-v3"].config(layers=9)  # the first is dense
    outline = Outline(config, TrainerConfig(), torch.float32, "cpu")
    assert not outline.sizes(0).alike


def test_what_lives_is_counted() -> None:
    """By hand: two products of 4 KB, of which the first is freed; a view has no bytes."""
    a = torch.ones(32, 32)
    with LiveBytes([a]) as live:
        first = a @ a
        second = first @ a
        assert live.now == 8192
        view = second.view(-1)
        del first
        assert (live.now, live.peak) == (4096, 8192)
        del second
        assert live.now == 4096
        del view
    assert (live.now, live.peak) == (0, 8192)


@pytest.mark.parametrize("name", sorted({a.name for a in ARCHITECTURES.values()}))
def test_parameters_are_those_of_the_model(name: str) -> None:
    """Of every architecture that Umbra is right for, and a step of it can be tried."""
    architecture = ARCHITECTURES[name]
    config = architecture.config()
    if config.model_type not in PROVEN:
        pytest.skip("refused before it is estimated")
    outline = Outline(config, TrainerConfig(), torch.float32, "cpu")
    model = AutoModelForCausalLM.from_config(config)
    sizes = outline.sizes(0)
    assert sizes.parameters == sizes.trained == sum(p.numel() for p in model.parameters())
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    assert {tensor.name: tensor.shape for tensor in sizes.tensors} == shapes
    assert outline.peaks(RowShape(2, 16)).peak > 0


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe"])
def test_an_adapter_is_counted_apart(name: str) -> None:
    config, trainer = ARCHITECTURES[name].config(), TrainerConfig(lora_rank=4)
    model = AutoModelForCausalLM.from_config(config)
    whole = sum(p.numel() for p in model.parameters())
    add_adapter(model, trainer, seed=0)
    sizes = Outline(config, trainer, torch.float32, "cpu").sizes(0)
    assert sizes.parameters == whole
    assert sizes.trained == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert 0 < sizes.trained < whole


def test_shares_are_those_of_the_first_rank() -> None:
    """Rows are divided as torch.chunk does; the first rank has as many as any."""
    tensors = (Sized("a", (10, 3), True, 0), Sized("b", (2,), False, -1))
    sizes = ModelSizes(tensors, 0, 10)
    assert sizes.share(1) == 32
    assert sizes.share(4) == 3 * 3 + 1
    assert sizes.share(4, trained=True) == 9
    assert sizes.largest_layer == (30, 30)
    assert sizes.root == (2, 0)


def test_a_process_needs_the_most_of_any_phase() -> None:
    items = [Item("a", 5), Item("b", 3, (LOGITS,)), Item("c", 2, (BACKWARD,))]
    assert peak(items) == 8


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
    assert kv_numbers(made, latent=latent) == numbers


# -- commands -------------------------------------------------------------------------------------


@pytest.fixture
def run_file(tmp_path: Path, tiny_model_dir: Path) -> Path:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "1", "answer": "1"}\n', encoding="utf-8")
    path = tmp_path / "run.toml"
    path.write_text(
        f"""
        [model]
        path = "{tiny_model_dir}"
        [data]
        prompts = "{prompts}"
        [generator]
        max_context = 64
        [trainer]
        pack_tokens = 64
        micro_tokens = 128
        """,
        encoding="utf-8",
    )
    return path


def test_the_command(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(run_file), "--gpu", "l4-24", "--memory"]) == 0
    text = capsys.readouterr().out
    for part in ("trainer rank, GPU 0", "weights, float32", "KV cache", "GPU 0", "/dev/shm"):
        assert part in text
    assert "% left" in text
    assert main(["check", str(run_file), "--gpu", "l4-24", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["estimate"]
    assert found["fits"] is True
    assert found["processes"][0]["device"]["weights, float32"] > 0


def test_rows_of_auto_are_those_of_the_trainer(run_file: Path) -> None:
    auto = ("trainer.pack_tokens=auto", "trainer.micro_tokens=auto")
    config = load_config(str(run_file), overrides=auto)
    facts = gather_facts(config, gpu=0, host=1 << 34)
    chosen = rows_within(config.trainer, CPU_PASS, "cpu", config.sampling.max_tokens)
    numbers = [f"trainer.{name}={value}" for name, value in chosen._asdict().items()]
    known = gather_facts(load_config(str(run_file), overrides=numbers), gpu=0, host=1 << 34)
    assert facts.rows == known.rows and facts.training == known.training


@pytest.mark.parametrize("key", ["expert_parallel", "replicas"])
def test_what_the_sums_do_not_know_is_refused_by_name(key: str, run_file: Path) -> None:
    config = load_config(str(run_file), overrides=[f"trainer.{key}=2"], environ={})
    with pytest.raises(UsageError, match=f"trainer.{key} = 2: the estimate"):
        gather_facts(config, gpu=GIB)


def test_what_does_not_fit_is_a_problem_with_a_remedy(
    run_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["check", str(run_file)]) == 0
    assert "memory:    host" in capsys.readouterr().out
    monkeypatch.setattr(
        "umbra.deploy.check.command.this_machine", lambda: Machine(0, host=1 << 30, shm=1)
    )
    assert main(["check", str(run_file), "--json"]) == 2
    told = json.loads(capsys.readouterr().out)
    problems = [one for one in told["checks"] if one["result"] == "problem"]
    assert {one["check"] for one in problems} == {"memory"}
    assert any("/dev/shm has 1 B" in one["fact"] for one in problems)
    assert any("the host has 1 GiB" in one["fact"] for one in problems)
    assert all(one["remedy"] for one in problems)
