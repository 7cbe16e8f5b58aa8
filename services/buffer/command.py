"""`umbra buffer`."""

from __future__ import annotations

from umbra.services.runtime.command import ServiceContext, service_command


def _run(context: ServiceContext) -> int:
    from umbra.services.buffer.service import serve

    return serve(context)


command = service_command("buffer", _run)
