"""Every error Umbra raises on purpose, and the exit code a process ends with.

    UmbraError                 6  something broke inside Umbra
    |-- UsageError             2  the user's mistake: names flag, file or key, and the remedy
    |-- StartupError           3  the process could not start (port taken, broker unreachable)
    |-- RejectedError          4  a peer refused us (protocol version, role, run)
    |-- PeerLostError          5  a peer that we need went away
    |   `-- DeadlineError      5  a wait ended without its answer: names what it waited for
    |-- DivergedError          7  training has gone wrong, and would again
    |   `-- MismatchError      7  generator and trainer do not agree on equal weights
    |-- FailedSamplesError     8  too many samples fail for reasons of their own: the rest is biased
    `-- WireError              6  bytes that are not a valid message
        `-- LimitError         6  a message above its size limits

Exit code 0 means done, 1 is left to Python itself; a signal is re-raised so that the shell sees it.

A thread whose owner looks at what became of it (a `Future` that is asked for its result, say) hands
its errors over. Any other runs under `ends_process`: what it raises ends the process at once, as
`kill -9` would, which every service is made for; whoever supervises it starts another.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import wraps
from threading import Thread
from typing import NoReturn, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

EXIT_DONE = 0
ERROR_PREFIX = "umbra: error: "  # before the sentence that a process ends with

# Exceptions of decoders for bytes that are not JSON or MessagePack: msgspec's errors and invalid
# UTF-8 are ValueErrors, nesting that is too deep is a RecursionError.
UNREADABLE: tuple[type[Exception], ...] = (ValueError, RecursionError)

log = logging.getLogger(__name__)


class UmbraError(Exception):
    exit_code = 6


class UsageError(UmbraError):
    exit_code = 2


class StartupError(UmbraError):
    exit_code = 3


class RejectedError(UmbraError):
    """A peer understood us and said no; `code` is the machine-readable reason of its Nack."""

    exit_code = 4

    def __init__(self, reason: str, *, code: str = "rejected") -> None:
        super().__init__(reason)
        self.code = code


class PeerLostError(UmbraError):
    exit_code = 5


class DeadlineError(PeerLostError):
    pass


class DivergedError(UmbraError):
    exit_code = 7


class FailedSamplesError(UmbraError):
    exit_code = 8


class MismatchError(DivergedError):
    pass


class WireError(UmbraError):
    """Bytes that are not a valid message; `path` is the field at fault, `code` the kind."""

    def __init__(self, reason: str, *, path: str = "$", code: str = "malformed") -> None:
        super().__init__(reason)
        self.path, self.code = path, code


class LimitError(WireError):
    def __init__(self, reason: str, *, path: str = "$") -> None:
        super().__init__(reason, path=path, code="too_large")


def foreseen(error: BaseException, what: str) -> UmbraError:
    """Return `error` as an UmbraError that says that `what` failed; log the rest."""
    if isinstance(error, UmbraError):
        return error
    log.error("%s failed", what, exc_info=error)
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    name = type(error).__name__
    return UmbraError(f"{what} failed: {name}: {text}" if text else f"{what} failed: {name}")


@contextmanager
def named_errors(what: str) -> Generator[None]:
    """Turn errors of the block into UmbraErrors that say that `what` failed; see `foreseen`.

    An import that is missing passes: the command says which package to install.
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
    """Wrap `call` so that its errors end the process; `what` names it in the message."""

    @wraps(call)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - nobody else would hear of it
            end_process(foreseen(error, what))

    return guarded


def service_thread(main: Callable[[], object], name: str) -> Thread:
    """Return a daemon thread, not started yet, whose errors end the process."""
    return Thread(target=ends_process(main, f"the thread {name}"), name=name, daemon=True)
