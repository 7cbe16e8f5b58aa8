"""`umbra scorer`."""

from __future__ import annotations

import click

from umbra.services.modeling.run_file import load_service
from umbra.services.process.command import ServiceContext, service_command


def _run(context: ServiceContext) -> int:
    from umbra.services.scorer.service import run  # may bring torch

    return run(context)


command = service_command(
    "scorer",
    _run,
    load=load_service,
    options=[
        click.Option(
            ["--stage"],
            type=click.Choice(["reward", "ref_logp", "logp"]),
            default="reward",
            show_default=True,
            help="What this process computes.",
        )
    ],
)
