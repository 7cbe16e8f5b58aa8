"""Serves an OpenEnv app on a free port, which it prints, for the process that started it."""

from __future__ import annotations

import importlib
import inspect
import os
import signal
import socket
import sys
from typing import Any

from umbra.services.process.parent import die_with_parent


def main(target: str) -> None:
    """Serve `target`, "module:app": an ASGI app, or a function that makes it."""
    die_with_parent(signal.SIGKILL)
    sys.path.append(os.getcwd())
    # The server is of the Python environment that the app is in.
    uvicorn: Any = importlib.import_module("uvicorn")
    module, _, name = target.partition(":")
    app = getattr(importlib.import_module(module), name or "app")
    if inspect.isfunction(app):
        app = app()
    end = socket.socket()
    end.bind(("127.0.0.1", 0))
    end.listen(2048)  # who knows the port may come, and waits until it is served
    os.write(1, f"{end.getsockname()[1]}\n".encode())
    os.dup2(2, 1)  # what the app prints goes where our parent's prints go
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    server.run(sockets=[end])
