"""Plane `tcp`: a receiver fetches the buckets that it lacks from the hub, a relay or part hubs."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

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
    fetch_together,
)
from umbra.services.weights.planes.bucket_server import BucketServer, BucketStore, StoredVersion
from umbra.services.weights.planes.bucket_wire import grant
from umbra.services.weights.planes.plane import HubEnd, Receipt, Receiving, Settled

FAST_LINK = 1e9  # bytes per second; encoding on two cores is hardly faster

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Fetcher:
    """A receiver that fetches by plane tcp, or a relay to which others may be sent."""

    host: str
    serves: str  # weights endpoint, of a relay that was not lost
    buckets: BucketsAt | None  # of such a relay
    by_tcp: bool
    source: str = ""  # the relay that it was last sent to
    rate: float = inf  # of its link, bytes per second


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
        self, endpoint: str, config: WeightHubConfig, security: Security = OPEN, owner: int = 0
    ) -> None:
        self.parts: Mapping[int, BucketsAt] = {}  # of the other owners of buckets
        self.store: BucketStore | None = None  # of the layout
        self._owner = owner
        self._absent: set[int] = set()  # buckets of others
        self._always = config.delta == "always"
        self.server = BucketServer(endpoint, security, config.pace)
        self.buckets = BucketsAt(endpoint=reachable(self.server.endpoint), key=self.server.secret)
        self._fetchers: dict[str, _Fetcher] = {}
        self._arena: Arena | None = None
        self._deltas = config.delta != "off" and delta.available()
        if config.delta != "off" and not self._deltas:
            log.info("no deltas: they need numpy and zstandard (pip install 'umbra-rl[delta]')")

    def layout(self, arena: Arena, manifest: Manifest) -> None:
        self._arena = arena
        mine = owned_buckets(manifest).get(self._owner, [])
        self._absent = set(range(len(manifest.buckets))).difference(mine)
        self.store = self.server.serve(manifest)

    @property
    def chain(self) -> dict[str, BucketsAt]:
        """Return the relays that fetch from one another, in order."""
        return {n: one.buckets for n, one in self._fetchers.items() if one.by_tcp and one.buckets}

    def relay_at(self, host: str) -> str:
        relays = (one for one in self._fetchers.values() if one.buckets is not None)
        return next((one.serves for one in relays if one.host == host), "")

    def subscribed(
        self, name: str, incarnation: str, message: Subscribe, *, by_tcp: bool = True
    ) -> None:
        """Note a receiver; one that is not `by_tcp` may be a relay for receivers of this plane."""
        before = self._fetchers.pop(name, None)
        rate = before.rate if by_tcp and before is not None else inf
        where = message.host, message.serves, message.buckets
        self._fetchers[name] = _Fetcher(*where, by_tcp=by_tcp, rate=rate)
        if by_tcp and message.buckets is not None:
            log.info("chain of relays: %s", ", ".join(self.chain))

    def prepare(self, name: str, prepare: Prepare, now: float) -> Sequence[Settled]:
        return (Settled(name, self.complete(name, prepare)),)

    def complete(self, name: str, message: Prepare) -> Prepare:
        """Return `message` with the sources from which `name` fetches the version."""
        assert self.store is not None
        self.offer(message.slot, message.checksums, deltas=self.links_are_slow)
        chain = self.chain
        names = list(chain)
        before = names[names.index(name) - 1] if name in names[1:] else ""
        if fetcher := self._fetchers.get(name):
            fetcher.source = before
        sources = [chain[before] if before else self.buckets]
        if not before and (owners := self.store.manifest.owners):
            nowhere = BucketsAt(endpoint="", key=b"")
            sources += [self.parts.get(owner, nowhere) for owner in range(1, max(owners) + 1)]
        granted = [BucketsAt(endpoint=s.endpoint, key=grant(s.key)) for s in sources]
        return msgspec.structs.replace(message, sources=granted)

    def offer(self, slot: int, checksums: Sequence[int], *, deltas: bool) -> None:
        """Hand out our buckets of the version in `slot`, with deltas to the one before."""
        assert self.store is not None and self._arena is not None
        version = StoredVersion(slot, self._arena.slot(slot), checksums, set(self._absent))
        self.store.publish(version, deltas=self._deltas and deltas)

    def staged(self, name: str, message: Ready) -> None:
        """Measure the rate of a link over which all bytes of a version travelled."""
        if (fetcher := self._fetchers.get(name)) is None:
            return
        if message.source_lost and (relay := fetcher.source):
            # Until it subscribes again; the one who has lost the hub has lost no relay.
            if lost := self._fetchers.get(relay):
                lost.serves, lost.buckets = "", None
            log.warning("%s has lost %s, which leaves the chain", name, relay)
        nbytes = self.store.manifest.total_bytes if self.store is not None else 0
        if fetcher.by_tcp and message.wire_s > 0 and message.wire_bytes >= nbytes:
            fetcher.rate = message.wire_bytes / message.wire_s

    @property
    def links_are_slow(self) -> bool:
        return self._always or any(one.rate < FAST_LINK for one in self._fetchers.values())

    def left(self, name: str) -> None:
        self._fetchers.pop(name, None)

    def granted(self, slot: int) -> None:
        if self.store is not None:
            self.store.withdraw(slot)

    def close(self) -> None:
        self.server.close()


class TcpReceiver:
    """A fetcher of versions by buckets, which goes on where it was when a connection breaks.

    Args:
        buffers: to be filled, `[manifest.total_bytes]` each.
        delta_came: called with a bucket and each delta of it, before it is yielded.
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
        began, count, sums = time.perf_counter(), self._config.connections, message.checksums
        several = len(message.sources) > 1
        owned = owned_buckets(self.manifest) if several else {0: range(len(sums))}
        assemblies = {
            (owner, connection): Assembly(
                self._holdings,
                target,
                sums,
                deltas=self._deltas,
                buckets=buckets[connection::count],
            )
            for owner, buckets in owned.items()
            for connection in range(count)
        }
        stage_s = time.perf_counter() - began
        fetches: list[tuple[BucketSource, Assembly]] = []
        error, lost = "", False
        try:
            missing = {b for assembly in assemblies.values() for b in assembly.missing}
            yield from (bucket for bucket in range(len(sums)) if bucket not in missing)
            fetches = [
                (self._source(*place, message.sources), assembly)
                for place, assembly in assemblies.items()
                if assembly.missing
            ]
            yield from fetch_together(fetches)
        except (SourceLostError, WireError) as problem:
            error, lost = str(problem), isinstance(problem, SourceLostError)
        if corrupted := sum(assembly.corrupted for assembly in assemblies.values()):
            log.warning("%d buckets of version %d came wrong", corrupted, message.version)
        # They verified at the same time.
        stage_s += sum(assembly.stage_s for _, assembly in fetches) / max(1, len(fetches))
        wire_s = max(0.0, time.perf_counter() - began - stage_s)
        wire_bytes = sum(assembly.wire_bytes for _, assembly in fetches)
        data = self._holdings.buffers[target]
        return Receipt(wire_s, stage_s, wire_bytes, error, lost, data=data)

    def _source(self, owner: int, connection: int, sources: Sequence[BucketsAt]) -> BucketSource:
        if owner >= len(sources) or not sources[owner].endpoint:
            raise WireError(f"no source has the buckets of trainer host {owner}")
        if (source := self._sources.get((owner, connection))) is None:
            frame_bytes = self._config.receive_bucket_bytes
            source = BucketSource(frame_bytes, self._delta_came, sealed=self._sealed)
            self._sources[owner, connection] = source
        source.use(sources[owner])
        return source

    def overwritten(self, target: int) -> None:
        """Forget the contents of buffer `target`: a broadcast fills it."""
        self._holdings.contents[target][:] = [0] * len(self.manifest.buckets)

    def verify(self, target: int, checksums: Sequence[int]) -> Iterator[tuple[int, bool]]:
        """Check each bucket that a broadcast has filled; yields bucket and result."""
        for bucket, wanted in enumerate(checksums):
            right = checksum(self._holdings.area(target, bucket)) == wanted
            if right:
                self._holdings.contents[target][bucket] = wanted
            yield bucket, right

    def close(self) -> None:
        for source in self._sources.values():
            source.close()
