"""Host memory that a GPU copies from and to: registered once, and in use until the GPU is done.

The double of a GPU is the slowest that there can be: a stream does nothing before somebody waits
for it. So each wait that is missing shows.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from umbra.services.modeling import gpu_copies
from umbra.services.modeling.gpu_copies import page_lock
from umbra.services.modeling.weights import WeightTable
from umbra.services.trainer.snapshot import tensor_layout, write_shards
from umbra.services.weights.arena import PAGE_BYTES, Arena
from umbra.services.weights.manifest import build_manifest, checksums
from umbra.services.weights.memory import private_memory, shared_memory
from umbra.services.weights.verify import Checksums


class Stream:
    """Does its work when it is waited for."""

    def __init__(self) -> None:
        self._work: list[Callable[[], object]] = []
        self.done = 0

    @property
    def begun(self) -> int:
        return len(self._work)

    def enqueue(self, work: Callable[[], object]) -> None:
        self._work.append(work)

    def go_on(self, until: int) -> None:
        while self.done < until:
            self._work[self.done]()
            self.done += 1

    def wait_stream(self, other: Stream) -> None:
        until = other.begun
        self.enqueue(lambda: other.go_on(until))

    def synchronize(self) -> None:
        self.go_on(self.begun)


class Event:
    is_fast = False  # it has happened whenever it is asked

    def __init__(self, *, blocking: bool) -> None:
        assert blocking

    def record(self, stream: Stream) -> None:
        self._stream, self._at = stream, stream.begun

    def query(self) -> bool:
        if self.is_fast:
            self.synchronize()
        return self._stream.done >= self._at

    def synchronize(self) -> None:
        self._stream.go_on(self._at)


USED: list[Stream] = []  # the last is the current one


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU: casts and copies are work of the current stream."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return True
        if func is torch.Tensor.to:
            source = args[0].as_subclass(torch.Tensor)
            made = torch.empty(source.shape, dtype=args[1])
            USED[-1].enqueue(lambda: made.copy_(source))
            return made.as_subclass(OnGpu)
        if func is torch.Tensor.copy_:
            assert (kwargs or {}) == {"non_blocking": True}
            target, source = (one.as_subclass(torch.Tensor) for one in args)
            if not isinstance(args[0], OnGpu):
                assert target.dtype == source.dtype, "torch would cast it on the host"
            USED[-1].enqueue(lambda: target.copy_(source))
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})


class Cudart:
    """The driver's list of registered memory."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.refuses = 0
        self.device = 3  # of this thread

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        assert address % PAGE_BYTES == 0
        assert flags == 1
        if not self.refuses:
            assert address not in self.registered
            self.registered[address] = size
        return self.refuses

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        assert self.device == 3, "it would make a context on another GPU"
        size = self.registered.pop(address)
        ctypes.string_at(address, size)  # still mapped, or the process dies here
        return 0


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cudart]:
    driver, streams = Cudart(), list[Stream]()

    @contextmanager
    def used(stream: Stream) -> Iterator[None]:
        USED.append(stream)
        yield
        assert USED.pop() is stream

    @contextmanager
    def chosen(device: int) -> Iterator[None]:
        before, driver.device = driver.device, device
        yield
        driver.device = before

    def made(_device: object) -> Stream:
        assert not streams, "torch would keep freed memory for each"
        streams.append(Stream())
        return streams[-1]

    USED[:] = [Stream()]
    gpu_copies._copy_stream.cache_clear()
    doubles = {"device": chosen, "Stream": made, "Event": Event, "stream": used}
    doubles |= {"cudart": lambda: driver, "current_device": lambda: driver.device}
    for name, double in {**doubles, "current_stream": lambda _: USED[-1]}.items():
        monkeypatch.setattr(torch.cuda, name, double)
    yield driver
    gpu_copies._copy_stream.cache_clear()
    USED.clear()
    streams.clear()
    gc.collect()
    assert not driver.registered, "memory was unmapped while CUDA knew it"


def test_a_mapping_is_registered_once_and_until_it_is_unmapped(cudart: Cudart) -> None:
    for make in (private_memory, shared_memory):
        memory = make(3 * PAGE_BYTES)
        page_lock(memory)
        page_lock(memory[PAGE_BYTES:])
        assert list(cudart.registered.values()) == [3 * PAGE_BYTES]
        cudart.device = 0  # as in another thread
        del memory
        assert not cudart.registered
        cudart.device = 3


def test_of_an_arena_is_registered_what_has_memory(cudart: Cudart) -> None:
    """All of it, or the bytes of this trainer host's own ranks; sequence numbers too."""
    arena = Arena.anonymous(slot_bytes=PAGE_BYTES + 1, slots=2)
    page_lock(arena.slot(0))
    page_lock(arena.slot(1))
    assert list(cudart.registered.values()) == [5 * PAGE_BYTES]
    held = arena.slot(1)
    arena.close()
    assert cudart.registered, "a copy out of it may be under way"
    del held
    assert not cudart.registered
    own = [(2 * PAGE_BYTES, 3 * PAGE_BYTES)]
    with closing(Arena.create("holes", "x", slot_bytes=4 * PAGE_BYTES, slots=2, own=own)) as made:
        attached = Arena.attach(made.path, slot_bytes=4 * PAGE_BYTES)
        made.unlink()
        page_lock(attached.slot(0))
        assert list(cudart.registered.values()) == [PAGE_BYTES] * 3
        attached.close()


