"""`umbra trainer`."""

from __future__ import annotations

import click

from umbra.services.process.command import ServiceContext, service_command
from umbra.services.trainer.distributed.launch import launch


def _run(context: ServiceContext) -> int:
    with launch(context) as listener:
        # Here and not above: `umbra trainer --help` need not wait for torch.
        from umbra.services.trainer.service import run

        return run(context, listener)


command = service_command(
    "trainer",
    _run,
    options=[
        click.Option(
            ["--node-rank"],
            type=click.IntRange(0),
            envvar="UMBRA_NODE_RANK",
            help="Which of trainer.nodes hosts this is: 0, where rank 0 is, to nodes - 1.",
        )
    ],
)
