"""Options that the commands on a running job share."""

from __future__ import annotations

import click

from umbra.services.runtime.process.command import keys_of

broker_option = click.option(
    "--broker", envvar="UMBRA_BROKER", required=True, help="Address of the buffer: tcp://host:port."
)
timeout_option = click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0, min_open=True),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for an answer.",
)
# The folder of an operator holds all keys, that of a monitor just its own.
watching_keys = keys_of("monitor", "operator")
operating_keys = keys_of("operator", "monitor")
