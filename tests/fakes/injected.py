"""`umbra` whose processes of one service are changed before they begin."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import NoReturn

from umbra import cli
from umbra.services.process import fork_server, supervisor
from umbra.services.process.fork_server import ForkServer


def run(service: str, prepare: Callable[[], object]) -> NoReturn:
    """Run `umbra` with the words of this command; its forks for `service` call `prepare` first."""
    started = fork_server._run

    def prepared(words: Sequence[str]) -> NoReturn:
        if service in words:
            prepare()
        started(words)

    fork_server._run = prepared
    # On a machine with a GPU as well.
    setattr(ForkServer, "where_useful", lambda environ: closing(ForkServer(environ)))  # noqa: B010
    supervisor.FIRST_S = 0.1
    raise SystemExit(cli.main(sys.argv[1:]))
