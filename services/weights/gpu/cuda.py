"""CUDA for the planes `nccl` and `cuda_ipc`: memory, streams, communicators. All CuPy is in here.

CuPy is imported when it is first used. NCCL is entered by worker processes only (`worker`): a
communicator whose peer is gone may block for ever, and then only the end of its process helps.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from umbra.proto.errors import PeerLostError, StartupError, UmbraError
from umbra.proto.records import GpuFacts

NO_NCCL = (
    "CuPy finds no libnccl.so.2, which torch brings: pip install --force-reinstall torch (another "
    "nvidia-nccl package would replace that of torch)"
)
# What decides how ranks talk to each other, and so must be the same in all of them.
SHARED_VARIABLES = (
    "NCCL_ALGO", "NCCL_PROTO", "NCCL_BUFFSIZE", "NCCL_MAX_CTAS", "NCCL_MIN_CTAS", "NCCL_NET",
    "NCCL_NTHREADS", "NCCL_CUMEM_ENABLE", "NCCL_MNNVL_ENABLE", "NCCL_NVLS_ENABLE",
    "NCCL_MULTI_RANK_GPU_ENABLE",
)  # fmt: skip
ABORT_DEADLINE_S = 5.0  # an abort may block in turn
HOST_REGISTER_PORTABLE = 1
DEVICE_ALIGN_BYTES = 512
SUCCESS, OUT_OF_MEMORY, NOT_READY = 0, 2, 600  # of cudaError_t
COMPUTE_MODE = 20  # of cudaDeviceAttr
CLOSED_MODES = {2: "prohibited", 3: "exclusive-process"}
# CuPy has no texts for these, and raises a KeyError in their place.
NCCL_STATES = {7: "NCCL_IN_PROGRESS", 8: "NCCL_TIMEOUT"}
IN_PROGRESS = 7


class GpuError(UmbraError):
    """CUDA failed. Most such errors stay for as long as the process does, so it should end."""


def _to_install() -> str:
    """Return the extra that brings the CuPy for torch.version.cuda, read without torch's import."""
    torch = importlib.util.find_spec("torch")
    text = Path(torch.origin).with_name("version.py").read_text() if torch and torch.origin else ""
    built = re.search(r"^cuda\b.*'(\d+)\.", text, re.MULTILINE)
    if extra := {"12": "nccl", "13": "nccl-cuda13"}.get(built[1] if built else ""):
        return f"pip install 'umbra-rl[{extra}]'"
    return "pip install 'umbra-rl[nccl]' for CUDA 12, or [nccl-cuda13] for CUDA 13"


@cache
def cuda_unavailable() -> str | None:
    try:
        from cupy import cuda
    except ImportError:
        return f"cupy is not installed: {_to_install()}"
    try:
        count = cuda.runtime.getDeviceCount()
    except cuda.runtime.CUDARuntimeError as error:
        return f"CUDA does not work here: {error}"
    return None if count else "there is no CUDA device"


@cache
def nccl_unavailable() -> str | None:
    if (reason := cuda_unavailable()) is not None:
        return reason
    from cupy.cuda import nccl

    return None if nccl.available else NO_NCCL


def facts(device: int) -> GpuFacts:
    """Return the facts that must agree before two processes enter NCCL, and this one's place.

    Raises:
        StartupError: there is no such GPU.
    """
    if (reason := cuda_unavailable()) is not None:
        raise StartupError(f"the GPU cannot be used: {reason}")
    from cupy.cuda import nccl, runtime

    shared = {name: os.environ[name] for name in SHARED_VARIABLES if name in os.environ}
    with _cuda(f"GPU {device} cannot be used", StartupError):
        if not 0 <= device < (count := runtime.getDeviceCount()):
            raise StartupError(f"there is no GPU {device}: {count} can be seen")
        if closed := CLOSED_MODES.get(runtime.deviceGetAttribute(COMPUTE_MODE, device)):
            raise StartupError(
                f"GPU {device} is in compute mode {closed}, which keeps a second process out: set "
                f"it with `nvidia-smi -i {device} -c DEFAULT`, or weight_hub.plane to shm or tcp"
            )
        return GpuFacts(
            nccl=nccl.get_version() if nccl.available else 0,
            cuda_major=runtime.runtimeGetVersion() // 1000,
            variables=shared,
            device=_identity(device),
        )


