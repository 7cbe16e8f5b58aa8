"""The commands on a run under way: those that show it, and those that change it from outside."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any

import click
from rich.live import Live

from umbra.proto.access import KeyRole
from umbra.proto.errors import EXIT_DONE, PeerLostError, UsageError
from umbra.proto.messages import Status
from umbra.proto.net.keys import Security, open_security
from umbra.services.monitor.client import Look, StatusClient, Watch
from umbra.services.monitor.run_address import find_address
from umbra.services.monitor.view import (
    NewWarnings,
    headline,
    left_text,
    look_dict,
    plain,
    screen,
    status_dict,
)
from umbra.services.process.command import KEYS, stop_on_signals

if TYPE_CHECKING:
    from umbra.services.monitor.web import PageServer

Command = Callable[..., Any]
ANSWER_S = 5.0  # for the buffer to answer
LOOK_S = 1.0  # between two looks


def _run_option(*roles: KeyRole) -> Callable[[Command], Command]:
    """Give a command `broker` and `security` of the run that the user means.

    The key is of the first of `roles` whose secret half is in the folder of keys.
    """

    def decorate(command: Command) -> Command:
        @click.argument("run", default="")
        @click.option(
            "--broker",
            envvar="UMBRA_BROKER",
            help="Address of its buffer instead of RUN: tcp://host:port.",
        )
        @click.option("--keys", envvar="UMBRA_SECURITY__KEYS", **KEYS)
        @wraps(command)
        def invoke(run: str, broker: str | None, keys: str | None, **others: Any) -> Any:
            source = click.get_current_context().get_parameter_source("broker")
            if run and broker and source is click.core.ParameterSource.COMMANDLINE:
                raise UsageError(f"RUN {run} and --broker {broker} both name a run: give one")
            if run or not broker:
                address = find_address(run)
                broker, keys = address.broker, keys or address.keys
            security = open_security(keys or "", roles)
            return command(broker=broker, security=security, **others)

        return invoke

    return decorate


# The folder of an operator holds all keys, a monitor's just its own.
watched_run = _run_option("monitor", "operator")
reason_option = click.option(
    "--reason", default="", metavar="TEXT", help="Why; shown by the monitor and in the logs."
)


@click.command()
@_run_option("operator", "monitor")
@reason_option
@click.option("--member", multiple=True, metavar="NAME", help="Only this one; may be repeated.")
def drain(broker: str, security: Security, reason: str, member: tuple[str, ...]) -> int:
    """End the run in order, or have one member (generator, scorer, relay) leave it.

    Who leaves hands back what it holds, unfinished samples included; no sample is lost. A run with
    a durable store can go on later.
    """
    with StatusClient(broker, security) as client:
        for name in member or [""]:
            client.drain(ANSWER_S, member=name, reason=reason)
            click.echo(f"{name or 'the run'} is draining")
    return EXIT_DONE


json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")


@click.command()
@click.option("--ping", is_flag=True, help="Only check that the buffer answers.")
@click.option("--member", metavar="NAME", help="Only check that the buffer hears this member.")
@watched_run
@json_option
def status(broker: str, security: Security, as_json: bool, ping: bool, member: str | None) -> int:
    """Print the state of a run once, or check that its buffer answers, or hears a member.

    The exit code is 0 if it answers and 5 if not.
    """
    if ping + (member is not None) + as_json > 1:
        raise UsageError("--ping, --member and --json have different answers: give one")
    with StatusClient(broker, security) as client:
        if ping:
            started = time.monotonic()
            pong = client.ping(ANSWER_S)
            milliseconds = (time.monotonic() - started) * 1000
            click.echo(f"{pong.role} at {broker} is {pong.state} ({milliseconds:.1f} ms)")
            return EXIT_DONE
        current = client.status(ANSWER_S)
    if member is not None:
        click.echo(_describe_member(current, member))
    else:
        click.echo(json.dumps(status_dict(current)) if as_json else plain(Look(current)))
    return EXIT_DONE


def _describe_member(status: Status, name: str) -> str:
    """Return a line about the member `name`; PeerLostError if it is none."""
    for one in status.members:
        if one.name == name:
            heard = f"heard of {one.silent_s:.1f} s ago"
            return f"{one.role} {name} is {one.state}, {one.activity}; {heard}"
    reason = status.departed.get(name)
    raise PeerLostError(f"{name} is no member of the run" + (f": {reason}" if reason else ""))


@click.command()
@watched_run
@json_option
@click.option(
    "--web",
    metavar="[HOST]:PORT",
    help="Serve a page, and /metrics; stays until Ctrl-C.  [host: 127.0.0.1]",
)
def monitor(broker: str, security: Security, as_json: bool, web: str | None) -> int:
    """Watch a run live: its members, ledger, staleness and stalls.

    A screen on a terminal, which Ctrl-C leaves; one line per look when piped, or if TERM is dumb.
    Ends with code 0 when the run ends or at Ctrl-C, and with 5 when no buffer answers at the start.
    Any number may watch; none of them changes the run by being there.
    """
    stopping, warnings = threading.Event(), NewWarnings()
    with Watch(broker, security) as watch, stop_on_signals(stopping), ExitStack() as stack:
        look, lost = watch.look(ANSWER_S), False
        page = None if web is None else stack.enter_context(closing(_serve(look, web)))
        drawing = Live(screen=True, auto_refresh=False)
        drawn = not (as_json or page or drawing.console.is_dumb_terminal)  # where it draws nothing
        on_screen = sys.stdout.isatty() and drawn
        with drawing if on_screen else nullcontext() as live:

            def show(look: Look) -> None:
                if live is not None:
                    live.update(screen(look, live.console.width), refresh=True)
                elif as_json:
                    click.echo(json.dumps(look_dict(look)))
                else:
                    for line in [*warnings.lines(look.status), headline(look.status)]:
                        click.echo(line)

            show(look)
            while not stopping.wait(LOOK_S):
                try:
                    look, lost = watch.look(ANSWER_S), False
                except PeerLostError:
                    if not lost and not on_screen:
                        click.echo(f"umbra: {left_text(look.status, lost=True)}", err=True)
                    if not lost and page is not None:
                        page.lose()
                    lost = True
                    if page is None:  # else it is waited for
                        break
                else:
                    show(look)
                    if page is not None:
                        page.show(look)
        if on_screen:
            click.echo(left_text(look.status, lost=lost))
    return EXIT_DONE


def _serve(look: Look, address: str) -> PageServer:
    from umbra.services.monitor.web import PageServer  # few ask for one

    page = PageServer(address, look)
    click.echo(f"{page.url}/", err=True)
    if not page.is_local:
        click.echo("umbra: whoever reaches that address can read prompts and samples", err=True)
    return page
