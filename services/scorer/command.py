"""`umbra scorer`."""

from __future__ import annotations

from umbra.services.process.command import ServiceContext, service_command


def _run(context: ServiceContext) -> int:
    from umbra.services.scorer.service import run  # may bring torch

    return run(context)


command = service_command("scorer", _run)
