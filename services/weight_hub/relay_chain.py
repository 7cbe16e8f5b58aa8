"""From whom each receiver of plane `tcp` fetches: relays from one another, in a chain.

The first relay fetches from the hub, every other one from the relay before it, so that the hub
sends each byte once, however many nodes there are. Receivers that are no relays fetch from the hub.
"""

from __future__ import annotations


class RelayChain:
    """The order of the relays: that in which they subscribed.

    Args:
        hub: the hub's own buckets endpoint.
    """

    def __init__(self, hub: str) -> None:
        self._hub = hub
        self._relays: dict[str, str] = {}  # name -> buckets endpoint
        self._told: dict[str, str] = {}  # receiver -> the relay it was last sent to

    @property
    def relays(self) -> list[str]:
        """Names, in the order of the chain."""
        return list(self._relays)

    def join(self, name: str, endpoint: str) -> None:
        """A relay has subscribed; one that was in the chain before goes to its end."""
        self._relays.pop(name, None)
        self._relays[name] = endpoint

    def leave(self, name: str) -> None:
        """A receiver is not subscribed any longer: the next in the chain takes its place."""
        self._relays.pop(name, None)
        self._told.pop(name, None)

    def source(self, name: str) -> str:
        """The endpoint from which `name` is to fetch its next version."""
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
