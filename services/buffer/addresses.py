"""Where the sockets of a run are bound: the same places again when the buffer starts again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from umbra.services.buffer.store.api import Store

KEY = "addresses"


class Bound(NamedTuple):
    """What to bind; the port may be `*`, which picks a free one."""

    control: str
    data: str
    events_in: str
    events_out: str


class Addresses:
    """The addresses in `store`."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def before(self, host: str, port: str, ports: Sequence[int]) -> Bound:
        """Where the buffer was on `host`, if it was there and nothing else is asked for.

        `port` is that of control, `ports` those of the others; 0 is any.
        """
        others = (f"tcp://{host}:{number or '*'}" for number in ports)
        fresh = Bound(f"tcp://{host}:{port}", *others)
        try:
            record = msgspec.msgpack.decode(self._store.get(KEY))
        except KeyError:
            return fresh
        bound = Bound(*record["endpoints"])
        if record["host"] != host or (port not in ("*", "0") and not bound.control.endswith(port)):
            return fresh
        pairs = zip(fresh[1:], bound[1:], strict=True)
        return Bound(bound.control, *(old if new.endswith("*") else new for new, old in pairs))

    def forget(self) -> None:
        """Bind as a buffer that was nowhere yet."""
        self._store.delete(KEY)

    def keep(self, host: str, endpoints: list[str]) -> None:
        """Remember them for the next start."""
        record = {"host": host, "endpoints": endpoints}
        self._store.put(KEY, msgspec.msgpack.encode(record))
