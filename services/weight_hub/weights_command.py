"""`umbra weights`: what the hub of a run holds, and what to do with it."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click

from umbra.proto.deadline import LEAST_RATE, Deadline, Pace
from umbra.proto.errors import DeadlineError, RejectedError, UsageError
from umbra.proto.messages import (
    ExportVersion,
    Message,
    Ok,
    PinVersion,
    RollBack,
    Status,
    StatusRequest,
    UnpinVersion,
    Versions,
    VersionsRequest,
)
from umbra.proto.net.io_thread import IoThread
from umbra.proto.net.keys import Security
from umbra.services.process.command import keys_of

RETRY_S = 0.1  # while no slot is free for a roll-back
M = TypeVar("M", bound=Message)


class HubClient:
    """Questions to the hub of a run, from outside of it.

    Args:
        broker: address of the buffer, which knows the hub's; empty if `hub` is given.
        hub: address of the hub.
        timeout_s: seconds that an answer may take.
    """

    def __init__(self, link: IoThread, broker: str, hub: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        if not hub:
            status = link.channel(broker, "buffer").call(
                StatusRequest(), Status, timeout_s=timeout_s
            )
            hub = status.weights
        if not hub:
            raise DeadlineError(f"no weight hub has joined the run at {broker} yet")
        self._channel = link.channel(hub, "weight hub", server="weight_hub")

    def ask(self, body: Message, reply: type[M]) -> M:
        """The hub's answer; asks again while it is busy.

        Raises:
            RejectedError: it says no, and why.
            DeadlineError: no answer in time.
        """
        return self._ask(body, reply, self._timeout_s)

    def move(self, body: Message, reply: type[M]) -> M:
        """As `ask`, where the hub copies or writes a version first: that takes time for its bytes.

        Raises:
            RejectedError: as `ask`.
            DeadlineError: as `ask`.
        """
        nbytes = self.ask(VersionsRequest(), Versions).slot_bytes
        return self._ask(body, reply, Pace(self._timeout_s, LEAST_RATE).limit_s(nbytes))

    def _ask(self, body: Message, reply: type[M], timeout_s: float) -> M:
        deadline = Deadline(timeout_s)
        while True:
            try:
                return self._channel.call(body, reply, timeout_s=deadline.left_s)
            except RejectedError as error:
                if error.code != "busy" or deadline.left_s < RETRY_S:
                    raise
                time.sleep(RETRY_S)


@contextmanager
def _client(
    broker: str, hub: str, security: Security, timeout_s: float
) -> Generator[HubClient, None, None]:
    if not broker and not hub:
        raise UsageError("name the run: --broker tcp://host:port, or --hub tcp://host:port")
    incarnation = uuid.uuid4().hex[:12]
    link = IoThread(f"weights-{incarnation}", incarnation, security=security)
    try:
        yield HubClient(link, broker, hub, timeout_s)
    finally:
        link.close()


def _options(function: Callable[..., int]) -> Callable[..., int]:
    """Give a command the options that all have; it gets a `HubClient` instead of three of them."""

    @click.option(
        "--broker",
        envvar="UMBRA_BROKER",
        default="",
        help="Address of the buffer: tcp://host:port.",
    )
    @click.option("--hub", default="", help="Address of the hub itself, instead of --broker.")
    @keys_of("operator", "monitor")
    @click.option(
        "--timeout",
        "timeout_s",
        type=click.FloatRange(0, min_open=True),
        default=60.0,
        show_default=True,
        metavar="SECONDS",
        help="How long to wait for an answer, besides a second for each 20 MB to copy.",
    )
    @wraps(function)
    def invoke(
        *, broker: str, hub: str, security: Security, timeout_s: float, **values: Any
    ) -> int:
        with _client(broker, hub, security, timeout_s) as client:
            return function(client, **values)

    return invoke


version_argument = click.argument("version", type=int)


@click.group()
def command() -> None:
    """List, pin, roll back and export the versions that a run's weight hub holds."""


@command.command("list")
@_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def list_versions(client: HubClient, as_json: bool) -> int:
    """Show which versions the hub holds, oldest first."""
    _show(client.ask(VersionsRequest(), Versions), as_json)
    return 0


@command.command()
@_options
@version_argument
def pin(client: HubClient, version: int) -> int:
    """Keep VERSION until it is unpinned or the run ends; it survives a hub that is killed."""
    _show(client.move(PinVersion(version=version), Versions), as_json=False)
    return 0


@command.command()
@_options
@version_argument
def unpin(client: HubClient, version: int) -> int:
    """Let go of VERSION."""
    _show(client.ask(UnpinVersion(version=version), Versions), as_json=False)
    return 0


@command.command()
@_options
@version_argument
def rollback(client: HubClient, version: int) -> int:
    """Push VERSION to all generators, until the trainer publishes its next one.

    The bound on staleness still holds: samples that need newer weights wait for them.
    """
    client.move(RollBack(version=version), Ok)
    click.echo(f"version {version} is being pushed to all generators")
    return 0


@command.command()
@_options
@version_argument
@click.argument("out", type=click.Path(path_type=Path))
def export(client: HubClient, version: int, out: Path) -> int:
    """Write VERSION as a Hugging Face directory OUT, on the hub's host.

    An adapter that is published by itself (trainer.lora_publish) is written as peft writes it.
    """
    path = out if out.is_absolute() else Path.cwd() / out
    client.move(ExportVersion(version=version, path=str(path)), Ok)
    click.echo(f"version {version} written to {path}")
    return 0


def _show(versions: Versions, as_json: bool) -> None:
    rows = [
        {"version": h.version, "place": h.place, "pinned": h.pinned, "newest": h.newest}
        for h in versions.held
    ]
    if as_json:
        facts = {"versions": rows, "slots": versions.slots, "slot_bytes": versions.slot_bytes}
        click.echo(json.dumps(facts))
        return
    if not rows:
        click.echo("no version has been published yet")
    for row in rows:
        marks = [mark for mark in ("newest", "pinned") if row[mark]]
        click.echo(f"{row['version']:>8}  {row['place']}{'  ' if marks else ''}{', '.join(marks)}")
