"""Planes: ways for the bytes of a version to get from the hub to a receiver, and their choice.

Plane `shm` is here: engines load versions from the hub's arena in /dev/shm, and nothing is copied
before. The hub verifies a version where it lies, once for all receivers; a relay as it fetches it.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from umbra.proto.errors import PeerLostError, RejectedError, UmbraError, UsageError
from umbra.proto.messages import Prepare, Ready, Subscribe, Subscribed
from umbra.proto.records import GpuFacts, Manifest
from umbra.services.weights.arena import Arena
from umbra.services.weights.gpu.cuda import cuda_unavailable, nccl_unavailable
from umbra.services.weights.manifest import Part
from umbra.services.weights.verify import THREADS, Checksums, SlotGuard

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Receipt:
    """The outcome of one version.

    `data`: its bytes, as an engine loads them; with a `guard` in memory that others may write.
    `unusable`: this plane will never work between the hub and us.
    """

    wire_s: float = 0.0
    stage_s: float = 0.0
    wire_bytes: int = 0
    error: str = ""
    source_lost: bool = False
    unusable: bool = False
    data: Part | None = None
    guard: SlotGuard | None = None


Receiving = Generator[int | None, None, Receipt]
"""A receipt of a version, step by step; no step blocks for long.

It yields each bucket that is in place and verified, or None while it waits. Closing it gives the
version up: nothing is written any more when `close` returns.
"""


class ReceiverEnd(Protocol):
    """The receiver's end of a plane, for one layout. Used by one thread."""

    def receive(self, message: Prepare) -> Receiving:
        """Receive the version that `message` names, in place of the one before.

        What goes wrong is in the receipt. Raises GpuError if CUDA failed in this process.
        """
        ...

    def close(self) -> None:
        """Release files and sockets; versions that were handed out stay valid."""
        ...


@dataclass(frozen=True, slots=True)
class Settled:
    """Send this Prepare, completed by its plane, now; with `error`, its push came to nothing."""

    receiver: str
    prepare: Prepare
    error: str = ""


class HubEnd:
    """The hub's end of a plane, for all of its receivers. Used by one thread; nothing blocks."""

    plane: str
    broken = ""  # why it does not work after all; empty while it does

    @property
    def busy(self) -> bool:
        """Return whether `poll` must be called soon, though no call has ended."""
        return False

    def layout(self, arena: Arena, manifest: Manifest) -> None:
        """Push versions from `arena` from now on."""

    def subscribed(self, name: str, incarnation: str, message: Subscribe) -> None:
        """Note that a receiver was given this plane."""

    def prepare(self, name: str, prepare: Prepare, now: float) -> Iterable[Settled]:
        """Prepare a version for `name` in place of the one before; return outcomes due at once."""
        raise NotImplementedError

    def poll(self, now: float) -> Iterable[Settled]:
        """Return the other outcomes due now. Receivers may leave between two of them."""
        return ()

    def staged(self, name: str, message: Ready) -> None:
        """Note that a receiver, of whichever plane, has a version, or could not get it."""

    def left(self, name: str) -> None:
        """Note that a receiver is not subscribed any longer, or not by this plane."""

    def granted(self, slot: int) -> None:
        """Let go of `slot`, which will be overwritten as soon as this returns."""

    def close(self) -> None:
        """End threads, sockets and workers."""


T = TypeVar("T")


class Background(Generic[T]):
    """One call at a time on a thread of its own, which calls `wake` when a call has ended."""

    def __init__(self, name: str, wake: Callable[[], object] = lambda: None) -> None:
        self.cancelled = threading.Event()  # nobody wants the result of the call under way
        self._wake = wake
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._future: Future[T] | None = None

    @property
    def busy(self) -> bool:
        """Return whether a call is under way, or its result was not taken yet."""
        return self._future is not None

    def start(self, call: Callable[[], T]) -> None:
        assert self._future is None
        self.cancelled.clear()
        self._future = self._thread.submit(call)
        self._future.add_done_callback(lambda _: self._wake())

    def take(self) -> T | UmbraError | None:
        """Return the result of a call that has ended, or its UmbraError, once; else None."""
        if self._future is None or not self._future.done():
            return None
        future, self._future = self._future, None
        try:
            return future.result()
        except UmbraError as error:
            return error

    def finish(self, *, cancel: bool = False) -> T | UmbraError | None:
        """Wait for the call under way, if there is one, and return as `take` does."""
        if cancel:
            self.cancelled.set()
        wait([self._future] if self._future is not None else [])
        return self.take()

    def close(self) -> None:
        self.cancelled.set()
        self._thread.shutdown()