def index_of(gpu: GpuFacts) -> int:
    """Return the number in this process of a GPU that a worker has looked at.

    It may be another there: CUDA may have begun here before CUDA_VISIBLE_DEVICES was set.

    Raises:
        StartupError: this process does not see it.
    """
    from cupy.cuda import runtime

    with _cuda("the identity of a GPU cannot be read", StartupError):
        for device in range(runtime.getDeviceCount()):
            if _identity(device) == gpu.device:
                return device
    raise StartupError(f"GPU {gpu.device} is not visible in this process: set CUDA_VISIBLE_DEVICES")


def _identity(device: int) -> str:
    """Return a GPU's identity on its host: its place on the bus, and the UUID, for parts (MIG).

    CuPy cuts the UUID at its first zero byte, so that alone it may be the same for two GPUs.
    """
    from cupy.cuda import runtime

    uuid = bytes(runtime.getDeviceProperties(device)["uuid"]).hex()
    return f"{runtime.deviceGetPCIBusId(device)} {uuid}"


def unique_id() -> bytes:
    """Return a fresh id for one communicator. Rank 0 makes it, and listens for the others."""
    from cupy.cuda import nccl

    with _nccl("NCCL: no id for a communicator"):
        return nccl.get_unique_id()


def device_stride(slot_bytes: int) -> int:
    """Return the bytes from one slot to the next in device memory."""
    return -(-slot_bytes // DEVICE_ALIGN_BYTES) * DEVICE_ALIGN_BYTES


@contextmanager
def _cuda(action: str, kind: type[UmbraError] = GpuError) -> Iterator[None]:
    """Raise CUDA's errors as `kind`, with the sentence `action`."""
    from cupy import cuda

    try:
        yield
    except (cuda.runtime.CUDARuntimeError, cuda.driver.CUDADriverError) as error:
        raise kind(f"{action}: {error}") from error


@contextmanager
def _nccl(action: str) -> Iterator[None]:
    """Raise NCCL's and CUDA's errors as a lost peer."""
    from cupy.cuda import nccl

    try:
        with _cuda(action, PeerLostError):
            yield
    except nccl.NcclError as error:
        raise PeerLostError(f"{action}: {error}") from error
    except KeyError as error:  # CuPy has no text for it
        raise PeerLostError(f"{action}: {NCCL_STATES.get(error.args[0], error)}") from error


class CudaEvent:
    """A point in a stream: `done` once everything before it has happened."""

    def __init__(self, stream: Any) -> None:
        from cupy import cuda

        self._stream = stream
        with _cuda("an event cannot be put into a stream"):
            self.event = cuda.Event(disable_timing=True)
            self.event.record(stream)

    @property
    def done(self) -> bool:
        """Return whether the stream has come to it; raises GpuError if it never will."""
        with _cuda("an operation on the GPU failed"):
            if self.event.done:
                return True
            # The event takes any error for "not yet".
            from cupy.cuda import runtime

            status = runtime.streamQuery(self._stream.ptr)
            if status not in (SUCCESS, NOT_READY):
                raise runtime.CUDARuntimeError(status)
        return False


class Device:
    """A GPU, with a stream for copies and one for collectives; its methods raise GpuError.

    Memory comes from CUDA itself and not from a pool: NCCL and IPC want whole allocations. A thread
    that did not make this calls `use` first: CUDA remembers the current device by thread.
    """

    def __init__(self, index: int) -> None:
        from cupy import cuda

        self.index = index
        self._runtime = cuda.runtime
        with _cuda(f"GPU {index} cannot be used", StartupError):
            self._device = cuda.Device(index)
            self._device.use()
            self.copies = cuda.Stream(non_blocking=True)
            self.collectives = cuda.Stream(non_blocking=True)

    def use(self) -> None:
        with self._working("it cannot be made the current device"):
            self._device.use()

    def allocate(self, size: int) -> int:
        """Return the address of `size` bytes of memory; raises StartupError if there is less."""
        free = 0
        try:
            free, _ = self._runtime.memGetInfo()
            if size > free:
                raise self._runtime.CUDARuntimeError(OUT_OF_MEMORY)
            return self._runtime.malloc(size)
        except self._runtime.CUDARuntimeError as error:
            raise StartupError(
                f"GPU {self.index} has no room for {size} bytes of weights, {free} are free "
                f'({error}); set weight_hub.plane = "shm" or "tcp", which need none'
            ) from error

    @property
    def total_bytes(self) -> int:
        with self._working("it does not say how much memory it has"):
            return self._runtime.memGetInfo()[1]

    def free(self, address: int) -> None:
        with self._working("memory cannot be given back"):
            self._runtime.free(address)

    def pin(self, memory: memoryview) -> int:
        """Register writable host memory, for copies at full speed; StartupError if refused."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        action = f"{len(memory)} bytes of host memory cannot be pinned for GPU {self.index}"
        with _cuda(action, StartupError):
            self._runtime.hostRegister(address, len(memory), HOST_REGISTER_PORTABLE)
        return address

    def unpin(self, address: int) -> None:
        with self._working("host memory cannot be unpinned"):
            self._runtime.hostUnregister(address)

    def to_device(self, target: int, source: int, size: int) -> None:
        self._copy(target, source, size, self._runtime.memcpyHostToDevice)

    def to_host(self, target: int, source: int, size: int) -> None:
        self._copy(target, source, size, self._runtime.memcpyDeviceToHost)

    def within(self, target: int, source: int, size: int) -> None:
        self._copy(target, source, size, self._runtime.memcpyDeviceToDevice)

    def mark_copies(self) -> CudaEvent:
        """Mark the copies so far; later collectives wait for them."""
        return self._mark(self.copies, self.collectives)

    def mark_collectives(self) -> CudaEvent:
        """Mark the collectives so far; later copies wait for them."""
        return self._mark(self.collectives, self.copies)

    def drain(self) -> None:
        """Wait until nothing that was begun can touch memory any more."""
        with self._working("an operation failed"):
            self.collectives.synchronize()
            self.copies.synchronize()

    def export(self, address: int) -> bytes:
        """Return a handle with which another process can map an allocation; call it once."""
        with self._working("no handle of its memory"):
            return self._runtime.ipcGetMemHandle(address)

    def open(self, handle: bytes) -> int:
        """Map another process's allocation; slow.

        Raises:
            StartupError: it cannot be mapped: another GPU or machine, or its owner is gone.
        """
        with _cuda("the hub's device memory cannot be mapped", StartupError):
            return self._runtime.ipcOpenMemHandle(handle)

    def close(self, address: int) -> None:
        with self._working("memory of the hub cannot be unmapped"):
            self._runtime.ipcCloseMemHandle(address)

    def _working(self, action: str) -> AbstractContextManager[None]:
        return _cuda(f"GPU {self.index} has failed: {action}")

    def _copy(self, target: int, source: int, size: int, kind: int) -> None:
        with self._working(f"a copy of {size} bytes"):
            self._runtime.memcpyAsync(target, source, size, kind, self.copies.ptr)

    def _mark(self, stream: Any, later: Any) -> CudaEvent:
        mark = CudaEvent(stream)
        with self._working("one stream cannot wait for another"):
            later.wait_event(mark.event)
        return mark


class DeviceMemory:
    """`size` bytes on a GPU, or the memory of a `handle`, given back with the last reference.

    Torch and CuPy take it as an array of bytes without a copy (`__cuda_array_interface__`).
    """

    def __init__(self, device: Device, size: int, handle: bytes = b"") -> None:
        self.device = device
        self.size = size
        self._imported = handle
        self.address = device.open(handle) if handle else device.allocate(size)
        end = device.close if handle else device.free
        # Not at exit: the driver may be gone already, and takes everything back anyway.
        weakref.finalize(self, _give_back, device, end, self.address).atexit = False

    def __len__(self) -> int:
        return self.size

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        place = (self.address, False)
        return {"shape": (self.size,), "typestr": "|u1", "data": place, "version": 3}

    @cached_property
    def handle(self) -> bytes:
        if self._imported:
            return self._imported
        self.device.use()
        return self.device.export(self.address)

    def __bytes__(self) -> bytes:
        self.device.use()
        host = ctypes.create_string_buffer(self.size)
        self.device.to_host(ctypes.addressof(host), self.address, self.size)
        self.device.drain()
        return host.raw


def _give_back(device: Device, end: Callable[[int], object], address: int) -> None:
    with suppress(Exception):  # an error can't be reported here; the next use of the GPU raises it
        device.use()  # the last reference may go in any thread
        end(address)


class NcclCommunicator:
    """A communicator of one epoch.

    Making it blocks until all ranks are there, for ever if one never comes: that is what the worker
    is killed for. Once made, nothing here blocks.

    Args:
        device: whose stream `collectives` is used.
        size: number of ranks.
        uid: from `unique_id`, the same in all ranks.
        rank: of this process; 0 sends.

    Raises:
        PeerLostError: NCCL or CUDA failed.
    """

    def __init__(self, device: Device, size: int, uid: bytes, rank: int) -> None:
        from cupy.cuda import nccl

        self._nccl = nccl
        # An abort comes from another thread, and frees what the calls of this one would still use.
        self._entering = threading.Lock()
        self._stream = device.collectives
        with _nccl("NCCL: the communicator could not be made"):
            self._comm: nccl.NcclCommunicator | None = nccl.NcclCommunicator(size, uid, rank)
        # The first collective connects the ranks, which may block; later ones are only enqueued.
        warm_up = device.allocate(1)
        try:
            self.broadcast(warm_up, 1)
            with _nccl("NCCL: the first broadcast"):
                self._stream.synchronize()
        except BaseException:
            self.abort()
            raise
        finally:
            device.free(warm_up)

    def broadcast(self, address: int, size: int) -> None:
        """Enqueue: `size` bytes go from rank 0 to `address` in all others; raises PeerLostError."""
        with self._entering, _nccl("NCCL broadcast"):
            comm = self._working_comm()
            comm.bcast(address, size, self._nccl.NCCL_UINT8, 0, self._stream.ptr)

    def check(self) -> None:
        """Raise PeerLostError if NCCL has noticed that something is wrong."""
        with self._entering, _nccl("NCCL"):
            comm = self._working_comm()
            try:
                comm.check_async_error()
            except KeyError as error:
                if error.args[0] != IN_PROGRESS:  # which is no error
                    raise

    def _working_comm(self) -> Any:
        if self._comm is None:
            raise PeerLostError("the NCCL communicator was aborted")
        return self._comm

    def abort(self) -> bool:
        """End it, without the other ranks; False if even that fails, and the process has to go."""
        # Not left to the garbage collector: it would `destroy`, which waits for the other ranks.
        if not self._entering.acquire(timeout=ABORT_DEADLINE_S):
            return False  # a call hangs in NCCL
        comm, self._comm = self._comm, None
        self._entering.release()
        if comm is None:
            return True
        ended = threading.Event()

        def abort() -> None:
            with suppress(PeerLostError), _nccl("NCCL abort"):
                comm.abort()
                ended.set()

        threading.Thread(target=abort, name="nccl-abort", daemon=True).start()
        return ended.wait(ABORT_DEADLINE_S)
