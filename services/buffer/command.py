"""`umbra buffer`."""

from __future__ import annotations

from umbra.services.modeling.run_file import load_service
from umbra.services.process.command import ServiceContext, service_command


def _run(context: ServiceContext) -> int:
    from umbra.services.buffer.service import serve

    return serve(context)


command = service_command("buffer", _run, load=load_service)
