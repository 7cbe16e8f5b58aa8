"""Weights between a GPU and host memory that is page-locked: bit for bit, and how fast."""

import logging
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

from umbra.proto.records import Manifest
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


def pageable(source: nn.Module, manifest: Manifest) -> dict[str, float]:
    """Seconds of the same copies to and from memory that is not registered."""
    memory, took = memoryview(bytearray(manifest.total_bytes)), dict[str, float]()
    for _ in range(2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        write_shards(source, manifest, memory, sums=Checksums(manifest, memory))
        took["snapshot, pageable"] = time.perf_counter() - began
        target = model("cuda", torch.bfloat16)
        torch.cuda.synchronize()
        began = time.perf_counter()
        WeightTable(target).load(manifest, memory)
        torch.cuda.synchronize()
        took["load, pageable"] = time.perf_counter() - began
    return took


def test_a_slot_that_is_page_locked_is_bit_for_bit_right(
    caplog: pytest.LogCaptureFixture, record_property: Callable[[str, object], None]
) -> None:
    source, plain = model("cuda"), model("cpu")
    manifest = build_manifest(tensor_layout(plain, "bfloat16"), bucket_bytes=4 << 20)
    arena = Arena.create("gpu-copies", "x", slot_bytes=manifest.total_bytes, slots=2)
    try:
        attached = Arena.attach(arena.path, slot_bytes=manifest.total_bytes)
        target = model("cuda", torch.bfloat16)
        expected = memoryview(bytearray(manifest.total_bytes))
        write_shards(plain, manifest, expected)
        with caplog.at_level(logging.WARNING):
            for slot in (0, 1, 0):
                took: dict[str, float] = {}
                view = attached.slot(slot)
                torch.cuda.synchronize()
                began = time.perf_counter()
                sums = Checksums(manifest, view)
                write_shards(source, manifest, view, sums=sums)
                assert sums.result() == checksums(manifest, expected)
                took["snapshot"] = time.perf_counter() - began
                assert view == expected
                for parameter in target.parameters():
                    parameter.data.zero_()
                torch.cuda.synchronize()
                began = time.perf_counter()
                WeightTable(target).load(manifest, view)
                took["load"] = time.perf_counter() - began
                for one, other in zip(target.parameters(), plain.parameters(), strict=True):
                    assert torch.equal(one.cpu(), other.bfloat16())
        assert not caplog.records, "CUDA refused"
        for name, seconds in {**took, **pageable(source, manifest)}.items():  # of the third time
            record_property(f"{name}, GB/s", round(manifest.total_bytes / seconds / 1e9, 1))
        del view
        attached.close()
    finally:
        arena.unlink()
        arena.close()


def test_a_refusal_leaves_no_error_behind(caplog: pytest.LogCaptureFixture) -> None:
    """Scenario: somebody else in this process has registered the same memory."""
    memory = private_memory(1 << 20)
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    assert int(torch.cuda.cudart().cudaHostRegister(address, len(memory), 1)) == 0  # type: ignore[attr-defined]
    with caplog.at_level(logging.WARNING):
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
