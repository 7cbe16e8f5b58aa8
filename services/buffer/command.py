"""`umbra buffer`."""

from __future__ import annotations

import click

from umbra.services.modeling.run_file import load_service
from umbra.services.process.command import ServiceContext, service_command

NEW_ADDRESS = "--new-address"


def _run(context: ServiceContext) -> int:
    from umbra.services.buffer.service import serve

    return serve(context)


command = service_command(
    "buffer",
    _run,
    load=load_service,
    options=[
        click.Option(
            [NEW_ADDRESS],
            is_flag=True,
            help="With port *, bind a new port instead of that of this run's last buffer.",
        )
    ],
)
