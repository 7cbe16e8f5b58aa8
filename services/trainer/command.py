"""`umbra trainer`."""

from __future__ import annotations

from umbra.services.runtime.command import ServiceContext, service_command


def _run(context: ServiceContext) -> int:
    # Here and not above: `umbra trainer --help` need not wait for torch.
    from umbra.services.trainer.service import run

    return run(context)


command = service_command("trainer", _run)
