"""With each architecture Umbra computes what Transformers does, or refuses it by name."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from fakes import models_page
from fakes.architectures import ARCHITECTURES
from transformers import AutoModel, PreTrainedModel

from umbra.deploy.model_check import check
from umbra.deploy.model_check.check import Outcome, Row, check_model, fewest_layers
from umbra.deploy.model_check.command import command
from umbra.deploy.prepare.preflight import check_run
from umbra.proto.errors import UsageError
from umbra.services.config import DataConfig, RunConfig, TrainerConfig
from umbra.services.config import ModelConfig as ModelSection
from umbra.services.modeling.architectures import (
    PROVEN,
    check_architecture,
    in_the_way,
    layer_kinds,
)
from umbra.services.modeling.attention import Attention
from umbra.services.modeling.models import load_model, open_weights, outline_model
from umbra.services.trainer.policy import load_policy, open_policy

CPU = torch.device("cpu")
compare = partial(check_model, vllm=False)  # vLLM has tests of its own
REFUSED = {
    "llama4": "attends in chunks (attention_chunk_size)",
    "minimax": "carries a state from token to token in a way that was not tested (linear_",
    "qwen3-vl": "has more than a text model (vision_config)",
    "bloom": "an architecture that Umbra was not tested with",
}
RIGHT = [name for name in ARCHITECTURES if name not in REFUSED]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("architectures")


@pytest.fixture
def model_dir(folder: Path, request: pytest.FixtureRequest) -> Path:
    path = folder / request.param
    return path if path.exists() else ARCHITECTURES[request.param].write(path)


def of(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("model_dir", names, indirect=True)


def page() -> list[str]:
    return models_page.PAGE.read_text(encoding="utf-8").splitlines()


@of(*RIGHT)
def test_what_is_computed_is_what_transformers_computes(model_dir: Path) -> None:
    outcome = models_page.examine(model_dir)
    assert isinstance(outcome, Outcome), outcome
    assert outcome.equal, outcome.as_text()
    kinds = layer_kinds(ARCHITECTURES[model_dir.name].config())
    rows_of_one = not {"linear_attention", "conv", "hybrid"}.isdisjoint(kinds)
    assert len(outcome.rows) == (11 if rows_of_one else 15)
    assert outcome.model_type in PROVEN
    assert models_page.right(ARCHITECTURES[model_dir.name], outcome) in page()


def run_of(model_dir: Path, tmp_path: Path, **trainer: Any) -> RunConfig:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    return RunConfig(
        model=ModelSection(path=str(model_dir)),
        data=DataConfig(prompts=str(prompts)),
        trainer=TrainerConfig(**trainer),
    )


@of(*REFUSED)
def test_what_cannot_be_right_is_refused_before_a_start(model_dir: Path, tmp_path: Path) -> None:
    architecture = json.loads((model_dir / "config.json").read_text())["architectures"][0]
    run = run_of(model_dir, tmp_path)
    for refuse in (
        lambda: load_policy(model_dir),
        lambda: open_policy(model_dir),
        lambda: open_weights(AutoModel, model_dir, "model.path"),
        lambda: load_model(model_dir, CPU, torch.float32),
        lambda: outline_model(model_dir),
        lambda: check_run(run),
    ):
        with pytest.raises(UsageError) as caught:
            refuse()
        sentence = str(caught.value)
        assert sentence.startswith(f"model.path: {model_dir} is a {architecture}, ")
        assert REFUSED[model_dir.name] in sentence
        assert "\n" not in sentence
    reason = models_page.examine(model_dir)
    assert isinstance(reason, str)
    assert models_page.refused(ARCHITECTURES[model_dir.name], reason) in page()


def test_the_lists_are_those_of_the_tests() -> None:
    assert {ARCHITECTURES[name].config().model_type for name in RIGHT} == PROVEN


def test_fields_of_a_config_that_would_be_wrong() -> None:
    for fields, reason in (
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "(rope type dynamic)"),
        ({"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}, "(rope type dynamic)"),
        ({"use_bidirectional_attention": True}, "attends to later tokens too"),
        ({"quantization_config": {"quant_method": "fp8"}}, "has quantized weights (fp8)"),
        ({"layer_types": ["chunked_attention"]}, "attends in chunks"),
        ({"layer_types": ["conv", "full_attention"]}, "in a way that was not tested (conv)"),
        ({"time_step_limit": [0.0, 0.1]}, "limits time steps"),
        ({"time_step_limit": [0.0, float("inf")]}, ""),
        ({"sliding_window": 8, "layer_types": ["full_attention"]}, "its class does not read"),
        ({"is_encoder_decoder": True}, "is an encoder with a decoder"),
        ({"rope_scaling": {"rope_type": "yarn"}, "rope_parameters": None}, ""),
        ({"layer_types": ["full_attention"], "sliding_window": None}, ""),
    ):
        found = in_the_way({"model_type": "llama", **fields})
        assert (reason in found) if reason else not found


@of("llama4")
def test_a_default_that_would_be_wrong_is_refused_too(model_dir: Path, tmp_path: Path) -> None:
    """Fields that config.json leaves out are filled in by Transformers."""
    path = shutil.copytree(model_dir, tmp_path / "model")
    fields = json.loads((path / "config.json").read_text())
    del fields["attention_chunk_size"], fields["layer_types"]
    (path / "config.json").write_text(json.dumps(fields))
    check_architecture(path, checked=["llama4_text"])
    with pytest.raises(UsageError, match="Llama4ForCausalLM, which attends in chunks"):
        load_model(path, CPU, torch.float32, checked=["llama4_text"])


@pytest.mark.parametrize(
    ("model_dir", "key", "bad", "good", "told"),
    [
        ("qwen3", "sequence_parallel", 4, 2, " = 4 cannot divide the 2 attention"),
        ("qwen3-moe", "expert_parallel", 3, 2, " = 3 cannot divide the 4 experts of a Qwen3MoeFor"),
        ("mamba2", "sequence_parallel", 2, 1, " = 2: layers of a Mamba2ForCausalLM carry a state"),
    ],
    indirect=["model_dir"],
)
def test_what_ranks_cannot_divide_is_refused_before_a_run(
    model_dir: Path, key: str, bad: int, good: int, told: str, tmp_path: Path
) -> None:
    def check(ranks: int) -> None:
        check_run(run_of(model_dir, tmp_path, ranks=ranks, **{key: ranks}))

    with pytest.raises(UsageError, match=key + told):
        check(bad)
    check(good)


def different(outcome: Outcome) -> dict[str, Row]:
    return {row.name: row for row in outcome.rows if row.outcome == "different"}


@of("olmo3")
def test_a_window_left_out_is_noticed(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = Attention((("full_attention", None), ("sliding_attention", None)))
    monkeypatch.setattr(Attention, "of", lambda _: full)
    found = different(compare(model_dir))
    engines = ("the torch engine", "the torch engine, recompute", "the torch engine, keep")
    for name in ("packed rows", "packed rows, shared prompts", *engines):
        worst = found[f"logprobs of {name}"].worst
        assert worst is not None and worst > 0.05
    assert "logprobs of rows of one sequence" not in found, "Transformers makes those masks"


@of("qwen3-moe")
def test_damaged_weights_are_noticed(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = check.write_shards

    def damaged(policy: PreTrainedModel, manifest: Any, memory: memoryview) -> None:
        whole(policy, manifest, memory)
        entry = next(e for e in manifest.tensors if "experts.down_proj" in e.name)
        memory[entry.offset] ^= 1

    monkeypatch.setattr(check, "write_shards", damaged)
    found = different(compare(model_dir))
    for name in ("weights published in float32", "weights published in bfloat16"):
        assert found[name].worst == 1
        assert "experts.down_proj" in found[name].note


def test_as_many_layers_as_the_last_kind_takes() -> None:
    config: Any = ARCHITECTURES["deepseek-v3"].config(6)
    config.first_k_dense_replace = 3
    assert fewest_layers(config) == 4
    config: Any = ARCHITECTURES["llama"].config(6)
    config.no_rope_layers = [1, 1, 1, 0, 1, 1]
    assert fewest_layers(config) == 4


def test_a_copy_has_few_layers_and_short_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    architecture = ARCHITECTURES["gemma2"]
    layers = ["sliding_attention"] * 3 + ["full_attention"]
    more = {"num_hidden_layers": 4, "layer_types": layers, "sliding_window": 4096}
    path = replace(architecture, own=architecture.own | more).write(tmp_path / "model")
    cuts = ["the first 2 of 4 layers", "windows of 16 tokens instead of 4096"]
    result = umbra(path, "--layers", 2)
    assert result.return_value == 0 and "Gemma2ForCausalLM" in result.output
    assert result.output.count(" equal ") == 15, result.output
    assert all(f"compared on a copy with {cut}" in result.output for cut in cuts)
    monkeypatch.setattr(check, "LARGE", 1000)
    assert list(compare(path).cuts) == cuts


def umbra(*arguments: object) -> Result:
    told = [*map(str, arguments), "--no-vllm"]
    return CliRunner().invoke(command, told, standalone_mode=False)


@of("bloom")
def test_an_architecture_not_listed_may_be_named_once_it_was_checked(model_dir: Path) -> None:
    check_architecture(model_dir, checked=["bloom"])
    result = umbra(model_dir, "--json")
    assert isinstance(result.exception, UsageError) and result.exception.exit_code == 2
    assert "BloomForCausalLM" in str(result.exception)
    found = json.loads(result.output)
    (training,) = (row for row in found["rows"] if row["name"] == "training")
    assert not found["equal"] and training["outcome"] == "different"
    assert training["note"].startswith("ValueError: "), "its own mask needs another form than ours"
