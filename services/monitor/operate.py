"""The commands that change a run from outside, and the options of all commands on a running job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import click

from umbra.proto.access import KeyRole
from umbra.proto.errors import EXIT_DONE, UsageError
from umbra.proto.messages import Role, Status
from umbra.proto.net.keys import Security, open_security
from umbra.services.monitor.client import StatusClient
from umbra.services.monitor.run_address import find_address
from umbra.services.process.command import KEYS

Command = Callable[..., Any]
NEEDED: tuple[Role, ...] = ("trainer", "weight_hub", "part")  # the run stands still without them


def _timeout(default_s: float, purpose: str) -> Callable[[Command], Command]:
    return click.option(
        "--timeout",
        "timeout_s",
        type=click.FloatRange(0, min_open=True),
        default=default_s,
        show_default=True,
        metavar="SECONDS",
        help=f"How long to wait {purpose}.",
    )


timeout_option = _timeout(5.0, "for an answer")


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
            source = click.get_current_context().get_parameter_source("broker")
            if run and broker and source is click.core.ParameterSource.COMMANDLINE:
                raise UsageError(f"RUN {run} and --broker {broker} both name a run: give one")
            if run or not (broker or any(others[name] for name in unless)):
                address = find_address(run)
                broker, keys = address.broker, keys or address.keys
            security = open_security(keys or "", roles)
            return command(broker=broker, security=security, **others)

        return invoke

    return decorate


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
        client.operate("pause", timeout_s, reason=reason)
    click.echo("paused, until `umbra resume`")
    return EXIT_DONE


@click.command()
@operated_run
@timeout_option
def resume(broker: str, security: Security, timeout_s: float) -> int:
    """Go on after `umbra pause`."""
    with StatusClient(broker, security) as client:
        client.operate("resume", timeout_s)
    click.echo("resumed: samples and batches are handed out")
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
        for name in _members_on(node, client.status(timeout_s)) if node else [member]:
            client.operate("drain", timeout_s, member=name, reason=reason)
            click.echo(f"{name or 'the run'} is draining")
    return EXIT_DONE


def _members_on(node: str, status: Status) -> list[str]:
    """Return the members on the host called `node`, relays last.

    Raises:
        UsageError: nobody is there, or one without whom the run cannot go on.
    """
    members, host = status.members, node.replace(".", "-")
    # Kubernetes' host names have dashes for dots.
    local = [member for member in members if member.host.replace(".", "-") == host]
    if not local:
        hosts = ", ".join(sorted({member.host for member in members})) or "no host"
        raise UsageError(f"--node {node}: no member runs there; members are on {hosts}")
    for member in local:
        if member.role in NEEDED:
            raise UsageError(
                f"--node {node}: {member.name} runs there, and the run cannot do without it: "
                "drain the run as a whole, or the other members by name"
            )
    return [member.name for member in sorted(local, key=lambda member: member.role == "relay")]


@click.command()
@operated_run
@_timeout(600.0, "until it is written")
def checkpoint(broker: str, security: Security, timeout_s: float) -> int:
    """Have the trainer save its state now, or after the step that it is in; waits until it has."""
    with StatusClient(broker, security) as client:
        step = client.operate("checkpoint", timeout_s).version
    click.echo(f"the trainer has saved its state after step {step}")
    return EXIT_DONE