def test_a_refusal_is_said_once(cudart: Cudart, caplog: pytest.LogCaptureFixture) -> None:
    cudart.refuses = 2
    memory = private_memory(PAGE_BYTES)
    page_lock(memory)
    page_lock(memory)
    (record,) = caplog.records
    assert "CUDA does not page-lock 4096 bytes of host memory (error 2)" in record.message


def model(dtype: torch.dtype, kind: type[torch.Tensor] = OnGpu) -> nn.Module:
    torch.manual_seed(0)
    made = nn.Module()
    for index, shape in enumerate([(300, 40), (7,), (5, 1000), (2, 3, 4)]):
        tensor = torch.randn(shape).to(dtype).as_subclass(kind)
        made.register_parameter(f"w{index}", nn.Parameter(tensor, requires_grad=False))
    return made


class Sums(Checksums):
    """Checksums that are told only of bytes that are there."""

    expected: memoryview
    told = 0

    def until(self, end: int) -> None:
        assert self._data[:end] == self.expected[:end]
        self.told += 1
        super().until(end)


# Bytes between two marks of a copy, and how many there are; whether all events are over at once.
@pytest.fixture(params=[(1, 4, False), (30_000, 1, True), (30_000, 1, False), (1 << 30, 0, False)])
def marks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    nbytes, marks, is_fast = request.param
    monkeypatch.setattr(gpu_copies, "MARK_BYTES", nbytes)
    monkeypatch.setattr(Event, "is_fast", is_fast)
    return marks


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_snapshot_tells_of_bytes_that_are_there(marks: int, cudart: Cudart, dtype: str) -> None:
    """The optimizer's last step may be under way when it begins."""
    source, plain = model(torch.float32), model(torch.float32, torch.Tensor)
    for one, new in zip(source.parameters(), plain.parameters(), strict=True):
        own = one.as_subclass(torch.Tensor).zero_()
        USED[-1].enqueue(lambda own=own, new=new: own.copy_(new))
    manifest = build_manifest(tensor_layout(plain, dtype), bucket_bytes=1024)
    expected = memoryview(bytearray(manifest.total_bytes))
    write_shards(plain, manifest, expected)
    slot = private_memory(manifest.total_bytes)
    sums = Sums(manifest, slot)
    sums.expected = expected
    write_shards(source, manifest, slot, sums=sums)
    assert slot == expected
    assert len(cudart.registered) == 1
    assert sums.result() == checksums(manifest, expected)
    assert sums.told == marks


@pytest.mark.usefixtures("cudart", "marks")
def test_a_load_has_read_everything_when_it_ends() -> None:
    """The engine's last pass may be under way when it begins."""
    target, plain = model(torch.bfloat16), model(torch.bfloat16, torch.Tensor)
    manifest = build_manifest(tensor_layout(plain, "bfloat16"), bucket_bytes=1024)
    data = private_memory(manifest.total_bytes)
    write_shards(plain, manifest, data)
    own = [parameter.as_subclass(torch.Tensor).zero_() for parameter in target.parameters()]
    USED[-1].enqueue(lambda: [check_old(one) for one in own])

    def check_old(one: torch.Tensor) -> None:
        assert not one.any(), "a pass reads weights of two versions"

    WeightTable(target).load(manifest, data)
    data[:] = bytes(len(data))
    USED[-1].synchronize()
    for one, other in zip(own, plain.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("dtype", "threads"), [("float32", 1), ("bfloat16", 2)])
def test_damage_in_shared_memory_is_in_no_checksum(dtype: str, threads: int) -> None:
    """The bytes that the trainer means to write matter, not those that lie there then."""
    torch.set_num_threads(threads)
    trained = model(torch.float32, torch.Tensor)
    trained.register_parameter("big", nn.Parameter(torch.randn(700, 501)))
    manifest = build_manifest(tensor_layout(trained, dtype), bucket_bytes=100_000)
    slot = private_memory(manifest.total_bytes)
    meant = Checksums(manifest, slot, threads)
    write_shards(trained, manifest, slot, sums=meant)
    clean = bytearray(slot)
    slot[manifest.tensors[-1].offset + 70_000] ^= 1  # while the trainer still computes
    assert meant.result() == checksums(manifest, memoryview(clean))
    engine = model(getattr(torch, dtype), torch.Tensor)
    engine.register_parameter("big", nn.Parameter(torch.zeros(501, 700).t()))
    WeightTable(engine).load(manifest, memoryview(clean))
    for name, one in engine.named_parameters():
        served = trained.get_parameter(name).to(getattr(torch, dtype))
        assert torch.equal(one, served.to(one.dtype))
