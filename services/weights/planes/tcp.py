"""Plane `tcp`: a receiver pulls buckets over a socket of its own, within the credit it grants."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from umbra.proto.errors import StartupError, UsageError, WireError
from umbra.proto.messages import Prepare, Ready, Role, Subscribe
from umbra.proto.net.address import next_port, reachable
from umbra.proto.net.keys import OPEN, Security
from umbra.proto.records import Manifest
from umbra.services.config import WeightHubConfig as WeightHubConfig
from umbra.services.process.host_memory import ask_for
from umbra.services.weights import delta
from umbra.services.weights.arena import Arena
from umbra.services.weights.manifest import checksum, owned_buckets
from umbra.services.weights.planes.assembly import Assembly, Holdings
from umbra.services.weights.planes.bucket_fetch import (
    BucketSource,
    DeltaCame,
    SourceLostError,
    Transfer,
    run_together,
)
from umbra.services.weights.planes.bucket_server import BucketServer
from umbra.services.weights.planes.bucket_store import BucketStore, DeltaEncoder
from umbra.services.weights.planes.plane import HubEnd, Receipt, Receiving, Settled

COPY = 'set weight_hub.delta = "off", or use a host with more memory'
FAST_LINK = 1e9  # bytes per second; encoding on two cores is hardly faster

log = logging.getLogger(__name__)


class RelayChain:
    """From whom each receiver fetches: relays from one another, in a chain.

    The first relay fetches from the hub, every other one from the relay before it, so that the hub
    sends each byte once, however many nodes there are. Receivers that are no relays fetch from the
    hub. The order is that in which the relays subscribed.

    Args:
        hub: the hub's own buckets endpoint.
    """

    def __init__(self, hub: str) -> None:
        self._hub = hub
        self._relays: dict[str, str] = {}  # name -> buckets endpoint
        self._told: dict[str, str] = {}  # receiver -> the relay it was last sent to

    @property
    def relays(self) -> list[str]:
        return list(self._relays)

    def join(self, name: str, endpoint: str) -> None:
        """Add a relay at the end of the chain."""
        self._relays.pop(name, None)
        self._relays[name] = endpoint

    def leave(self, name: str) -> None:
        """Remove a receiver: the next in the chain takes its place."""
        self._relays.pop(name, None)
        self._told.pop(name, None)

    def source(self, name: str) -> str:
        """Return the endpoint from which `name` is to fetch its next version."""
        before = ""
        for relay in self._relays:
            if relay == name:
                break
            before = relay
        else:
            before = ""  # not a relay
        self._told[name] = before
        return self._relays[before] if before else self._hub

    def broken(self, name: str) -> str:
        """`name` has lost its source: that relay leaves the chain until it subscribes again.

        Its name, or "" where the source was the hub.
        """
        before = self._told.get(name, "")
        self._relays.pop(before, None)
        return before


class TcpHub(HubEnd):
    """The hub's end: the buckets, their deltas, and who fetches from whom.

    Args:
        name: sender name of the hub.
        incarnation: of the hub.
        endpoint: to bind; port * picks a free one.
        config: the section `weight_hub`.
        security: keys of the hub.
        owner: trainer host whose buckets lie in its arena, where there are several.

    Raises:
        StartupError: the address is taken.
        UsageError: it is not ours, or other machines can reach it and there are no keys.
    """

    plane = "tcp"

    def __init__(
        self,
        name: str,
        incarnation: str,
        endpoint: str,
        config: WeightHubConfig,
        security: Security = OPEN,
        owner: int = 0,
    ) -> None:
        self.parts: Mapping[int, str] = {}  # endpoints of the other owners of buckets
        self._owner = owner
        self._own: frozenset[int] = frozenset()  # buckets
        self._config = config
        self._is_relay = security.keys is not None and security.keys.role == "relay"
        self.server = BucketServer(
            name, incarnation, endpoint, security, next_port(endpoint), config.pace
        )
        self.endpoint = reachable(self.server.endpoint)
        self.chain = RelayChain(self.endpoint)
        self._lock = threading.Lock()  # guards the layout: a relay sets it from another thread
        self._relays: dict[str, Subscribe] = {}
        self._chained: set[str] = set()  # receivers that get every version by this plane
        self._arena: Arena | None = None
        self._manifest: Manifest | None = None
        self._store: BucketStore | None = None
        self._encoder: DeltaEncoder | None = None
        self._encoded: tuple[int, Sequence[int]] | None = None  # slot and contents
        self._rates: dict[str, float] = {}  # of each receiver's link, bytes per second
        self._deltas = config.delta != "off" and delta.available()
        if config.delta != "off" and not self._deltas:
            log.info("no deltas: they need numpy and zstandard (pip install 'umbra-rl[delta]')")

    def layout(self, arena: Arena, manifest: Manifest) -> None:
        self._arena = arena
        self.store_of(manifest)

    def relay_at(self, host: str) -> str:
        """Return the weights endpoint of the relay on `host`, or ""."""
        return next((r.serves for r in self._relays.values() if r.host == host), "")

    def store_of(self, manifest: Manifest) -> BucketStore:
        """Return the store of a layout, which is that of all pushes from now on."""
        with self._lock:
            if self._store is not None and self._manifest is not None:
                if self._manifest.digest == manifest.digest:
                    return self._store
            self._close_encoder()
            self._manifest = manifest
            self._own = frozenset(owned_buckets(manifest).get(self._owner, []))
            self._store = self.server.serve(manifest)
            return self._store

    def subscribed(self, name: str, incarnation: str, message: Subscribe) -> None:
        self._chained.add(name)
        self.serves_beside(name, message)
        if message.buckets:
            self.chain.join(name, message.buckets)
            log.info("chain of relays: %s", ", ".join(self.chain.relays))

    def serves_beside(self, name: str, message: Subscribe) -> None:
        """Note a relay whose receivers other planes may send here."""
        if message.buckets:
            self._relays[name] = message

    def prepare(self, name: str, prepare: Prepare, now: float) -> Iterable[Settled]:
        return (Settled(name, self.complete(name, prepare)),)

    def complete(self, name: str, message: Prepare) -> Prepare:
        """Return `message` with the sources from which `name` fetches the version."""
        assert self._manifest is not None
        self.offer(message.slot, message.checksums, deltas=self.links_are_slow)
        source = self.chain.source(name)
        relayed = self._is_relay or source != self.endpoint
        sources: list[str] = []
        if source == self.endpoint and self._manifest.owners:
            others = range(1, max(self._manifest.owners) + 1)
            sources = [source, *(self.parts.get(owner, "") for owner in others)]
        return msgspec.structs.replace(message, source=source, relayed=relayed, sources=sources)

    def offer(self, slot: int, checksums: Sequence[int], *, deltas: bool) -> None:
        """Hand out our buckets of the version in `slot`, with deltas to the one before."""
        assert self._store is not None and self._arena is not None and self._manifest is not None
        data, version = self._arena.slot(slot), (slot, checksums)
        if self._deltas and deltas and self._encoded != version:
            self._encode(data, version)
        if not self._store.holds(slot, checksums):
            absent = set(range(len(checksums))) - self._own
            self._store.offer(slot, data, checksums, absent)

    def _encode(self, data: memoryview, version: tuple[int, Sequence[int]]) -> None:
        assert self._store is not None and self._manifest is not None
        if self._encoder is None:
            try:
                sizes = [end - start for start, end in self._manifest.buckets]
                nbytes = sum(sizes[bucket] for bucket in self._own)
                ask_for(nbytes, "deltas, for a copy of the last version,", COPY)
            except StartupError as error:
                log.warning("all bytes are sent: %s", error)
                self._deltas = False
                return
            self._encoder = DeltaEncoder(self._store, self._manifest)
        self._encoded = version
        # Before the bytes are offered, so that those who wait for them get the deltas.
        contents = [s if b in self._own else 0 for b, s in enumerate(version[1])]
        self._encoder.start(data, contents)

    def staged(self, name: str, message: Ready) -> None:
        """Measure the rate of a link over which all bytes of a version travelled."""
        if message.source_lost:
            if relay := self.chain.broken(name):
                self._relays.pop(relay, None)
                log.warning("%s has lost %s, which leaves the chain", name, relay)
        nbytes = self._manifest.total_bytes if self._manifest is not None else 0
        if name in self._chained and message.wire_s > 0 and message.wire_bytes >= nbytes:
            self._rates[name] = message.wire_bytes / message.wire_s

    @property
    def links_are_slow(self) -> bool:
        """Return whether deltas pay."""
        slow = any(rate < FAST_LINK for rate in self._rates.values())
        return slow or self._config.delta == "always"

    def left(self, name: str) -> None:
        self.chain.leave(name)
        self._chained.discard(name)
        self._relays.pop(name, None)
        self._rates.pop(name, None)

    def granted(self, slot: int) -> None:
        if self._encoder is not None and self._encoded is not None and self._encoded[0] == slot:
            self._encoder.stop()
        if self._store is not None:
            self._store.withdraw(slot)

    def close(self) -> None:
        self._close_encoder()
        self.server.close()

    def _close_encoder(self) -> None:
        if self._encoder is not None:
            self._encoder.close()
        self._encoder = self._encoded = None


class TcpReceiver:
    """Fetches versions bucket by bucket, and goes on where it was when a connection breaks.

    Args:
        name: of this receiver.
        manifest: the layout.
        buffers: to be filled, `[manifest.total_bytes]` each.
        frame_bytes: in one message, at most.
        delta_came: called with each delta that led to a bucket, before that is yielded.
        security: keys of this process.
        connections: at a time to each source.
    """

    def __init__(
        self,
        name: str,
        manifest: Manifest,
        buffers: Sequence[memoryview],
        frame_bytes: int,
        delta_came: DeltaCame | None = None,
        security: Security = OPEN,
        connections: int = 1,
    ) -> None:
        self.manifest = manifest
        self._holdings = Holdings(manifest, buffers)
        self._frame_bytes = frame_bytes
        self._delta_came = delta_came
        self._deltas = delta.available()
        self._security = security
        self._name = name
        self._connections = connections
        self._sources: dict[tuple[int, int], BucketSource] = {}  # by owner of the buckets, and lane

    def receive(self, message: Prepare, target: int = 0) -> Receiving:
        """Fetch what is missing of a version into buffer `target`, of each owner from its source.

        Each lane to an owner has every so manieth of its buckets, and a transfer of its own.
        """
        began = time.perf_counter()
        everything = {0: range(len(self.manifest.buckets))}
        owned = owned_buckets(self.manifest) if message.sources else everything
        lanes = range(self._connections)
        assemblies = {
            (owner, lane): Assembly(
                self._holdings,
                target,
                message.checksums,
                deltas=self._deltas,
                buckets=buckets[lane :: self._connections],
            )
            for owner, buckets in owned.items()
            for lane in lanes
        }
        held_s = time.perf_counter() - began
        transfers: list[Transfer] = []
        error, lost = "", False
        try:
            missing = {b for assembly in assemblies.values() for b in assembly.missing}
            for bucket in range(len(message.checksums)):
                if bucket not in missing:
                    yield bucket
            for (owner, lane), assembly in assemblies.items():
                if assembly.missing:
                    source = self._connected(owner, lane, message)
                    transfers.append(
                        Transfer(source, assembly, self._frame_bytes, self._delta_came)
                    )
            if transfers:
                yield from run_together(transfers)
        except SourceLostError as problem:
            error, lost = str(problem), True
        except (WireError, UsageError) as problem:
            error = str(problem)
        if corrupted := sum(assembly.corrupted for assembly in assemblies.values()):
            log.warning("%d buckets of version %d came wrong", corrupted, message.version)
        # The transfers verified at the same time.
        stage_s = held_s + sum(one.stage_s for one in transfers) / max(1, len(transfers))
        wire_s = max(0.0, time.perf_counter() - began - stage_s)
        wire_bytes = sum(transfer.wire_bytes for transfer in transfers)
        data = self._holdings.buffers[target]
        return Receipt(wire_s, stage_s, wire_bytes, error, lost, data=data)

    def _connected(self, owner: int, lane: int, message: Prepare) -> BucketSource:
        """The source of the buckets of `owner`, connected or about to be."""
        if (owner, lane) not in self._sources:
            name = self._name if owner == lane == 0 else f"{self._name}/{owner}.{lane}"
            self._sources[owner, lane] = BucketSource(name, self._security)
        source = self._sources[owner, lane]
        if owner == 0:
            source.connect(message.source, _server(message))
        elif owner < len(message.sources) and message.sources[owner]:
            source.connect(message.sources[owner], "part")
        else:
            raise UsageError(f"nobody hands out the buckets of trainer host {owner}")
        return source

    def overwritten(self, target: int) -> None:
        """Forget the contents of buffer `target`: a broadcast fills it."""
        self._holdings.contents[target] = [0] * len(self.manifest.buckets)

    def verify(self, target: int, checksums: Sequence[int]) -> Iterator[tuple[int, bool]]:
        """Check each bucket that a broadcast has filled; yields bucket and result."""
        data = self._holdings.buffers[target]
        for bucket, (start, end) in enumerate(self.manifest.buckets):
            right = checksum(data[start:end]) == checksums[bucket]
            if right:
                self._holdings.contents[target][bucket] = checksums[bucket]
            yield bucket, right

    def close(self) -> None:
        for source in self._sources.values():
            source.close()


def _server(message: Prepare) -> Role:
    """Return the role whose key the source has."""
    return "relay" if message.relayed else "weight_hub"
