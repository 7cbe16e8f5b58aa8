"""The commands `umbra monitor`, `umbra status` and `umbra ping`."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable

import click

from umbra.proto.errors import EXIT_DONE, PeerLostError
from umbra.proto.messages import Status
from umbra.services.monitor.client import StatusClient
from umbra.services.monitor.options import broker_option, timeout_option
from umbra.services.monitor.rates import RateMeter, Rates
from umbra.services.monitor.view import headline, plain, render, status_dict
from umbra.services.runtime.signals import stop_on_signals

json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")


@click.command()
@broker_option
@timeout_option
def ping(broker: str, timeout_s: float) -> int:
    """Check that the buffer answers: exit code 0 if it does, 5 if not."""
    started = time.monotonic()
    with StatusClient(broker) as client:
        pong = client.ping(timeout_s)
    milliseconds = (time.monotonic() - started) * 1000
    click.echo(f"{pong.role} at {broker} is {pong.state} ({milliseconds:.1f} ms)")
    return EXIT_DONE


@click.command()
@broker_option
@timeout_option
@json_option
def status(broker: str, timeout_s: float, as_json: bool) -> int:
    """Print the state of a run once."""
    with StatusClient(broker) as client:
        current = client.status(timeout_s)
    click.echo(json.dumps(status_dict(current)) if as_json else plain(current, Rates()))
    return EXIT_DONE


@click.command()
@broker_option
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
def monitor(broker: str, timeout_s: float, as_json: bool, once: bool, interval_s: float) -> int:
    """Watch a run live: its members, ledger, staleness and what is stuck.

    A table on a terminal, one line per look when piped. Ends with code 0 when the run ends or at
    Ctrl-C, and with 5 when no buffer answers at the start.
    """
    stopping = threading.Event()
    with StatusClient(broker) as client, stop_on_signals(stopping):
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
