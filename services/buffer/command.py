"""`umbra buffer`."""

from __future__ import annotations

import click

from umbra.services.process.command import Alternative, ServiceContext, service_command

NEW_ADDRESS = "--new-address"


def _run(context: ServiceContext) -> int:
    from umbra.services.buffer.service import serve

    return serve(context)


def _repair(context: ServiceContext) -> int:
    from umbra.services.buffer.service import store_directory
    from umbra.services.buffer.store.repair import repair

    for line in repair(store_directory(context)):
        click.echo(line)
    return 0


command = service_command(
    "buffer",
    _run,
    alternative=Alternative(
        "repair", "Mend a damaged store, say exactly what is dropped, and end.", _repair
    ),
    options=[
        click.Option(
            [NEW_ADDRESS],
            is_flag=True,
            help="Port * picks a new port; nobody knows that of this run's last buffer any more.",
        )
    ],
)
