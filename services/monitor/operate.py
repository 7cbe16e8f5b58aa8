"""The commands that change a run from outside, and the options of all commands on a running job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import click

from umbra.proto.access import KeyRole
from umbra.proto.errors import EXIT_DONE, UsageError
from umbra.proto.net.keys import Security, open_security
from umbra.services.config import SecurityConfig
from umbra.services.monitor.client import StatusClient
from umbra.services.monitor.run_address import find_address
from umbra.services.process.command import KEYS

timeout_option = click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0, min_open=True),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for an answer.",
)

Command = Callable[..., Any]


def _run_option(*roles: KeyRole, unless: Sequence[str] = ()) -> Callable[[Command], Command]:
    """Give a command `broker` and `security` of the run that the user means.

    The key is of the first of `roles` whose secret half is in the folder of keys. No run is
    looked for if one of the options `unless` is given.
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
            if run and broker and _by_flag("broker"):
                raise UsageError(f"RUN {run} and --broker {broker} both name a run: give one")
            if run or not (broker or any(others[name] for name in unless)):
                address = find_address(run)
                broker, keys = address.broker, keys or address.keys
            security = open_security(SecurityConfig(keys=keys or ""), roles)
            return command(broker=broker, security=security, **others)

        return invoke

    return decorate


def _by_flag(name: str) -> bool:
    source = click.get_current_context().get_parameter_source(name)
    return source is click.core.ParameterSource.COMMANDLINE


# The folder of an operator holds all keys, a monitor's just its own.
operated_run = _run_option("operator", "monitor")
checked_run = _run_option("monitor", "operator", unless=("hub", "relay"))
reason_option = click.option(
    "--reason", default="", metavar="TEXT", help="Why; shown by the monitor and in the logs."
)


@click.command()
@operated_run
@timeout_option
@reason_option
def pause(broker: str, security: Security, timeout_s: float, reason: str) -> int:
    """Hand out no samples and no batches until `umbra resume`.

    What generators, scorers and trainer have goes on and is taken in. The run stays paused when the
    buffer is restarted.
    """
    with StatusClient(broker, security) as client:
        client.pause(reason, timeout_s)
    click.echo("paused: `umbra resume` goes on")
    return EXIT_DONE


@click.command()
@operated_run
@timeout_option
def resume(broker: str, security: Security, timeout_s: float) -> int:
    """Go on after `umbra pause`."""
    with StatusClient(broker, security) as client:
        client.resume(timeout_s)
    click.echo("samples and batches are handed out again")
    return EXIT_DONE


@click.command()
@operated_run
@timeout_option
@reason_option
@click.option("--node", default="", metavar="HOST", help="All members on this host.")
@click.option("--member", default="", metavar="NAME", help="Only this one.")
def drain(
    broker: str, security: Security, timeout_s: float, reason: str, node: str, member: str
) -> int:
    """End the run in order, or have one member (generator, scorer, relay) leave it.

    Who leaves hands back what it holds, unfinished samples included; no sample is lost. A run with
    a durable store can go on later.
    """
    if node and member:
        raise UsageError("--node and --member are two ways to say who leaves: use one of them")
    with StatusClient(broker, security) as client:
        if node:
            leaving = client.drain_node(node, reason, timeout_s)
        else:
            client.drain(member, reason, timeout_s)
            leaving = [member or "the run"]
    for name in leaving:
        click.echo(f"{name} is draining")
    return EXIT_DONE


@click.command()
@operated_run
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0, min_open=True),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait until it is written.",
)
def checkpoint(broker: str, security: Security, timeout_s: float) -> int:
    """Have the trainer save its state now, or after the step that it is in; waits until it has."""
    with StatusClient(broker, security) as client:
        step = client.checkpoint(timeout_s)
    click.echo(f"the trainer has saved its state after step {step}")
    return EXIT_DONE
