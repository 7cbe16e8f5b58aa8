"""The commands `umbra monitor`, `umbra status` and `umbra ping`."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable

import click

from umbra.proto.errors import EXIT_DONE, PeerLostError, UsageError
from umbra.proto.messages import Role, Status
from umbra.services.monitor.client import StatusClient
from umbra.services.monitor.rates import RateMeter, Rates
from umbra.services.monitor.view import headline, plain, render, status_dict
from umbra.services.runtime.command import keys_of
from umbra.services.runtime.keys import Security
from umbra.services.runtime.signals import stop_on_signals

broker_option = click.option(
    "--broker", envvar="UMBRA_BROKER", required=True, help="Address of the buffer: tcp://host:port."
)
watching_keys = keys_of("monitor", "operator")
operating_keys = keys_of("operator", "monitor")
timeout_option = click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0, min_open=True),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for an answer.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")


@click.command()
@click.option("--broker", envvar="UMBRA_BROKER", help="Address of the buffer: tcp://host:port.")
@click.option("--hub", help="Address of a weight hub or relay, to check that instead.")
@watching_keys
@timeout_option
@click.option("--member", metavar="NAME", help="Check that the buffer hears a member instead.")
def ping(
    broker: str | None, hub: str | None, security: Security, timeout_s: float, member: str | None
) -> int:
    """Check that the buffer, a hub, a relay or a member is there: exit code 0 if so, 5 if not."""
    started = time.monotonic()
    address = hub or broker
    if address is None:
        raise UsageError("whom to ask? Give --broker tcp://host:port, or --hub tcp://host:port")
    if hub is not None and member is not None:
        raise UsageError("a hub knows no members: give --hub or --member")
    server: Role = "buffer" if hub is None else "weight_hub"
    with StatusClient(address, security, server=server) as client:
        if member is not None:
            click.echo(_hear(client, member, timeout_s))
            return EXIT_DONE
        pong = client.ping(timeout_s)
    milliseconds = (time.monotonic() - started) * 1000
    click.echo(f"{pong.role} at {address} is {pong.state} ({milliseconds:.1f} ms)")
    return EXIT_DONE


def _hear(client: StatusClient, name: str, timeout_s: float) -> str:
    """What the buffer knows of the member `name`.

    Raises:
        PeerLostError: it is no member.
    """
    status = client.status(timeout_s)
    for member in status.members:
        if member.name == name:
            return (
                f"{member.role} {name} is {member.state}, {member.activity}; heard of "
                f"{member.silent_s:.1f} s ago"
            )
    left = status.departed.get(name)
    raise PeerLostError(f"{name} is no member of the run" + (f": {left}" if left else ""))


@click.command()
@broker_option
@watching_keys
@timeout_option
@json_option
def status(broker: str, security: Security, timeout_s: float, as_json: bool) -> int:
    """Print the state of a run once."""
    with StatusClient(broker, security) as client:
        current = client.status(timeout_s)
    click.echo(json.dumps(status_dict(current)) if as_json else plain(current, Rates()))
    return EXIT_DONE


@click.command()
@broker_option
@watching_keys
@timeout_option
@json_option
@click.option("--once", is_flag=True, help="Print the state once and exit.")
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(0.1),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two looks.",
)
def monitor(
    broker: str, security: Security, timeout_s: float, as_json: bool, once: bool, interval_s: float
) -> int:
    """Watch a run live: its members, ledger, staleness and what is stuck.

    A table on a terminal, one line per look when piped. Ends with code 0 when the run ends or at
    Ctrl-C, and with 5 when no buffer answers at the start.
    """
    stopping = threading.Event()
    with StatusClient(broker, security) as client, stop_on_signals(stopping):
        current = client.status(timeout_s)
        if once:
            click.echo(json.dumps(status_dict(current)) if as_json else plain(current, Rates()))
        elif as_json:
            _follow(client, current, stopping, interval_s, timeout_s, _echo_json)
        elif sys.stdout.isatty():
            _live(client, current, stopping, interval_s, timeout_s)
        else:
            _follow(client, current, stopping, interval_s, timeout_s, _echo_line)
    return EXIT_DONE


@click.command()
@broker_option
@operating_keys
@timeout_option
@click.option("--sample", "samples", multiple=True, metavar="ID", help="Only this one.")
def interrupt(broker: str, security: Security, timeout_s: float, samples: tuple[str, ...]) -> int:
    """Have generators hand unfinished samples back; they go on later as partials."""
    with StatusClient(broker, security) as client:
        count = client.interrupt(list(samples), timeout_s)
    click.echo(f"{count} samples were asked back")
    return EXIT_DONE


def _echo_json(status: Status, _rates: Rates) -> None:
    click.echo(json.dumps(status_dict(status)))


def _echo_line(status: Status, rates: Rates) -> None:
    click.echo(headline(status, rates))


def _live(
    client: StatusClient,
    first: Status,
    stopping: threading.Event,
    interval_s: float,
    timeout_s: float,
) -> None:
    from rich.live import Live

    with Live(render(first, Rates()), auto_refresh=False) as live:

        def show(status: Status, rates: Rates) -> None:
            live.update(render(status, rates), refresh=True)

        _follow(client, first, stopping, interval_s, timeout_s, show)


def _follow(
    client: StatusClient,
    status: Status,
    stopping: threading.Event,
    interval_s: float,
    timeout_s: float,
    show: Callable[[Status, Rates], None],
) -> None:
    """Show one status after the other until the run or the user ends it."""
    meter = RateMeter()
    while True:
        show(status, meter.update(status))
        if stopping.wait(interval_s):
            return
        try:
            status = client.status(timeout_s)
        except PeerLostError:
            click.echo(f"umbra: run {status.run_id} does not answer any more", err=True)
            return
