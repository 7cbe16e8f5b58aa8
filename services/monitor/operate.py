"""The commands that change a run from outside: `umbra pause`, `resume`, `drain`, `interrupt`."""

from __future__ import annotations

import click

from umbra.proto.errors import EXIT_DONE, UsageError
from umbra.proto.net.keys import Security
from umbra.services.monitor.client import StatusClient
from umbra.services.monitor.options import operated_run, timeout_option

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


@click.command()
@operated_run
@timeout_option
@click.option("--sample", "samples", multiple=True, metavar="ID", help="Only this one.")
def interrupt(broker: str, security: Security, timeout_s: float, samples: tuple[str, ...]) -> int:
    """Have generators hand unfinished samples back; they go on later as partials."""
    with StatusClient(broker, security) as client:
        count = client.interrupt(list(samples), timeout_s)
    click.echo(f"{count} samples were asked back")
    return EXIT_DONE
