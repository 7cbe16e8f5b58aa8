"""The commands `umbra monitor`, `umbra status` and `umbra ping`."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable

import click

from umbra.proto.errors import EXIT_DONE, PeerLostError
from umbra.services.monitor.client import StatusClient
from umbra.services.monitor.live import LiveView
from umbra.services.monitor.options import broker_option, timeout_option
from umbra.services.monitor.rates import Rates
from umbra.services.monitor.view import headline, plain, status_dict
from umbra.services.monitor.watch import Look, Watch, look_dict
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

    A screen with keys to pause, drain and roll back on a terminal, one line per look when piped.
    Ends with code 0 when the run ends or at Ctrl-C, and with 5 when no buffer answers at the start.
    Any number may watch; none of them changes the run by being there.
    """
    stopping = threading.Event()
    with Watch(broker) as watch, stop_on_signals(stopping):
        look = watch.look(timeout_s)
        if once:
            _echo_json(look) if as_json else click.echo(plain(look.status, look.rates))
        elif sys.stdout.isatty() and not as_json:
            LiveView(watch, interval_s, timeout_s).run(look, stopping)
        else:
            show = _echo_json if as_json else _echo_line
            _follow(watch, look, stopping, interval_s, timeout_s, show)
    return EXIT_DONE


def _echo_json(look: Look) -> None:
    click.echo(json.dumps(look_dict(look)))


def _echo_line(look: Look) -> None:
    click.echo(headline(look.status, look.rates))


def _follow(
    watch: Watch,
    look: Look,
    stopping: threading.Event,
    interval_s: float,
    timeout_s: float,
    show: Callable[[Look], None],
) -> None:
    """Show one look after the other until the run or the user ends it."""
    while True:
        show(look)
        if stopping.wait(interval_s):
            return
        try:
            look = watch.look(timeout_s)
        except PeerLostError:
            click.echo(f"umbra: run {look.status.run_id} does not answer any more", err=True)
            return
