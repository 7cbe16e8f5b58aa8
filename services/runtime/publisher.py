"""The trainer's half of a push: write a version into a slot of the hub's arena, then publish it."""

from __future__ import annotations

import time

from umbra.proto.errors import DeadlineError, RejectedError
from umbra.proto.messages import (
    AcquireSlot,
    ArenaReady,
    Ok,
    Publish,
    RegisterManifest,
    SlotGranted,
)
from umbra.proto.records import Manifest
from umbra.services.runtime.arena import Arena
from umbra.services.runtime.channel import Channel
from umbra.services.runtime.manifest import checksums

PUBLISH_TIMEOUT_S = 30.0


class Publisher:
    """Publishes versions of one layout.

    Use: `register` once, then for each version `slot`, write all tensors at their offsets, and
    `publish`.

    Args:
        channel: to the weight hub.
        manifest: the layout, from `build_manifest`.
    """

    def __init__(self, channel: Channel, manifest: Manifest) -> None:
        self.manifest = manifest
        self._channel = channel
        self._arena: Arena | None = None
        self._granted: tuple[int, int] | None = None  # version and slot

    def register(self, timeout_s: float) -> None:
        """State the layout and attach to the hub's arena.

        Raises:
            RejectedError: the hub refuses, because /dev/shm has too little room, say.
            DeadlineError: no answer within `timeout_s` seconds.
            StartupError: the arena cannot be seen from here.
        """
        ready = self._channel.call(
            RegisterManifest(manifest=self.manifest), ArenaReady, timeout_s=timeout_s
        )
        self.close()
        self._arena = Arena.attach(ready.path, slot_bytes=self.manifest.total_bytes)

    def slot(self, version: int, timeout_s: float) -> memoryview:
        """Memory to write `version` into, `[manifest.total_bytes]`; waits until a slot is free.

        What is in it before is an older version or nothing: write every tensor.

        Raises:
            DeadlineError: no slot became free within `timeout_s` seconds.
            RejectedError: another trainer has registered.
        """
        until = time.monotonic() + timeout_s
        try:
            slot = self._acquire(version, timeout_s)
        except RejectedError as error:
            if error.code != "not_registered":
                raise
            # The hub has been restarted and knows nothing of us.
            self.register(max(0.0, until - time.monotonic()))
            slot = self._acquire(version, max(0.0, until - time.monotonic()))
        assert self._arena is not None
        self._granted = (version, slot)
        return self._arena.slot(slot)

    def publish(self, version: int, snapshot_s: float) -> None:
        """Publish what was written into the slot of `version`; returns before it is pushed.

        Args:
            version: as given to `slot`.
            snapshot_s: seconds that writing took, for the records.

        Raises:
            ValueError: no slot was acquired for `version`.
            RejectedError: the hub was restarted meanwhile, or another trainer has registered.
            DeadlineError: the hub does not answer.
        """
        if self._granted is None or self._granted[0] != version or self._arena is None:
            raise ValueError(f"no slot was acquired for version {version}")
        _, slot = self._granted
        sums = checksums(self.manifest, self._arena.slot(slot))
        self._granted = None
        message = Publish(version=version, slot=slot, checksums=sums, snapshot_s=snapshot_s)
        self._channel.call(message, Ok, timeout_s=PUBLISH_TIMEOUT_S)

    def close(self) -> None:
        """Let go of the arena."""
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    def _acquire(self, version: int, timeout_s: float) -> int:
        message = AcquireSlot(version=version)
        try:
            return self._channel.call(message, SlotGranted, timeout_s=timeout_s).slot
        except DeadlineError as error:
            raise DeadlineError(
                f"no free slot for version {version} within {timeout_s:g} s: receivers are still "
                "staging the versions before it, or the weight hub is gone"
            ) from error
