"""vLLM on a GPU: publishes, three updates under 64 requests, weights as those from disk.

`gpu_session.sh` runs each test on its own: most of their time goes into kernels and graphs.
"""

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.versions import (
    decode,
    finish,
    in_memory,
    load,
    logprobs_keeping_cache,
    logprobs_recomputing_cache,
    prompt,
    request,
    versions_of,
    weights,
)
from fakes.vllm_models import quantized, write_model
from fakes.vllm_serve import opened, vllm_config
from transformers import AutoConfig

from umbra.deploy.model_check.check import compare_vllm
from umbra.services.generator.engines.engine import Engine, EngineOutput
from umbra.services.modeling.models import load_model
from umbra.services.trainer.make_model import make_model
from umbra.services.weights.gpu import cuda

pytest.importorskip("vllm", reason='vLLM is not installed (pip install "umbra-rl[vllm]")')
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),  # it compiles kernels and captures graphs
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]

REQUESTS = 64
VERSIONS = 4
MEAN_ERROR = 0.05  # of a logprob, in bfloat16 against float32
GRAPHS = ("qwen3-moe", "fp8")  # captured for these alone: each capture takes a minute


def test_publishes_reach_all_workers(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    directory = write_model("qwen3", tmp_path / "model")
    rows = list(compare_vllm(directory, AutoConfig.from_pretrained(directory)))
    for row in rows:
        record_property(row.name, f"{row.outcome}, {row.as_text()}")
    assert [row.outcome for row in rows] == ["equal"] * 4, rows


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3-moe"])
@pytest.mark.parametrize("method", [None, "fp8", "fp8_per_channel"])
def test_new_weights_are_served_as_those_from_disk(
    architecture: str, method: str | None, tmp_path: Path
) -> None:
    """A publish takes logprobs as far from Transformers' as the same weights from disk do."""
    own = {"gpu_memory_utilization": 0.3, "enforce_eager": (architecture, method) != GRAPHS}
    found, changed_from_disk = quantized(architecture, method, tmp_path, **own)
    assert not found.stale
    assert found.same < 2 * found.from_disk
    assert found.changed < 2 * changed_from_disk


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "small"
    make_model(path, hidden=128, heads=2, kv_heads=1, layers=2, ff=256)
    return path


@pytest.fixture(scope="module")
def models(model_dir: Path) -> dict[int, Any]:
    """Versions in float32 on the CPU, of numbers that bfloat16 has."""
    found: dict[int, Any] = {}
    for version in range(VERSIONS):
        model = load_model(model_dir, torch.device("cpu"), torch.float32)
        torch.manual_seed(version)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.03 * version * torch.randn_like(parameter))
                parameter.copy_(parameter.bfloat16())
        found[version] = model
    return found


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> Iterator[Engine]:
    sizes = {"slots": REQUESTS, "max_context": 192, "engine_args.gpu_memory_utilization": 0.3}
    config = vllm_config(model_dir, "weight_hub.dtype=bfloat16", device="cuda", **sizes)
    with opened(config) as engine:
        yield engine


@pytest.mark.parametrize(
    ("policy", "reference"),
    [("keep", logprobs_keeping_cache), ("recompute", logprobs_recomputing_cache)],
)
def test_three_updates_in_flight_keep_every_request(
    engine: Engine, models: dict[int, Any], policy: Any, reference: Any
) -> None:
    served = {v: [(n, t.bfloat16()) for n, t in weights(models, v)] for v in range(VERSIONS)}
    load(engine, served[0], 0, "keep")
    engine.submit([request(i, 120) for i in range(REQUESTS)])
    outputs: list[EngineOutput] = []
    for version in range(1, VERSIONS):
        outputs += decode(engine, REQUESTS * 12)
        load(engine, served[version], version, policy)
    outputs += finish(engine)
    assert sorted(o.request_id for o in outputs) == sorted(f"s{i}" for i in range(REQUESTS))
    assert all(map(versions_of, outputs))
    assert max(len(o.spans) for o in outputs) == VERSIONS
    assert mean_error(outputs, models, reference) < MEAN_ERROR


def mean_error(outputs: list[EngineOutput], models: dict[int, Any], reference: Any) -> float:
    """How far logprobs are from the models' own in float32, in the mean."""
    errors: list[float] = []
    for output in outputs:
        again = reference(models, prompt(int(output.request_id[1:])), output)
        errors += [abs(a - b) for a, b in zip(output.logprobs, again, strict=True)]
    return sum(errors) / len(errors)


@pytest.mark.skipif(cuda.cuda_unavailable() is not None, reason=str(cuda.cuda_unavailable()))
def test_a_version_in_gpu_memory_is_mapped_by_the_worker(
    engine: Engine, models: dict[int, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """As planes `cuda_ipc` and `nccl` have it."""
    served = {v: {n: t.bfloat16() for n, t in weights(models, v)} for v in (0, 1)}
    manifest, data = in_memory(served[1])
    device = cuda.Device(0)
    memory = cuda.DeviceMemory(device, len(data))
    host = ctypes.addressof(ctypes.c_char.from_buffer(data))
    device.to_device(memory.address, host, len(data))
    device.drain()
    load(engine, served[0].items(), 0)
    engine.load(manifest, memory, 1, "recompute")
    engine.submit([request(i, 24) for i in range(8)])
    outputs = finish(engine)
    assert all([span.version for span in output.spans] == [1] for output in outputs)
    assert mean_error(outputs, models, logprobs_recomputing_cache) < MEAN_ERROR
    assert "cannot map" not in caplog.text
