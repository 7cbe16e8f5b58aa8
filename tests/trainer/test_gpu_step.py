"""Whole updates on a GPU that is not there: nothing on another device, in a wrong dtype, too large.

Its tensors have no numbers. `one_gpu.cpp` gives a torch without CUDA what autograd asks of a GPU.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.gpu_recipes import RECIPES
from fakes.slowness import seconds

PROGRAMS = Path(__file__).parents[1] / "programs"
TORCH = Path(torch.__file__).parent

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Of each recipe; all in one process, which has the GPU from its start."""
    folder = tmp_path_factory.mktemp("gpu")
    library = folder / "one_gpu.so"
    how = ["-std=c++20", "-shared", "-fPIC", f"-I{TORCH}/include", f"-L{TORCH}/lib"]
    how += ["-lc10", "-ltorch_cpu", f"-Wl,-rpath,{TORCH}/lib", "-o", str(library)]
    source = str(PROGRAMS / "one_gpu.cpp")
    subprocess.run(["g++", source, *how], check=True, timeout=seconds(120.0))
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / "gpu_steps.py"), library, folder / "model", *RECIPES],
        env={**os.environ, "PYTHONPATH": str(PROGRAMS.parent)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=seconds(240.0),
        check=True,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return dict(zip(RECIPES, lines, strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_update_and_its_version(found: dict[str, dict[str, Any]], recipe: str) -> None:
    one = found[recipe]
    assert "raised" not in one, one["raised"]
    assert (one["device"], one["elsewhere"]) == ("cuda:0", [])
    assert one["updates"] == (2 if recipe == "minibatches" else 1)
    # Heads of value models, and adapters of experts, which peft multiplies out of autocast.
    wide = "critic" in recipe or recipe == "experts, LoRA"
    assert one["products"].keys() == {"torch.bfloat16"} | ({"torch.float32"} if wide else set())
    assert one["products"]["torch.bfloat16"] > 20
    assert one["written"] == one["copied"]
    # vLLM quantizes what comes: whole numbers are published, and their rounding is allowed for.
    assert one["published"] == ["BF16"]
    assert one["agreement"] == ("fp8" if "fp8" in recipe else "bfloat16")
    assert bool(one["compared"]) == ("fp8" in recipe)
    assert one["version"] / one["ranks"] <= one["written"] <= one["version"] / one["ranks"] * 1.02
    assert one["largest"][0] <= one["bound"] * 1.01, one["largest"]  # gathered with small ones
