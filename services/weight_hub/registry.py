"""The versions that a hub holds, beyond the pushes: list, pin, roll back, export.

A slot of the arena holds its version until the trainer is granted it again. A pin keeps a version:
in its slot, if two slots are left to the trainer then, else in a copy of its own in shared memory.
Pins are recorded beside the arena (`pins.py`), so that a hub which takes it over keeps them.
Copies and exports are made by a thread; the slot that they read is kept meanwhile, and the answer
comes when they are done.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from umbra.proto.errors import StartupError, UmbraError
from umbra.proto.messages import (
    ExportVersion,
    Message,
    Nack,
    Ok,
    PinVersion,
    RollBack,
    UnpinVersion,
    Versions,
    VersionsRequest,
)
from umbra.proto.records import HeldVersion, Manifest
from umbra.services.modeling.hub import HubName, is_hub_name
from umbra.services.modeling.model_directory import check_model_dir
from umbra.services.weight_hub.effects import Effect, HubReply, Publication, Ticket
from umbra.services.weight_hub.export import export_version
from umbra.services.weight_hub.pins import PinFile, PinRecord
from umbra.services.weight_hub.push import PushProtocol
from umbra.services.weights import memory
from umbra.services.weights.arena import Arena

ACCEPTS: tuple[type[Message], ...] = (
    VersionsRequest, PinVersion, UnpinVersion, RollBack, ExportVersion,
)  # fmt: skip
WORKING_SLOTS = 2  # what the trainer needs: one is served while the other is written

_IN_PARTS = "the version lies in parts on several trainer hosts"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Pin:
    """A kept version: in a slot of the arena, or in a file of its own."""

    version: int
    sums: list[int]
    slot: int | None = None
    copy: Arena | None = None

    @property
    def place(self) -> str:
        return f"slot {self.slot}" if self.copy is None else str(self.copy.path)

    @property
    def record(self) -> PinRecord:
        if self.copy is None:
            return PinRecord(self.version, self.sums, slot=-1 if self.slot is None else self.slot)
        return PinRecord(self.version, self.sums, path=str(self.copy.path))


@dataclass(frozen=True, slots=True)
class _RegistryJob:
    """A copy or an export on the thread: `done` or `failed` gives the effects of its end."""

    future: Future[None]
    done: Callable[[float], list[Effect]]
    failed: Callable[[float], list[Effect]]
    ticket: Ticket


class Registry:
    """What one hub holds of one layout.

    Args:
        protocol: grants slots; keeps those that are needed here.
        run_id: names the files of copies.
        token: tells them from those of other hubs.
        model_dir: where an export takes configuration and tokenizer from.
        on_write: told of a slot that is about to be written here.
    """

    def __init__(
        self,
        protocol: PushProtocol,
        run_id: str,
        token: str,
        model_dir: str,
        on_write: Callable[[int], None],
    ) -> None:
        self._protocol = protocol
        self._run_id = run_id
        self._token = token
        self._model_dir = model_dir
        self._on_write = on_write
        self._arena: Arena | None = None
        self._manifest: Manifest | None = None
        self._pins: dict[int, _Pin] = {}
        self._file: PinFile | None = None
        self._copies = 0
        self._jobs: list[_RegistryJob] = []
        self._left: list[Effect] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="umbra-registry")

    @property
    def busy(self) -> bool:
        """Whether a copy or an export is under way."""
        return bool(self._jobs)

    def layout(self, arena: Arena, manifest: Manifest) -> None:
        """Another layout begins: what was held of the one before is gone."""
        for job in self._jobs:
            job.future.exception()  # waits: it is bounded by the size of a version
            reason = "the trainer has registered another layout"
            self._left.append(HubReply(job.ticket, Nack(code="failed", reason=reason)))
            self._left += job.failed(0.0)
        self._jobs.clear()
        for pin in list(self._pins.values()):
            log.warning("version %d was pinned, but the layout has changed", pin.version)
            self._forget(pin)
        if self._file is not None:
            self._file.remove()
        self._file = PinFile(arena.path)
        self._arena, self._manifest = arena, manifest

    def restore(self, now: float) -> None:
        """Keep what the hub before this one had pinned; called once the protocol has the layout."""
        assert self._arena is not None and self._file is not None
        for record in self._file.read():
            copy = None
            if record.path:
                try:
                    size = self._arena.slot_bytes
                    copy = Arena.adopt(self._run_id, record.path, slot_bytes=size)
                except StartupError as error:
                    log.warning("version %d was pinned, but %s", record.version, error)
                    continue
            elif 0 <= record.slot < self._arena.slots:
                self._protocol.slots.recall(
                    Publication(0, record.version, record.slot, record.sums, 0.0, now)
                )
            slot = record.slot if copy is None else None
            self._pins[record.version] = _Pin(record.version, record.sums, slot, copy)
            log.info("version %d is still pinned", record.version)
        self._record()

    def handle(self, ticket: Ticket, body: Message, now: float) -> list[Effect]:
        """Answer a request, now or when its work is done."""
        match body:
            case VersionsRequest():
                return [HubReply(ticket, self._versions())]
            case PinVersion(version=version):
                return self._pin(ticket, version)
            case UnpinVersion(version=version):
                return self._unpin(ticket, version, now)
            case RollBack(version=version):
                return self._roll_back(ticket, version, now)
            case ExportVersion(version=version, path=path):
                return self._export(ticket, version, path)
            case _:
                raise ValueError(f"{type(body).__name__} is not for the registry")

    def poll(self, now: float) -> list[Effect]:
        """What follows from the work that has been done since the last call."""
        effects, self._left = self._left, []
        for job in [job for job in self._jobs if job.future.done()]:
            self._jobs.remove(job)
            error = job.future.exception()
            if error is None:
                effects += job.done(now)
                continue
            log.warning("%s", error)
            effects.append(HubReply(job.ticket, Nack(code="failed", reason=str(error))))
            effects += job.failed(now)
        return effects

    def close(self) -> None:
        """End the work under way and remove the copies."""
        self._thread.shutdown()
        for pin in list(self._pins.values()):
            self._forget(pin)
        if self._file is not None:
            self._file.remove()
            self._file = None

    # -- requests ---------------------------------------------------------------------------------

    def _versions(self) -> Versions:
        newest = self._protocol.newest
        held = [
            (
                publication.number,
                HeldVersion(
                    version=publication.version,
                    place=f"slot {slot}",
                    pinned=(pin := self._pins.get(publication.version)) is not None
                    and pin.slot == slot,
                    newest=publication is newest,
                ),
            )
            for slot, publication in self._protocol.slots.held.items()
        ]
        held.sort(key=lambda pair: pair[0])
        copies = [
            HeldVersion(version=pin.version, place=pin.place, pinned=True)
            for pin in self._pins.values()
            if pin.copy is not None
        ]
        return Versions(
            held=[*copies, *(version for _, version in held)],
            slots=self._protocol.slots.count,
            slot_bytes=self._manifest.total_bytes if self._manifest else 0,
        )

    def _pin(self, ticket: Ticket, version: int) -> list[Effect]:
        if version in self._pins:
            return [HubReply(ticket, self._versions())]
        publication = self._in_slot(version)
        if publication is None:
            return [self._unknown(ticket, version)]
        in_slots = sum(pin.slot is not None for pin in self._pins.values())
        slots, sums = self._protocol.slots, publication.checksums
        slots.keep(publication.slot)
        if slots.count - in_slots - 1 >= WORKING_SLOTS:
            self._pins[version] = _Pin(version, sums, slot=publication.slot)
            self._record()
            return [HubReply(ticket, self._versions())]
        arena, slot = self._arena, publication.slot
        assert arena is not None and self._manifest is not None
        if self._manifest.owners:
            slots.let_go(slot)
            reason = f"{_IN_PARTS}, so that it cannot be copied: raise weight_hub.slots"
            return [HubReply(ticket, Nack(code="no_room", reason=reason))]
        self._copies += 1
        try:
            copy = Arena.create(
                self._run_id,
                f"pin_{self._token}_{self._copies}",
                slot_bytes=arena.slot_bytes,
                slots=1,
            )
        except StartupError as error:
            slots.let_go(slot)
            return [HubReply(ticket, Nack(code="no_room", reason=str(error)))]

        def work() -> None:
            memory.copy(arena.slot(slot), copy.slot(0))

        def done(now: float) -> list[Effect]:
            self._pins[version] = _Pin(version, sums, copy=copy)
            self._record()
            effects = self._protocol.release(slot, now)
            return [*effects, HubReply(ticket, self._versions())]

        def failed(now: float) -> list[Effect]:
            copy.unlink()
            copy.close()
            return self._protocol.release(slot, now)

        self._start(ticket, work, done, failed)
        return []

    def _unpin(self, ticket: Ticket, version: int, now: float) -> list[Effect]:
        pin = self._pins.get(version)
        if pin is None:
            reason = f"version {version} is not pinned"
            return [HubReply(ticket, Nack(code="not_held", reason=reason))]
        self._forget(pin)
        effects = [] if pin.slot is None else self._protocol.release(pin.slot, now)
        return [*effects, HubReply(ticket, self._versions())]

    def _roll_back(self, ticket: Ticket, version: int, now: float) -> list[Effect]:
        publication, pin = self._in_slot(version), self._pins.get(version)
        if publication is not None:
            if publication is self._protocol.newest:
                return [HubReply(ticket, Ok())]
            effects = self._protocol.roll_back(
                version, publication.slot, publication.checksums, now
            )
            return [*effects, HubReply(ticket, Ok())]
        if pin is None or pin.copy is None:
            return [self._unknown(ticket, version)]
        slot, arena, copy, sums = self._protocol.take_slot(), self._arena, pin.copy, pin.sums
        if slot is None:
            reason = "no slot is free: the trainer writes its next version, or receivers read"
            return [HubReply(ticket, Nack(code="busy", reason=reason))]
        assert arena is not None
        self._on_write(slot)

        def work() -> None:
            memory.copy(copy.slot(0), arena.slot(slot))

        def done(now: float) -> list[Effect]:
            effects = self._protocol.roll_back(version, slot, sums, now)
            return [*effects, *self._protocol.release(slot, now), HubReply(ticket, Ok())]

        self._start(ticket, work, done, lambda now: self._protocol.release(slot, now))
        return []

    def _export(self, ticket: Ticket, version: int, path: str) -> list[Effect]:
        publication, pin = self._in_slot(version), self._pins.get(version)
        copy = pin.copy if pin is not None else None
        if publication is None and copy is None:
            return [self._unknown(ticket, version)]
        if self._manifest is not None and self._manifest.owners:
            reason = f"{_IN_PARTS}: take a checkpoint, or the model that the trainer writes"
            return [HubReply(ticket, Nack(code="failed", reason=reason))]
        out = Path(path)
        if not out.is_absolute() or out.exists() or not os.access(out.parent, os.W_OK):
            reason = f"{path} must be a new directory, in a folder that the hub can write to"
            return [HubReply(ticket, Nack(code="bad_path", reason=reason, path="path"))]
        try:
            model_dir = check_model_dir(self._model_dir, weights=False)
        except UmbraError as error:
            return [HubReply(ticket, Nack(code="bad_path", reason=str(error)))]
        arena, manifest = self._arena, self._manifest
        assert arena is not None and manifest is not None
        base = HubName.of(self._model_dir).repo if is_hub_name(self._model_dir) else str(model_dir)
        if copy is not None and pin is not None:
            data, sums, slot = copy.slot(0), pin.sums, None
        else:
            assert publication is not None
            slot, sums = publication.slot, publication.checksums
            data = arena.slot(slot)
            self._protocol.slots.keep(slot)

        def after(now: float) -> list[Effect]:
            data.release()
            return [] if slot is None else self._protocol.release(slot, now)

        self._start(
            ticket,
            lambda: export_version(manifest, data, sums, model_dir, out, base),
            lambda now: [*after(now), HubReply(ticket, Ok())],
            after,
        )
        return []

    # -- inside -----------------------------------------------------------------------------------

    def _in_slot(self, version: int) -> Publication | None:
        """The publication of `version` that was made last, if a slot holds it."""
        found = [p for p in self._protocol.slots.held.values() if p.version == version]
        return max(found, key=lambda publication: publication.number, default=None)

    def _unknown(self, ticket: Ticket, version: int) -> HubReply:
        held = sorted({h.version for h in self._versions().held})
        what = ", ".join(map(str, held)) or "none"
        reason = f"version {version} is not held any more, or not yet; held: {what}"
        return HubReply(ticket, Nack(code="not_held", reason=reason))

    def _start(
        self,
        ticket: Ticket,
        work: Callable[[], None],
        done: Callable[[float], list[Effect]],
        failed: Callable[[float], list[Effect]],
    ) -> None:
        self._jobs.append(_RegistryJob(self._thread.submit(work), done, failed, ticket))

    def _forget(self, pin: _Pin) -> None:
        del self._pins[pin.version]
        self._record()
        if pin.copy is not None:
            pin.copy.unlink()
            pin.copy.close()

    def _record(self) -> None:
        if self._file is not None:
            self._file.write([pin.record for pin in self._pins.values()])
