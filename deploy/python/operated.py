"""What can be asked of a run under way, wherever it is."""

from __future__ import annotations

from typing import Any

from umbra.proto.access import KeyRole
from umbra.proto.net.keys import open_security
from umbra.services.config import SecurityConfig
from umbra.services.monitor.client import StatusClient
from umbra.services.monitor.run_address import RunAddress
from umbra.services.monitor.view import status_dict

ANSWER_S = 10.0
CHECKPOINT_S = 600.0
WATCHING: tuple[KeyRole, ...] = ("monitor", "operator")
OPERATING: tuple[KeyRole, ...] = ("operator", "monitor")


class Operated:
    """A run that answers at an address.

    All methods raise `DeadlineError` if its buffer does not answer within 10 seconds.
    """

    @property
    def address(self) -> RunAddress:
        """Where its buffer is."""
        raise NotImplementedError

    def status(self) -> dict[str, Any]:
        """The state of all that is under way, as `umbra status --json` prints it."""
        with self._client(WATCHING) as client:
            return status_dict(client.status(ANSWER_S))

    def pause(self, reason: str = "") -> None:
        """Have no samples and no batches handed out until `resume`."""
        with self._client(OPERATING) as client:
            client.pause(reason, ANSWER_S)

    def resume(self) -> None:
        """Go on after `pause`."""
        with self._client(OPERATING) as client:
            client.resume(ANSWER_S)

    def checkpoint(self, timeout_s: float = CHECKPOINT_S) -> int:
        """Have the trainer save its state; the step after which it did."""
        with self._client(OPERATING) as client:
            return client.checkpoint(timeout_s)

    def drain(self, reason: str = "drained from Python") -> None:
        """Have the run end in order; returns at once."""
        with self._client(OPERATING) as client:
            client.drain("", reason, ANSWER_S)

    def _client(self, roles: tuple[KeyRole, ...]) -> StatusClient:
        address = self.address
        security = open_security(SecurityConfig(keys=address.keys), roles)
        return StatusClient(address.broker, security)


class RemoteRun(Operated):
    """A run of which only the address is known: it can be looked at and operated.

    Args:
        broker: address of its buffer, tcp://host:port.
        keys: folder of its keys; empty if it has none.
    """

    def __init__(self, broker: str, keys: str = "") -> None:
        self._address = RunAddress(broker, keys)

    @property
    def address(self) -> RunAddress:
        return self._address

    def __repr__(self) -> str:
        return f"<umbra.RemoteRun at {self._address.broker}>"
