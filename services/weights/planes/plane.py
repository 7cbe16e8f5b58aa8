"""What a plane is: a way for the bytes of a version to get from the hub to a receiver."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Protocol

from umbra.proto.messages import Prepare, Ready, Subscribe
from umbra.proto.records import Manifest
from umbra.services.weights.arena import Arena
from umbra.services.weights.manifest import Part


@dataclass(frozen=True, slots=True)
class Receipt:
    """What became of one version: seconds of transfer and of verifying, and what went wrong.

    `data`: its bytes, as an engine loads them. `unusable`: this plane will never work between
    the hub and us.
    """

    wire_s: float = 0.0
    stage_s: float = 0.0
    wire_bytes: int = 0
    error: str = ""
    source_lost: bool = False
    unusable: bool = False
    data: Part | None = None


Receiving = Generator[int | None, None, Receipt]
"""Receives a version step by step; no step blocks for long.

It yields each bucket that is in place and verified, as soon as it is, or None while it waits.
Closing it gives the version up: nothing is written any more when `close` returns.
"""


class ReceiverEnd(Protocol):
    """The receiver's end of a plane, for one layout. Used by one thread."""

    def receive(self, message: Prepare) -> Receiving:
        """Receive the version that `message` names, in place of the one before.

        What goes wrong is in the receipt.

        Raises:
            GpuError: CUDA failed in this process, which is of no more use.
        """
        ...

    def close(self) -> None:
        """Let go of files and sockets; versions that were handed out stay valid."""
        ...


@dataclass(frozen=True, slots=True)
class Deliver:
    """Send this Prepare, with what its plane has added, to its receiver now."""

    receiver: str
    prepare: Prepare


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The push of this Prepare came to nothing; the receiver may not know."""

    receiver: str
    prepare: Prepare
    reason: str


Outcome = Deliver | GiveUp


class HubEnd:
    """The hub's end of a plane, for all of its receivers. Used by one thread; nothing blocks.

    What a plane does not override is enough for receivers that read the arena by themselves.
    """

    plane: str
    broken = ""
    """Why it does not work after all; empty while it does."""

    @property
    def busy(self) -> bool:
        """Whether `poll` will have something soon."""
        return False

    def layout(self, arena: Arena, manifest: Manifest) -> None:
        """What is pushed from now on lies in `arena`."""

    def subscribed(self, name: str, incarnation: str, message: Subscribe) -> None:
        """A receiver was given this plane."""

    def prepare(self, name: str, prepare: Prepare, now: float) -> Iterable[Outcome]:
        """A version is to go to `name`: what is to be done at once, where `poll` is not to say.

        It replaces the one before.
        """
        return (Deliver(name, prepare),)

    def poll(self, now: float) -> Iterable[Outcome]:
        """What is to be done now. Between two of them receivers may leave."""
        return ()

    def staged(self, name: str, message: Ready) -> None:
        """A receiver, of whichever plane, has a version, or could not get it."""

    def left(self, name: str) -> None:
        """A receiver is not subscribed any longer, or not by this plane."""

    def granted(self, slot: int) -> None:
        """`slot` will be written anew, as soon as this returns."""

    def close(self) -> None:
        """End threads, sockets and workers."""
