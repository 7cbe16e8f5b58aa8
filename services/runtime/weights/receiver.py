"""A generator's half of a push: stage a version in private memory, verify it, hand it over."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

from umbra.proto.errors import DeadlineError, StartupError, UmbraError
from umbra.proto.messages import (
    Abort,
    Commit,
    Committed,
    HubStatus,
    HubStatusRequest,
    Message,
    Prepare,
    Ready,
    Subscribe,
    Subscribed,
)
from umbra.proto.records import Manifest
from umbra.services.runtime.gpu.cuda import DeviceMemory
from umbra.services.runtime.gpu.receiving import GpuReceiving
from umbra.services.runtime.net.channel import Channel
from umbra.services.runtime.process.threads import foreseen
from umbra.services.runtime.weights.arena import shm_host
from umbra.services.runtime.weights.manifest import check_manifest
from umbra.services.runtime.weights.memory import private_memory
from umbra.services.runtime.weights.plane_reader import PlaneReader, ReadResult
from umbra.services.runtime.weights.plane_readers import GPU_PLANES, Buffers, PlaneReaders
from umbra.services.runtime.weights.staging import Candidate, Staging

WAKE_S = 0.2  # how soon the thread sees that it should end
CLOSE_DEADLINE_S = 5.0
RELAY_SILENT_S = 5.0  # until a relay counts as gone

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class StagedVersion:
    """A complete, verified version.

    `data` (`[manifest.total_bytes]`, writable, private; on the GPU for plane `cuda_ipc`) stays as
    it is until `Receiver.committed`.
    """

    version: int
    manifest: Manifest
    data: memoryview | DeviceMemory
    candidate: Candidate


class Receiver:
    """Gets every new version from the hub; a thread of its own stages while the engine goes on.

    Args:
        channel: to the weight hub.
        host: names the /dev/shm of this process; empty = find out (`shm_host`).
        planes: offered to the hub, best first, those of `gpu` left out.
        frame_bytes: of one message, at most, where weights come over a socket.
        open_intake: for a relay, which has memory of its own: takes the place of our planes'.
        serves: endpoint at which a relay serves others; stated to the hub.
        buckets: endpoint at which a relay hands buckets on; stated to the hub.
        streamed: `open_intake` keeps nothing: the hub's slot is read until `committed`.
        allocate: gives the memory in which versions are staged, so many writable bytes.
        gpu: for planes `nccl` and `cuda_ipc`, which are then offered as well; closed with this.
        check_s: seconds of silence after which it asks the hub whether it is still subscribed.
        retry_s: seconds between being dropped and subscribing again.
    """

    def __init__(
        self,
        channel: Channel,
        host: str = "",
        planes: Sequence[str] = ("shm",),
        *,
        frame_bytes: int = 4 << 20,
        open_intake: Callable[[Subscribed], PlaneReader] | None = None,
        serves: str = "",
        buckets: str = "",
        streamed: bool = False,
        allocate: Callable[[int], memoryview] = private_memory,
        gpu: GpuReceiving | None = None,
        check_s: float = 5.0,
        retry_s: float = 1.0,
    ) -> None:
        self.failure: UmbraError | None = None
        self._channel = channel
        self._host = host or shm_host()
        self._gpu = gpu
        self._planes = [*(gpu.planes if gpu else []), *planes]
        self._intakes = PlaneReaders(
            channel.sender, frame_bytes, allocate, gpu, open_intake, streamed, channel.security
        )
        self._serves = serves
        self._buckets_endpoint = buckets
        self._streamed = streamed
        self._avoided = ""  # a relay that was gone
        self._relays: dict[str, Channel] = {}
        self._hub = channel  # `_channel` is a relay's, while there is one on this host
        self._check_s = check_s
        self._retry_s = retry_s
        self._timeout_s = 0.0
        self._manifest: Manifest | None = None
        self._held_back: deque[Message] = deque()  # arrived while a version was being staged
        self._buffers: Buffers = []
        self._staging = Staging()
        self._changed = threading.Condition()  # guards _staging and failure
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._main, name="umbra-receiver", daemon=True)

    def subscribe(self, timeout_s: float) -> None:
        """Subscribe; waits until the trainer has registered its layout. Versions then follow.

        Raises:
            DeadlineError: no answer within `timeout_s` seconds.
            RejectedError: no plane that the hub and this process have in common.
            StartupError: the hub's shared memory cannot be seen from here.
        """
        self._timeout_s = timeout_s
        reply = self._channel.call(self._request(), Subscribed, timeout_s=timeout_s)
        if reply.plane == "relay":
            self._pass_to(reply.path)
        else:
            self._install(reply)
        self._hub.on_moved = self._hub_moved
        self._thread.start()

    def check(self) -> None:
        """See whether new versions can still come.

        Raises:
            UmbraError: they can't: the hub is gone, no longer has weights for us, or the thread
                that stages them has failed.
        """
        with self._changed:
            if self.failure is not None:
                raise self.failure

    def poll(self) -> StagedVersion | None:
        """The newest version that the engine should load now; to be followed by `committed`.

        Raises:
            UmbraError: as `check`.
        """
        self.check()
        with self._changed:
            candidate = self._staging.take()
            if candidate is None:
                return None
            assert self._manifest is not None
            return StagedVersion(
                candidate.version, self._manifest, self._buffers[candidate.buffer], candidate
            )

    def committed(self, staged: StagedVersion, commit_s: float, error: str = "") -> None:
        """The engine serves `staged` after `commit_s` seconds of waiting, or could not load it.

        The memory of `staged` is used again from now on.
        """
        with self._changed:
            self._staging.release(staged.candidate)
        self._channel.send(
            Committed(
                epoch=staged.candidate.epoch,
                version=staged.version,
                commit_s=commit_s,
                error=error,
            )
        )

    def wait_first(self, timeout_s: float, stopping: threading.Event) -> StagedVersion | None:
        """The first version, when it is there; None if `stopping` was set before.

        Raises:
            DeadlineError: none came within `timeout_s` seconds.
            UmbraError: as `poll`.
        """
        until = time.monotonic() + timeout_s
        while not stopping.is_set():
            staged = self.poll()
            if staged is not None:
                return staged
            if time.monotonic() >= until:
                raise DeadlineError(
                    f"no weights from the {self._channel.peer} within {timeout_s:g} s: has the "
                    "trainer published its first version?"
                )
            with self._changed:
                self._changed.wait(WAKE_S)
        return None

    def wait(self, timeout_s: float) -> None:
        """Wait until `poll` may have something, for `timeout_s` seconds at most."""
        with self._changed:
            self._changed.wait(timeout_s)

    def close(self) -> None:
        """Stop staging. Versions that were handed out stay valid."""
        self._hub.on_moved = None
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_DEADLINE_S)
        self._intakes.close()
        if self._gpu is not None:
            self._gpu.close()

    # -- the thread -------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # noqa: BLE001 - its owner's thread has to hear of it
            self._fail(foreseen(error, "the receiver of weights"))

    def _serve(self) -> None:
        check_at = time.monotonic() + self._check_s
        subscribe_at: float | None = None
        while not self._closing.is_set() and self.failure is None:
            message = self._next_message()
            now = time.monotonic()
            if message is not None:
                check_at = now + self._check_s
                if self._handle(message):
                    subscribe_at = now + self._retry_s
            elif subscribe_at is not None and now >= subscribe_at:
                subscribe_at, check_at = None, math.inf  # until there is an answer
                self._ask(self._request())
            elif subscribe_at is None and now >= check_at:
                # A hub that could not reach us for a moment has dropped us without a word.
                check_at = math.inf
                self._ask(HubStatusRequest())

    def _next_message(self) -> Message | None:
        if self._held_back:
            return self._held_back.popleft()
        try:
            return self._channel.pushes.get(timeout=min(WAKE_S, self._retry_s))
        except queue.Empty:
            return None

    def _handle(self, message: Message) -> bool:
        """Act on `message`; True when we are no longer subscribed."""
        match message:
            case Prepare():
                self._stage(message)
            case Commit():
                with self._changed:
                    if self._staging.commit(message.epoch):
                        self._changed.notify_all()
            case Abort():
                log.info("version %d was aborted: %s", message.version, message.reason)
                with self._changed:
                    self._staging.abort(message.epoch)
                return message.dropped
            case Subscribed(plane="relay", path=path):
                self._pass_to(path)
            case Subscribed():
                self._install(message)
            case HubStatus():
                return not message.subscribed
            case _:
                log.warning("the weight hub pushed an unexpected %s", type(message).__name__)
        return False

    def _hub_moved(self) -> None:
        """The hub was restarted and has forgotten us: as if it had dropped us."""
        reason = "the weight hub was restarted"
        self._channel.pushes.put(Abort(epoch=0, version=-1, reason=reason, dropped=True))

    def _request(self) -> Subscribe:
        return Subscribe(
            host=self._host,
            planes=self._planes,
            serves=self._serves,
            buckets=self._buckets_endpoint,
            avoid=self._avoided,
            streamed=self._streamed,
            gpu=self._gpu.facts if self._gpu else None,
        )

    def _pass_to(self, endpoint: str) -> None:
        """The hub says that a relay on this host serves us: ask it, and come back if it is gone."""
        self._channel = self._relays.get(endpoint) or self._hub.beside(endpoint, "relay", "relay")
        self._relays[endpoint] = self._channel
        self._ask(HubStatusRequest())

    def _ask(self, body: Message) -> None:
        """Send a request whose reply arrives among the pushes, in their order."""
        channel = self._channel
        parked = channel is self._hub or isinstance(body, Subscribe)
        timeout_s = self._timeout_s if parked else min(RELAY_SILENT_S, self._timeout_s)

        def answered(future: Future[Message]) -> None:
            error = future.exception()
            if error is None:
                channel.pushes.put(future.result())
            elif channel is not self._hub:
                log.warning("back to the weight hub: %s", error)
                self._avoided = channel.endpoint
                self._channel = self._hub
                gone = Abort(epoch=0, version=-1, reason="the relay is gone", dropped=True)
                self._hub.pushes.put(gone)
            else:
                self._fail(foreseen(error, "the receiver of weights"))

        channel.request(body, timeout_s=timeout_s, on_done=answered)

    def _fail(self, error: UmbraError) -> None:
        with self._changed:
            self.failure = error
            self._changed.notify_all()

    def _stage(self, message: Prepare) -> None:
        manifest, intake = self._manifest, self._intakes.current
        if manifest is None or intake is None:
            return  # we have asked for another plane; that starts us afresh
        with self._changed:
            while not self._staging.has_room:
                if self._overtaken(message):
                    return  # the hub has given this push up, or is about to
                self._changed.wait(WAKE_S)
            candidate = self._staging.prepare(message.epoch, message.version)
        given, buckets = len(message.checksums), len(manifest.buckets)
        if given == buckets:
            done = intake.take(message, candidate.buffer, lambda: self._overtaken(message))
        else:
            done = ReadResult(error=f"{given} checksums for {buckets} buckets")
        if not done.error:
            with self._changed:
                self._staging.staged(message.epoch)
        self._channel.send(
            Ready(
                epoch=message.epoch,
                version=message.version,
                wire_s=done.wire_s,
                stage_s=done.stage_s,
                error=done.error,
                wire_bytes=done.wire_bytes,
                source_lost=done.source_lost,
            )
        )
        if done.unusable and self._intakes.plane in self._planes:
            self._go_without(self._intakes.plane, done.error)

    def _go_without(self, plane: str, reason: str) -> bool:
        """Subscribe anew by another plane; False if there is none."""
        if plane not in GPU_PLANES or len(self._planes) == 1:
            return False
        log.warning("without plane %s from now on: %s", plane, reason)
        self._planes.remove(plane)
        self._ask(self._request())
        return True

    def _overtaken(self, message: Prepare) -> bool:
        """Whether something arrived meanwhile that makes staging `message` pointless."""
        with suppress(queue.Empty):
            while True:
                self._held_back.append(self._channel.pushes.get_nowait())
        return self._closing.is_set() or any(
            isinstance(later, Prepare | Subscribed)
            or (isinstance(later, Abort) and (later.dropped or later.epoch == message.epoch))
            for later in self._held_back
        )

    def _install(self, reply: Subscribed) -> None:
        """Get ready for versions of the layout in `reply`."""
        check_manifest(reply.manifest)
        try:
            if not self._intakes.install(reply):
                return
        except StartupError as error:
            if not self._go_without(reply.plane, str(error)):
                raise
            return
        with self._changed:
            self._manifest = reply.manifest
            if self._buffers is not self._intakes.buffers:
                # What the engine still loads keeps the memory of before alive by itself.
                self._buffers = self._intakes.buffers
                self._staging = Staging(len(self._buffers))
