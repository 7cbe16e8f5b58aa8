"""The hub's end of plane `cuda_ipc`: an agent holds versions in device memory, exported once.

Slot i of the device memory is a copy of slot i of the arena, made when the first receiver of this
plane is to get what lies there; so the protocol's rule of when a slot may be written holds for it
as well. Receivers map the memory once, and copy from it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from umbra.proto.errors import UmbraError
from umbra.proto.messages import Prepare, Ready, Subscribe
from umbra.services.runtime.gpu.worker_process import START_S, GpuWorkerProcess
from umbra.services.runtime.weights.arena import Arena
from umbra.services.weight_hub.background_plane import Background, Deliver, GiveUp, Late

FAILURES = 2  # uploads that may fail one after the other

log = logging.getLogger(__name__)

Content = tuple[int, Sequence[int]]  # slot, and checksum of every bucket


class IpcPlane:
    """Uploads versions, and tells receivers where they lie.

    Args:
        agent: of the hub, on the receivers' GPU.
        deadline_s: seconds that an upload may take.
    """

    def __init__(self, agent: GpuWorkerProcess, deadline_s: float) -> None:
        self.broken = ""
        self._agent = agent
        self._deadline_s = deadline_s
        self._thread: Background[bytes] = Background("umbra-cuda-ipc")
        self._handle = b""
        self._exported_by = 0  # which start of the agent made the handle
        self._held: dict[str, Prepare] = {}
        self._there: dict[int, Sequence[int]] = {}  # by slot the checksums of what was uploaded
        self._uploading: Content | None = None
        self._failures = 0

    @property
    def busy(self) -> bool:
        """Whether `poll` will have something soon."""
        return bool(self._held) or self._thread.busy

    @property
    def agent_pid(self) -> int | None:
        """Process id of the hub's agent, if it runs."""
        return self._agent.pid

    def layout(self, arena: Arena) -> None:
        """What is pushed from now on lies in `arena`."""
        self._thread.wait()
        self._thread.take()
        self._uploading = None
        self._there.clear()
        self._agent.use(arena, arena.slot_bytes)

    def subscribed(self, name: str, incarnation: str, message: Subscribe) -> None:
        """A receiver was given this plane."""
        self.left(name)

    def hold(self, name: str, prepare: Prepare, now: float) -> None:
        """A version is to go to `name`."""
        self._held[name] = prepare

    def staged(self, name: str, message: Ready) -> None:
        """Nothing follows from it."""

    def left(self, name: str) -> None:
        """A receiver is not subscribed any longer."""
        self._held.pop(name, None)

    def granted(self, slot: int) -> None:
        """`slot` will be written anew."""
        self._there.pop(slot, None)
        if self._uploading is not None and self._uploading[0] == slot:
            self._uploading = None  # its bytes may be of two versions

    def poll(self, now: float) -> list[Late]:
        """Prepares whose version is on the GPU, and those whose version could not get there."""
        late: list[Late] = []
        done = self._thread.take()
        if done is not None:
            late += self._uploaded(done)
        for name, prepare in list(self._held.items()):
            if self._there.get(prepare.slot) == prepare.checksums:
                del self._held[name]
                late.append(Deliver(name, msgspec.structs.replace(prepare, memory=self._handle)))
        if self._held and not self._thread.busy:
            prepare = next(iter(self._held.values()))
            self._uploading = (prepare.slot, prepare.checksums)
            self._thread.start(lambda: self._upload(prepare.slot))
        return late

    def close(self) -> None:
        """End the agent, and with it the memory, as soon as nobody has it mapped."""
        self._thread.close()
        self._agent.kill()

    def _uploaded(self, done: bytes | UmbraError) -> list[Late]:
        uploading, self._uploading = self._uploading, None
        if isinstance(done, UmbraError):
            self._there.clear()
            self._failures += 1
            if self._failures >= FAILURES:
                self.broken = f"the hub's GPU agent does not work: {done}"
            log.warning("plane cuda_ipc: %s", done)
            failed, self._held = self._held, {}
            return [GiveUp(name, prepare, str(done)) for name, prepare in failed.items()]
        self._failures = 0
        if done != self._handle:
            self._there.clear()  # another memory than before
            self._handle = done
        if uploading is not None:
            self._there[uploading[0]] = uploading[1]
        return []

    def _upload(self, slot: int) -> bytes:
        """On the thread: have `slot` on the GPU; the handle of the memory it is in."""
        handle = self._handle
        self._agent.finish_begin()
        if self._agent.starts != self._exported_by:
            handle = bytes.fromhex(self._agent.call("export", START_S)["handle"])
            self._exported_by = self._agent.starts
        self._agent.call("upload", self._deadline_s * 2, slot=slot, deadline_s=self._deadline_s)
        return handle
