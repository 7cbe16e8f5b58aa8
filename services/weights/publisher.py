"""The trainer's half of a push: write a version into a slot of the hub's arena, then publish it."""

from __future__ import annotations

import logging
import threading
from typing import TypeVar

import msgspec

from umbra.proto import messages as m
from umbra.proto.deadline import LEAST_RATE, Deadline, Pace
from umbra.proto.errors import (
    DeadlineError,
    PeerLostError,
    RejectedError,
    UmbraError,
    service_thread,
)
from umbra.proto.net.io_thread import Channel
from umbra.proto.records import Manifest
from umbra.services.weights.arena import Arena
from umbra.services.weights.memory import copy

PACE = Pace(30.0, LEAST_RATE)  # of a hub that answers
RETRY_S = 1.0  # between attempts to bring a restarted hub up to date
PARTS_S = 0.5  # between questions whether the part hubs of all trainer hosts are there
PARTS_BACK_S = 60.0  # that a part hub may take to start again, besides what its arena takes
CHECK_S = 5.0  # between questions whether the hub still has what lies on several hosts
FORGOTTEN = ("not_registered", "not_granted")  # how a restarted hub answers

M = TypeVar("M", bound=m.Message)

log = logging.getLogger(__name__)


class Publisher:
    """A publisher of versions of one layout.

    Use: `register` once, then for each version `slot`, write all tensors at their offsets, and
    `publish`. When the hub is restarted, a thread registers again at once, and copies the last
    version from the arena of the old one into that of the new one.

    Where the trainer runs on several hosts, nothing is published while a part hub is away. If the
    memory of a host is lost, so is the version: only a part of it lies here (`check`).

    Args:
        stopping: once it is set, or this is closed, no answer is waited for any longer than a
            living hub takes, because a hub of the same run may have ended before us.
        pace: how long the hub may take for an answer, which may have to wait for an arena.
    """

    def __init__(
        self,
        channel: Channel,
        manifest: Manifest,
        stopping: threading.Event | None = None,
        pace: Pace = PACE,
    ) -> None:
        self.manifest = manifest
        self._pace = pace
        self._stopping = stopping or threading.Event()
        self._channel = channel
        self._arena: Arena | None = None  # the hub's
        # These may lie in the arena of an earlier hub, which is unmapped once neither does.
        self._granted: tuple[Arena, int, int] | None = None  # slot and version that are written
        self._last: tuple[Arena, m.Publish] | None = None
        self._failure: UmbraError | None = None
        self._lock = threading.Lock()  # one exchange with the hub at a time
        self._moved = threading.Event()
        self._closing = threading.Event()
        self._thread = service_thread(self._follow, "umbra-publisher")

    @property
    def place(self) -> tuple[str, int]:
        if self._granted is None:
            raise ValueError("no slot is acquired")
        arena, slot, _ = self._granted
        return str(arena.path), slot

    @property
    def _answer_s(self) -> float:
        slots = self._arena.slots if self._arena is not None else 1
        return self._pace.limit_s(slots * self.manifest.total_bytes)

    def check(self) -> None:
        """Raise PeerLostError if the last published version is lost: see above."""
        if self._failure is not None:
            raise self._failure

    def register(self, timeout_s: float) -> None:
        """State the layout and attach to the hub's arena.

        Raises:
            RejectedError: the hub has no room, or a part hub stays away for `timeout_s` seconds.
            DeadlineError: no answer within `timeout_s` seconds.
            StartupError: the arena cannot be seen from here.
        """
        with self._lock:
            self._register(timeout_s)
        if not self._thread.is_alive():
            self._channel.on_moved = self._moved.set
            self._thread.start()

    def slot(self, version: int, timeout_s: float) -> memoryview:
        """Return memory to write `version` into, `[manifest.total_bytes]`, once a slot is free.

        It holds an older version or nothing: write every tensor.

        Raises:
            DeadlineError: no slot became free within `timeout_s` seconds, or before we stop.
            RejectedError: another trainer has registered.
        """
        self.check()
        with self._lock:
            arena, slot = self._acquire(version, timeout_s)
            self._granted = arena, slot, version
            arena.lock(slot)
            return arena.slot(slot)

    def publish(self, version: int, snapshot_s: float, sums: list[int]) -> None:
        """Publish the content of the slot of `version`; returns before it is pushed anywhere.

        Args:
            snapshot_s: seconds that writing took, for the records.
            sums: checksum of every bucket, of the bytes that were meant to be written.

        Raises:
            ValueError: no slot was acquired for `version`.
            RejectedError: another trainer has registered, or a part hub stays away.
            DeadlineError: the hub does not answer.
        """
        with self._lock:
            if self._granted is None or self._granted[2] != version:
                raise ValueError(f"no slot was acquired for version {version}")
            arena, slot, _ = self._granted
            arena.unlock(slot)
            message = m.Publish(version=version, slot=slot, checksums=sums, snapshot_s=snapshot_s)
            try:
                self._insist(message, m.Ok, self._answer_s, Deadline(PARTS_BACK_S + self._answer_s))
            except RejectedError as error:
                if error.code not in FORGOTTEN:
                    raise
                log.warning("the weight hub was restarted: publishing version %d again", version)
                self._register(self._answer_s)
                arena, message = self._move(arena, message)
            self._granted, self._last = None, (arena, message)

    def close(self) -> None:
        """Detach from the arena."""
        self._channel.on_moved = None
        self._closing.set()
        self._moved.set()
        if self._thread.is_alive():
            self._thread.join()  # its current exchange ends with `_closing`
        self._arena = self._granted = self._last = None

    # -- a restarted hub --------------------------------------------------------------------------

    def _follow(self) -> None:
        """Bring every restarted hub up to date; a version being written is left to `publish`."""
        while True:
            moved = self._moved.wait(CHECK_S if self.manifest.owners else None)
            self._moved.clear()
            if not moved and self._is_known():
                continue
            while not self._closing.is_set() and not self._restore():
                self._closing.wait(RETRY_S)
            if self._closing.is_set():
                return

    def _is_known(self) -> bool:
        try:
            return self._call(m.HubStatusRequest(), m.HubStatus, CHECK_S).subscribed
        except UmbraError:
            return True  # a restarted hub is noticed in another way

    def _restore(self) -> bool:
        with self._lock:
            if self._granted is not None or self._last is None:
                return True
            arena, message = self._last
            try:
                if self._register(self._answer_s) is not arena:
                    self._last = self._move(arena, message)
            except UmbraError as error:
                log.warning("cannot announce version %d to the hub: %s", message.version, error)
                return error is self._failure  # `check` raises it
            log.info("the weight hub has version %d again", message.version)
            return True

    def _move(self, arena: Arena, message: m.Publish) -> tuple[Arena, m.Publish]:
        """Publish the version in `arena` again, in the arena of a restarted hub; return both."""
        if self.manifest.owners:
            self._failure = PeerLostError(
                f"version {message.version} is lost with the shared memory of a trainer host: the "
                "trainer has to start again from its newest checkpoint"
            )
            raise self._failure
        while True:
            target, slot = self._acquire(message.version, self._answer_s)
            target.lock(slot)
            copy(arena.slot(message.slot), target.slot(slot))
            target.unlock(slot)
            moved = msgspec.structs.replace(message, slot=slot, snapshot_s=0.0)
            try:
                self._call(moved, m.Ok, self._answer_s)
                return target, moved
            except RejectedError as error:
                if error.code != "not_registered":  # that hub was killed as well
                    raise

    def _register(self, timeout_s: float) -> Arena:
        message = m.RegisterManifest(manifest=self.manifest)
        try:
            ready = self._insist(message, m.ArenaReady, timeout_s, Deadline(timeout_s))
        except RejectedError as error:
            if error.code != "no_room" or self._arena is None:
                raise
            self._failure = PeerLostError(
                "the weight hub was restarted and has no room for versions beside those that this "
                f"process still has from before; a restarted trainer has none: {error}"
            )
            raise self._failure from error
        if self._arena is None or ready.path != str(self._arena.path):
            self._arena = Arena.attach(ready.path, slot_bytes=self.manifest.total_bytes)
        return self._arena

    def _acquire(self, version: int, timeout_s: float) -> tuple[Arena, int]:
        """Return the hub's arena and a free slot; register with each hub that was restarted."""
        message, deadline = m.AcquireSlot(version=version), Deadline(timeout_s)
        try:
            while True:
                try:
                    slot = self._call(message, m.SlotGranted, deadline.left_s).slot
                    assert self._arena is not None
                    return self._arena, slot
                except RejectedError as error:
                    if error.code != "not_registered":
                        raise
                self._register(deadline.left_s)
        except DeadlineError as error:
            if self._ends():
                raise
            raise DeadlineError(
                f"no free slot for version {version} within {timeout_s:g} s: receivers are still "
                "staging the versions before it, another trainer still writes one, or the weight "
                "hub is gone"
            ) from error

    def _insist(
        self, message: m.Message, reply: type[M], timeout_s: float, deadline: Deadline
    ) -> M:
        """Retry until `deadline` while a part hub is missing, for `timeout_s` each time."""
        last_warning = ""
        while True:
            try:
                return self._call(message, reply, min(timeout_s, PARTS_S + deadline.left_s))
            except RejectedError as error:
                if error.code != "part_missing" or deadline.passed or self._ends():
                    raise
                if str(error) != last_warning:
                    last_warning = str(error)
                    log.warning("%s", last_warning)
            self._closing.wait(PARTS_S)

    def _call(self, message: m.Message, reply: type[M], timeout_s: float) -> M:
        return self._channel.call(message, reply, timeout_s=timeout_s, stopping=self._ends)

    def _ends(self) -> bool:
        return self._stopping.is_set() or self._closing.is_set()