Content = tuple[int, Sequence[int]]
"""A version in the arena: its slot, and the checksum of every bucket."""


class OncePerVersion(HubEnd):
    """The hub's end of a plane that handles a version once, for all receivers of it."""

    def __init__(self, wake: Callable[[], object] = lambda: None) -> None:
        self._thread: Background[bytes] = Background(f"umbra-{self.plane}", wake)
        self._layout: tuple[Arena, Manifest] | None = None
        self._waiting: dict[str, Prepare] = {}
        self._content: Content | None = None  # under way
        self._handled: dict[int, Sequence[int]] = {}  # by slot the version's checksums

    def layout(self, arena: Arena, manifest: Manifest) -> None:
        self._thread.finish(cancel=True)
        self._layout, self._content = (arena, manifest), None
        self._handled.clear()

    def subscribed(self, name: str, incarnation: str, message: Subscribe) -> None:
        self.left(name)

    def prepare(self, name: str, prepare: Prepare, now: float) -> Iterable[Settled]:
        if self._handled.get(prepare.slot) == prepare.checksums:
            return (Settled(name, self._complete(prepare)),)
        self._waiting[name] = prepare
        return ()

    def left(self, name: str) -> None:
        self._waiting.pop(name, None)

    def granted(self, slot: int) -> None:
        if self._content is not None and self._content[0] == slot:
            self._content = None  # its bytes may be of two versions
        self._handled.pop(slot, None)

    def poll(self, now: float) -> list[Settled]:
        """Return the Prepares whose version was handled, or could not be."""
        outcomes: list[Settled] = []
        done = self._thread.take()
        if done is not None:
            content, self._content = self._content, None
            self._note(done)
            error = str(done) if isinstance(done, UmbraError) else ""
            if error:
                log.warning("plane %s: %s", self.plane, error)
            elif content is not None:
                self._handled[content[0]] = content[1]
            for name, prepare in list(self._waiting.items()):
                if (prepare.slot, prepare.checksums) == content:
                    del self._waiting[name]
                    outcomes.append(Settled(name, self._complete(prepare), error))
        if self._waiting and not self._thread.busy:
            prepare = next(iter(self._waiting.values()))
            self._content = prepare.slot, prepare.checksums
            self._thread.start(lambda: self._handle(prepare))
        return outcomes

    def close(self) -> None:
        self._thread.close()

    def _handle(self, prepare: Prepare) -> bytes:
        """Handle a version, on the thread; an UmbraError fails its pushes."""
        raise NotImplementedError

    def _note(self, done: bytes | UmbraError) -> None:
        """Note what `_handle` has returned or raised."""

    def _complete(self, prepare: Prepare) -> Prepare:
        return prepare


class ShmHub(OncePerVersion):
    """The hub's end: receivers load from the arena what it `verifies` there, or a relay fetched."""

    plane = "shm"

    def __init__(self, wake: Callable[[], object] = lambda: None, *, verifies: bool = True) -> None:
        super().__init__(wake)
        self._verifies = verifies

    def _handle(self, prepare: Prepare) -> bytes:
        """Verify a version where it lies."""
        assert self._layout is not None
        if not self._verifies:
            return b""
        arena, manifest = self._layout
        sums = Checksums(manifest, arena.slot(prepare.slot), THREADS)
        for _, end in manifest.buckets:
            if self._thread.cancelled.is_set():
                raise PeerLostError("its verification was cancelled")
            sums.until(end)
        if wrong := sums.wrong(prepare.checksums):
            raise PeerLostError(wrong)
        return b""


