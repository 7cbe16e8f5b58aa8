"""The hub's end of plane `tcp`: the buckets, their deltas, and who fetches from whom."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import msgspec

from umbra.proto.messages import Prepare, Ready, Subscribe
from umbra.proto.records import Manifest
from umbra.services.runtime.config import WeightHubConfig as WeightHubConfig
from umbra.services.runtime.net.address import reachable
from umbra.services.runtime.net.keys import OPEN, Security
from umbra.services.runtime.weights import delta
from umbra.services.weight_hub.bucket_server import BucketServer
from umbra.services.weight_hub.encoder import DeltaEncoder
from umbra.services.weight_hub.relay_chain import RelayChain
from umbra.services.weight_hub.store import BucketStore

FAST_LINK = 1e9  # bytes per second; encoding on two cores is hardly faster

log = logging.getLogger(__name__)


class TcpPlane:
    """Made when the first receiver of this plane subscribes.

    Args:
        name: sender name of the hub.
        incarnation: of the hub.
        endpoint: to bind; port * picks a free one.
        config: the section `weight_hub`.
        security: keys of the hub.

    Raises:
        StartupError: the address is taken.
        UsageError: it is not ours, or other machines can reach it and there are no keys.
    """

    def __init__(
        self,
        name: str,
        incarnation: str,
        endpoint: str,
        config: WeightHubConfig,
        security: Security = OPEN,
    ) -> None:
        self._config = config
        self._is_relay = security.keys is not None and security.keys.role == "relay"
        self.server = BucketServer(name, incarnation, endpoint, security)
        self.endpoint = reachable(self.server.endpoint, config.advertise)
        self.chain = RelayChain(self.endpoint)
        self._lock = threading.Lock()  # guards the layout: a relay sets it from another thread
        self._relays: dict[str, Subscribe] = {}
        self._manifest: Manifest | None = None
        self._store: BucketStore | None = None
        self._encoder: DeltaEncoder | None = None
        self._encoded: tuple[int, Sequence[int]] | None = None  # slot and contents
        self._rates: dict[str, float] = {}  # of each receiver's link, bytes per second
        self._deltas = config.delta != "off" and delta.available()
        if config.delta != "off" and not self._deltas:
            log.info("no deltas: they need numpy and zstandard (pip install 'umbra-rl[delta]')")

    def layout(self, manifest: Manifest) -> BucketStore:
        """The layout of what is pushed from now on."""
        with self._lock:
            return self._layout(manifest)

    def relay_at(self, host: str) -> str:
        """Weights endpoint of the relay on `host`; empty if there is none."""
        return next((r.serves for r in self._relays.values() if r.host == host), "")

    def _layout(self, manifest: Manifest) -> BucketStore:
        if self._store is not None and self._manifest is not None:
            if self._manifest.digest == manifest.digest:
                return self._store
        self._close_encoder()
        self._manifest = manifest
        self._store = self.server.serve(manifest)
        return self._store

    def subscribed(self, name: str, message: Subscribe, *, chained: bool = True) -> None:
        """A receiver has subscribed, a relay if it hands buckets on.

        One that is not `chained` gets most versions in another way, and the rest from the hub.
        """
        if message.buckets:
            self._relays[name] = message
        if message.buckets and chained:
            self.chain.join(name, message.buckets)
            log.info("chain of relays: %s", ", ".join(self.chain.relays))

    def prepare(self, name: str, message: Prepare, data: memoryview) -> Prepare:
        """What to send to `name` so that it fetches the version in `data`."""
        assert self._store is not None
        if not self._store.holds(message.slot, message.checksums):
            self._store.offer(message.slot, data, message.checksums)
        version = (message.slot, message.checksums)
        if self._deltas and self._encoded != version and self._links_are_slow():
            assert self._manifest is not None
            if self._encoder is None:
                self._encoder = DeltaEncoder(self._store, self._manifest)
            self._encoded = version
            self._encoder.start(data, message.checksums)
        source = self.chain.source(name)
        relayed = self._is_relay or source != self.endpoint
        return msgspec.structs.replace(message, source=source, relayed=relayed)

    def staged(self, name: str, message: Ready, nbytes: int) -> None:
        """A receiver has a version of `nbytes` bytes: if all of them travelled, its link shows."""
        if message.wire_s > 0 and message.wire_bytes >= nbytes:
            self._rates[name] = message.wire_bytes / message.wire_s

    def _links_are_slow(self) -> bool:
        slow = any(rate < FAST_LINK for rate in self._rates.values())
        return slow or self._config.delta == "always"

    def left(self, name: str) -> None:
        """A receiver is not subscribed any longer."""
        self.chain.leave(name)
        self._relays.pop(name, None)
        self._rates.pop(name, None)

    def source_lost(self, name: str) -> None:
        """`name` could not fetch, because its source is gone."""
        if relay := self.chain.broken(name):
            self._relays.pop(relay, None)
            log.warning("%s has lost %s, which leaves the chain", name, relay)

    def granted(self, slot: int) -> None:
        """`slot` will be written anew, as soon as this returns."""
        if self._encoder is not None and self._encoded is not None and self._encoded[0] == slot:
            self._encoder.stop()
        if self._store is not None:
            self._store.withdraw(slot)

    def close(self) -> None:
        """Stop serving."""
        self._close_encoder()
        self.server.close()

    def _close_encoder(self) -> None:
        if self._encoder is not None:
            self._encoder.close()
        self._encoder = self._encoded = None
