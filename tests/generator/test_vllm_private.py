"""Private names of vLLM stand in one file; checksums tell which workers have a version."""

import ast
from pathlib import Path

import pytest

from umbra.services.generator.vllm.check import stale

FOLDER = Path(__file__).parents[2] / "services" / "generator" / "vllm"
# What users of vLLM's engine are given, and its interface for engines that transfer weights.
PUBLIC = {
    "vllm.distributed.weight_transfer.base", "vllm.distributed.weight_transfer.factory",
    "vllm.engine.arg_utils", "vllm.inputs", "vllm.lora.request",
    "vllm.model_executor.model_loader.reload", "vllm.outputs", "vllm.platforms",
    "vllm.sampling_params", "vllm.v1.engine.async_llm", "vllm.v1.engine.exceptions",
}  # fmt: skip
# Loaded by each of vLLM's processes, which need not import the engine as `private` does.
OF_THE_PLUGIN = {"vllm.v1.engine.output_processor"}


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.py")), ids=lambda file: file.stem)
def test_other_files_import_what_is_public(file: Path) -> None:
    if file.stem == "private":
        return
    tree = ast.parse(file.read_text(encoding="utf-8"))
    found = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    known = PUBLIC | (OF_THE_PLUGIN if file.stem == "plugin" else set())
    assert {name for name in found if name and name.split(".")[0] == "vllm"} <= known


def sums(*digests: str) -> dict[str, dict[str, str]]:
    """Of one weight and a scale that no publish changes, in two workers."""
    return {f"tp{worker}": {"w": digest, "scale": "1"} for worker, digest in enumerate(digests)}


@pytest.mark.parametrize(
    ("disk", "same", "changed", "again", "found"),
    [
        ("ab", "ab", "cd", "ab", ()),
        ("ab", "ab", "cb", "ab", ("tp1 w",)),  # one worker kept its weights
        ("ab", "ax", "cd", "ax", ("tp1 w",)),  # a publish is not what the disk has
        ("ab", "ab", "cd", "cb", ("tp0 w",)),  # the third publish did not come
        ("ab", "ab", "ab", "ab", ("tp0 scale", "tp0 w", "tp1 scale", "tp1 w")),
    ],
)
def test_parameters_that_a_publish_did_not_reach(
    disk: str, same: str, changed: str, again: str, found: tuple[str, ...]
) -> None:
    assert stale(sums(*disk), sums(*same), sums(*changed), sums(*again)) == found
