"""Weights between a GPU and host memory that is page-locked: bit for bit, and how fast."""

import time
from collections.abc import Callable
from contextlib import closing

import pytest
import torch
from torch import nn

from umbra.services.modeling.gpu_copies import page_lock
from umbra.services.modeling.weights import WeightTable
from umbra.services.trainer.snapshot import tensor_layout, write_shards
from umbra.services.weights.arena import Arena
from umbra.services.weights.manifest import build_manifest, checksums
from umbra.services.weights.memory import private_memory
from umbra.services.weights.verify import Checksums

pytestmark = pytest.mark.gpu
BYTES = 512 << 20


def model(device: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    made = nn.Module()
    rows = BYTES // 2 // 16 // 1024
    for index in range(15):
        made.register_parameter(f"w{index}", nn.Parameter(torch.randn(rows, 1024)))
    made.register_parameter("norm", nn.Parameter(torch.randn(1000)))
    made.register_parameter("scale", nn.Parameter(torch.randn(())))
    return made.to(device, dtype)


def test_a_slot_that_is_page_locked_is_bit_for_bit_right(
    caplog: pytest.LogCaptureFixture, record_property: Callable[[str, object], None]
) -> None:
    source, plain = model("cuda"), model("cpu")
    manifest = build_manifest(tensor_layout(plain, "bfloat16"), bucket_bytes=4 << 20)
    target = model("cuda", torch.bfloat16)
    expected = memoryview(bytearray(manifest.total_bytes))
    write_shards(plain, manifest, expected)
    size = manifest.total_bytes
    with closing(Arena.create("gpu-copies", "x", slot_bytes=size, slots=2)) as arena:
        attached = Arena.attach(arena.path, slot_bytes=size)
        arena.unlink()
        for slot in (0, 1, 0):
            view = attached.slot(slot)
            torch.cuda.synchronize()
            began = time.perf_counter()
            sums = Checksums(manifest, view)
            write_shards(source, manifest, view, sums=sums)
            assert sums.result() == checksums(manifest, expected)
            record_property("snapshot, GB/s", round(size / (time.perf_counter() - began) / 1e9, 1))
            assert view == expected
            for parameter in target.parameters():
                parameter.data.zero_()
            torch.cuda.synchronize()
            began = time.perf_counter()
            WeightTable(target).load(manifest, view)
            torch.cuda.synchronize()
            record_property("load, GB/s", round(size / (time.perf_counter() - began) / 1e9, 1))
            for one, other in zip(target.parameters(), plain.parameters(), strict=True):
                assert torch.equal(one.cpu(), other.bfloat16())
        assert not caplog.records, "CUDA refused"
        del view
        attached.close()


def test_a_refusal_leaves_no_error_behind(caplog: pytest.LogCaptureFixture) -> None:
    """Scenario: somebody else in this process has registered the same memory."""
    memory = private_memory(1 << 20)
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    assert int(torch.cuda.cudart().cudaHostRegister(address, len(memory), 1)) == 0  # type: ignore[attr-defined]
    page_lock(memory)
    assert len(caplog.records) == 1
    assert torch.ones(3, device="cuda").sum().item() == 3
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[attr-defined]


def test_memory_is_given_back_before_it_is_unmapped() -> None:
    for _ in range(20):
        memory = private_memory(64 << 20)
        page_lock(memory)
        torch.ones(1 << 20, device="cuda").cpu()
        del memory
    assert torch.ones(3, device="cuda").sum().item() == 3
