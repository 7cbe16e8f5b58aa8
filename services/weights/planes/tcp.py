"""Plane `tcp`: a receiver fetches the buckets that it lacks from the hub, a relay or part hubs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from umbra.proto.errors import WireError
from umbra.proto.messages import Prepare, Ready, Subscribe
from umbra.proto.net.keys import OPEN, Security
from umbra.proto.records import BucketsAt, Manifest
from umbra.proto.sockets import reachable
from umbra.services.config import WeightHubConfig as WeightHubConfig
from umbra.services.weights import delta
from umbra.services.weights.arena import Arena
from umbra.services.weights.manifest import checksum, owned_buckets
from umbra.services.weights.planes.bucket_fetch import (
    Assembly,
    BucketSource,
    DeltaCame,
    Holdings,
    SourceLostError,
    Transfer,
    run_together,
)
from umbra.services.weights.planes.bucket_server import (
    BucketServer,
    BucketStore,
    DeltaEncoder,
    StoredVersion,
)
from umbra.services.weights.planes.bucket_wire import grant
from umbra.services.weights.planes.plane import HubEnd, Receipt, Receiving, Settled

FAST_LINK = 1e9  # bytes per second; encoding on two cores is hardly faster

log = logging.getLogger(__name__)


class TcpHub(HubEnd):
    """The hub's end: the buckets, their deltas, and who fetches from whom.

    Relays fetch from one another, in a chain in the order in which they subscribed: the first one
    from the hub, every other one from the relay before it, so that the hub sends each byte once,
    however many nodes there are. Receivers that are no relays fetch from the hub.

    Args:
        owner: trainer host whose buckets lie in its arena, where there are several.
    Raises as `BucketServer`.
    """

    plane = "tcp"

    def __init__(
        self,
        endpoint: str,
        config: WeightHubConfig,
        security: Security = OPEN,
        owner: int = 0,
    ) -> None:
        self.parts: Mapping[int, BucketsAt] = {}  # of the other owners of buckets
        self._owner = owner
        self._own: frozenset[int] = frozenset()  # buckets
        self._config = config
        self.server = BucketServer(endpoint, security, config.pace)
        self.buckets = BucketsAt(endpoint=reachable(self.server.endpoint), key=self.server.secret)
        self._lock = threading.Lock()  # guards the layout: a relay sets it from another thread
        self._relays: dict[str, Subscribe] = {}  # receivers of their hosts may be sent to them
        self._chain: dict[str, BucketsAt] = {}  # of them those that get versions by this plane
        self._relay_of: dict[str, str] = {}  # receiver -> the relay that it was last sent to
        self._subscribed: set[str] = set()  # receivers that get every version by this plane
        self._arena: Arena | None = None
        self._manifest: Manifest | None = None
        self._store: BucketStore | None = None
        self._encoder: DeltaEncoder | None = None
        self._last: StoredVersion | None = None  # while its slot holds it
        self._rates: dict[str, float] = {}  # of each receiver's link, bytes per second
        self._deltas = config.delta != "off" and delta.available()
        if config.delta != "off" and not self._deltas:
            log.info("no deltas: they need numpy and zstandard (pip install 'umbra-rl[delta]')")

    def layout(self, arena: Arena, manifest: Manifest) -> None:
        self._close_encoder()
        self._arena = arena
        self.store_of(manifest)

    @property
    def chain(self) -> list[str]:
        """Return the relays that fetch from one another, in order."""
        return list(self._chain)

    def relay_at(self, host: str) -> str:
        return next((r.serves for r in self._relays.values() if r.host == host), "")

    def store_of(self, manifest: Manifest) -> BucketStore:
        """Return the store of a layout, which all pushes use from now on."""
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
        self._subscribed.add(name)
        self.serves_beside(name, message)
        if message.buckets is not None:
            self._chain.pop(name, None)
            self._chain[name] = message.buckets
            log.info("chain of relays: %s", ", ".join(self._chain))

    def serves_beside(self, name: str, message: Subscribe) -> None:
        """Note a relay whose receivers other planes may send here."""
        if message.buckets is not None:
            self._relays[name] = message

    def prepare(self, name: str, prepare: Prepare, now: float) -> Sequence[Settled]:
        return (Settled(name, self.complete(name, prepare)),)

    def complete(self, name: str, message: Prepare) -> Prepare:
        """Return `message` with the sources from which `name` fetches the version."""
        assert self._manifest is not None
        self.offer(message.slot, message.checksums, deltas=self.links_are_slow)
        before, nowhere = "", BucketsAt(endpoint="", key=b"")
        if name in self._chain:
            names = list(self._chain)
            before = names[names.index(name) - 1] if name != names[0] else ""
        self._relay_of[name] = before
        sources = [self._chain[before] if before else self.buckets]
        if not before and self._manifest.owners:
            others = range(1, max(self._manifest.owners) + 1)
            sources += [self.parts.get(owner, nowhere) for owner in others]
        granted = [BucketsAt(endpoint=s.endpoint, key=grant(s.key)) for s in sources]
        return msgspec.structs.replace(message, sources=granted)

    def offer(self, slot: int, checksums: Sequence[int], *, deltas: bool) -> None:
        """Hand out our buckets of the version in `slot`, with deltas to the one before."""
        assert self._store is not None and self._arena is not None and self._manifest is not None
        version, before = StoredVersion(slot, self._arena.slot(slot), checksums), self._last
        if before is None or (before.slot, before.contents) != (slot, checksums):
            self._last = version
            if self._deltas and deltas and before is not None:
                # Before the bytes are offered, so that those who wait for them get the deltas.
                if self._encoder is None:
                    self._encoder = DeltaEncoder(self._store, self._manifest)
                self._encoder.start(before, version, self._own)
        self._store.offer(slot, version.data, checksums, set(range(len(checksums))) - self._own)

    def staged(self, name: str, message: Ready) -> None:
        """Measure the rate of a link over which all bytes of a version travelled."""
        if message.source_lost:
            # Until it subscribes again; the one who has lost the hub has lost no relay.
            if relay := self._relay_of.get(name, ""):
                self._chain.pop(relay, None)
                self._relays.pop(relay, None)
                log.warning("%s has lost %s, which leaves the chain", name, relay)
        nbytes = self._manifest.total_bytes if self._manifest is not None else 0
        if name in self._subscribed and message.wire_s > 0 and message.wire_bytes >= nbytes:
            self._rates[name] = message.wire_bytes / message.wire_s

    @property
    def links_are_slow(self) -> bool:
        slow = any(rate < FAST_LINK for rate in self._rates.values())
        return slow or self._config.delta == "always"

    def left(self, name: str) -> None:
        self._subscribed.discard(name)
        for known in (self._chain, self._relay_of, self._relays, self._rates):
            known.pop(name, None)

    def granted(self, slot: int) -> None:
        if self._encoder is not None:
            self._encoder.let_go(slot)
        if self._last is not None and self._last.slot == slot:
            self._last = None
        if self._store is not None:
            self._store.withdraw(slot)

    def close(self) -> None:
        self._close_encoder()
        self.server.close()

    def _close_encoder(self) -> None:
        if self._encoder is not None:
            self._encoder.close()
        self._encoder = self._last = None


class TcpReceiver:
    """A fetcher of versions by buckets, which goes on where it was when a connection breaks.

    Args:
        buffers: to be filled, `[manifest.total_bytes]` each.
        delta_came: called with each delta that led to a bucket, before that is yielded.
    """

    def __init__(
        self,
        manifest: Manifest,
        buffers: Sequence[memoryview],
        config: WeightHubConfig,
        delta_came: DeltaCame | None = None,
        security: Security = OPEN,
    ) -> None:
        self.manifest = manifest
        self._holdings = Holdings(manifest, buffers)
        self._config = config
        self._delta_came = delta_came
        self._deltas = delta.available()
        self._sealed = security.keys is not None
        self._sources: dict[tuple[int, int], BucketSource] = {}  # by owner, and connection

    def receive(self, message: Prepare, target: int = 0) -> Receiving:
        """Fetch missing buckets of a version into buffer `target`, of each owner from its source.

        Connection i of n to a source fetches buckets i, i+n, i+2n, ... of it.
        """
        began, count = time.perf_counter(), self._config.connections
        owned = owned_buckets(self.manifest)
        if len(message.sources) < 2:
            owned = {0: range(len(self.manifest.buckets))}
        assemblies = {
            (owner, connection): Assembly(
                self._holdings,
                target,
                message.checksums,
                deltas=self._deltas,
                buckets=buckets[connection::count],
            )
            for owner, buckets in owned.items()
            for connection in range(count)
        }
        held_s = time.perf_counter() - began
        transfers: list[Transfer] = []
        error, lost = "", False
        try:
            missing = {b for assembly in assemblies.values() for b in assembly.missing}
            for bucket in range(len(message.checksums)):
                if bucket not in missing:
                    yield bucket
            for (owner, connection), assembly in assemblies.items():
                if assembly.missing:
                    at = message.sources[owner] if owner < len(message.sources) else None
                    if at is None or not at.endpoint:
                        raise WireError(f"no source has the buckets of trainer host {owner}")
                    source = self._sources.setdefault(
                        (owner, connection), BucketSource(sealed=self._sealed)
                    )
                    source.use(at)
                    frame_bytes = self._config.receive_bucket_bytes
                    transfers.append(Transfer(source, assembly, frame_bytes, self._delta_came))
            yield from run_together(transfers)
        except SourceLostError as problem:
            error, lost = str(problem), True
        except WireError as problem:
            error = str(problem)
        if corrupted := sum(assembly.corrupted for assembly in assemblies.values()):
            log.warning("%d buckets of version %d came wrong", corrupted, message.version)
        # The transfers verified at the same time.
        stage_s = held_s + sum(transfer.stage_s for transfer in transfers) / max(1, len(transfers))
        wire_s = max(0.0, time.perf_counter() - began - stage_s)
        wire_bytes = sum(transfer.wire_bytes for transfer in transfers)
        data = self._holdings.buffers[target]
        return Receipt(wire_s, stage_s, wire_bytes, error, lost, data=data)

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