class ShmReceiver:
    """The receiver's end: maps versions in the hub's arena; StartupError if it can't be seen."""

    def __init__(self, reply: Subscribed) -> None:
        self._manifest = reply.manifest
        self._mapped: set[int] = set()  # slots
        size = reply.manifest.total_bytes
        self._arena = Arena.attach(reply.path, slot_bytes=size, populate=False)

    def receive(self, message: Prepare) -> Receiving:
        """Map a version bucket by bucket, the first time that its slot is used."""
        manifest, began = self._manifest, time.perf_counter()
        try:
            self._arena.check()
            data = self._arena.slot(message.slot)
            guard = SlotGuard(self._arena.sequence(message.slot), self._arena.check)
            for index, (start, end) in enumerate(manifest.buckets):
                self._arena.check()
                if message.slot not in self._mapped:
                    bytes(data[start : end : mmap.PAGESIZE])
                yield index
            self._mapped.add(message.slot)
            guard.verify()
        except (IndexError, OSError, UmbraError) as problem:
            return Receipt(stage_s=time.perf_counter() - began, error=str(problem))
        return Receipt(stage_s=time.perf_counter() - began, data=data, guard=guard)

    def close(self) -> None:
        self._arena.close()


AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Side:
    """One end of a pair: which /dev/shm it sees, and its GPU."""

    host: str
    gpu: GpuFacts | None = None


# In the hub's order of preference.
PLANES = ("cuda_ipc", "shm", "nccl", "tcp")
GPU_PLANES = ("cuda_ipc", "nccl")


def unavailable(plane: str) -> str | None:
    """Return why this process cannot use `plane`; None if it can."""
    if plane == "cuda_ipc":
        return cuda_unavailable()
    return nccl_unavailable() if plane == "nccl" else None


def obstacle(plane: str, hub: Side, receiver: Side) -> str | None:
    """Return why `plane` cannot connect a hub and a receiver; None if it can."""
    if plane == "tcp":
        return None
    if plane in GPU_PLANES:
        if receiver.gpu is None:
            return "the receiver has no GPU"
        if hub.gpu is None:
            return "the hub has no GPU"
        if plane == "nccl":
            return mismatch(hub.gpu, receiver.gpu)
    if hub.host != receiver.host:  # which may have a GPU at the same place on its bus
        return "the hub's /dev/shm is not the receiver's"
    if plane == "cuda_ipc" and hub.gpu and receiver.gpu and hub.gpu.device != receiver.gpu.device:
        return "the receiver is on another GPU than the hub"
    return None


def mismatch(hub: GpuFacts, receiver: GpuFacts) -> str | None:
    """Return why these two would hang together in NCCL; None if they may enter it."""
    if receiver.nccl == 0 or hub.nccl == 0:
        return f"the {'receiver' if receiver.nccl == 0 else 'hub'} has no NCCL"
    if hub.nccl != receiver.nccl:
        return f"NCCL {receiver.nccl} and the hub's {hub.nccl} differ: install the same torch"
    if hub.cuda_major != receiver.cuda_major:
        return f"CUDA {receiver.cuda_major} and the hub's {hub.cuda_major} differ"
    if differing := {name for name, _ in hub.variables.items() ^ receiver.variables.items()}:
        return f"NCCL's environment variables differ: {', '.join(sorted(differing))}"
    return None


def check_plane(configured: str) -> None:
    """Raise UsageError if `weight_hub.plane` names a plane that this hub cannot use."""
    if configured != AUTO and (reason := unavailable(configured)) is not None:
        usable = ", ".join(plane for plane in PLANES if unavailable(plane) is None)
        raise UsageError(
            f'weight_hub.plane = "{configured}" cannot be used: {reason}; set "{AUTO}" or one of: '
            f"{usable}"
        )


def choose_plane(
    configured: str,
    hub: Side,
    receiver: Side,
    offered: Sequence[str],
    broken: Mapping[str, str] | None = None,
) -> str:
    """Return the plane for a receiver that offers `offered`.

    Args:
        broken: why planes that are available do not work after all, by name.

    Raises:
        RejectedError: they have none in common; the reason says why for each.
    """
    reasons: list[str] = []
    for plane in PLANES:
        if plane not in offered or configured not in (AUTO, plane):
            continue
        reason = unavailable(plane) or (broken or {}).get(plane) or obstacle(plane, hub, receiver)
        if reason is None:
            return plane
        reasons.append(f"{plane}: {reason}")
    refusal = "; ".join(reasons) or f"plane {configured} is set, {list(offered)} were offered"
    raise RejectedError(f"no way to push weights to this receiver ({refusal})", code="no_plane")
