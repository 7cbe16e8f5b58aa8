"""How a thread ends its process: with a sentence and an exit code, never by being gone in silence.

A thread whose owner looks at what became of it (a `Future` that is asked for its result, say) hands
its errors over. Any other runs under `ends_process`: what it raises ends the process at once, as
`kill -9` would, which every service is made for; whoever supervises it starts another.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from threading import Thread
from typing import NoReturn, ParamSpec, TypeVar

from umbra.proto.errors import ERROR_PREFIX, UmbraError

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger(__name__)


def foreseen(error: BaseException, what: str) -> UmbraError:
    """`error` as one of ours, whose sentence says that `what` has failed; the log has the rest."""
    if isinstance(error, UmbraError):
        return error
    log.error("%s failed", what, exc_info=error)
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    name = type(error).__name__
    return UmbraError(f"{what} failed: {name}: {text}" if text else f"{what} failed: {name}")


@contextmanager
def named_errors(what: str) -> Iterator[None]:
    """Whatever the block raises is one of ours and says that `what` has failed; see `foreseen`.

    An import that is missing passes: the command says which package to install.

    Raises:
        UmbraError: the block has failed.
    """
    try:
        yield
    except (UmbraError, ModuleNotFoundError):
        raise
    except Exception as error:
        raise foreseen(error, what) from error


def end_process(error: UmbraError) -> NoReturn:
    """Say the sentence of `error` and end at once with its exit code, from any thread."""
    with suppress(Exception):  # nobody may be there to read it
        print(f"{ERROR_PREFIX}{error}", file=sys.stderr, flush=True)
    os._exit(error.exit_code)


def ends_process(call: Callable[P, T], what: str) -> Callable[P, T]:
    """`call`, whose errors end the process; `what` names it in the sentence."""

    @wraps(call)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - nobody else would hear of it
            end_process(foreseen(error, what))

    return guarded


def service_thread(main: Callable[[], object], name: str) -> Thread:
    """A daemon thread, not started yet, whose errors end the process."""
    return Thread(target=ends_process(main, f"the thread {name}"), name=name, daemon=True)
