"""Every error Umbra raises on purpose, and the exit code a process ends with.

    UmbraError                 6  something broke inside Umbra
    |-- UsageError             2  the user's mistake: names flag, file or key, and the remedy
    |-- StartupError           3  the process could not start (port taken, broker unreachable)
    |-- RejectedError          4  a peer refused us (protocol version, role, run)
    |-- PeerLostError          5  a peer that we need went away
    |   `-- DeadlineError      5  a wait ended without its answer: names what it waited for
    |-- DivergedError          7  training has gone wrong, and would again
    |   `-- MismatchError      7  generator and trainer do not agree on equal weights
    |-- FailedSamplesError     8  too many samples fail for reasons of their own
    `-- WireError              6  bytes that are not a valid message
        `-- LimitError         6  a message above its size limits

Exit code 0 means done, 1 is left to Python itself; a signal is re-raised so that the shell sees it.
"""

from __future__ import annotations

EXIT_DONE = 0
ERROR_PREFIX = "umbra: error: "  # before the sentence that a process ends with

# What decoders of JSON and MessagePack raise for bytes that are none: msgspec's errors are
# ValueErrors, and so is a text that is not UTF-8; what is nested too deeply is neither.
UNREADABLE: tuple[type[Exception], ...] = (ValueError, RecursionError)


class UmbraError(Exception):
    """Base of all errors raised on purpose; `exit_code` is what the process ends with."""

    exit_code = 6


class UsageError(UmbraError):
    """The user's mistake, in one sentence that names what to change."""

    exit_code = 2


class StartupError(UmbraError):
    """The process could not start."""

    exit_code = 3


class RejectedError(UmbraError):
    """A peer understood us and said no; `code` is the machine-readable reason of its Nack."""

    exit_code = 4

    def __init__(self, reason: str, *, code: str = "rejected") -> None:
        super().__init__(reason)
        self.code = code


class PeerLostError(UmbraError):
    """A peer that this process cannot work without went away."""

    exit_code = 5


class DeadlineError(PeerLostError):
    """A wait ended without its answer."""


class DivergedError(UmbraError):
    """Training has gone wrong, and would again from the same checkpoint."""

    exit_code = 7


class FailedSamplesError(UmbraError):
    """Too many samples fail for reasons that depend on their content: what is left is biased."""

    exit_code = 8


class MismatchError(DivergedError):
    """A generator gives other log-probabilities than the trainer with the same weights."""


class WireError(UmbraError):
    """Bytes that are not a valid message; `path` is the field at fault, `code` the kind."""

    def __init__(self, reason: str, *, path: str = "$", code: str = "malformed") -> None:
        super().__init__(reason)
        self.path = path
        self.code = code


class LimitError(WireError):
    """A message above its size limits."""

    def __init__(self, reason: str, *, path: str = "$") -> None:
        super().__init__(reason, path=path, code="too_large")
