"""The count of samples by state: `issued = trained + ended + in flight`, always."""

from __future__ import annotations

from collections import Counter

from umbra.proto.bounds import one_line
from umbra.proto.errors import UmbraError
from umbra.proto.records import Ledger

IN_FLIGHT = ("queued", "generating", "scoring", "ready", "training")
MOVES = frozenset(
    {
        ("queued", "generating"),  # leased
        ("generating", "queued"),  # returned, expired, or its holder is gone
        ("generating", "ready"),  # answered
        ("queued", "ready"),  # answered late, but before anyone else took it
        ("generating", "scoring"),  # answered, and to be scored
        ("queued", "scoring"),  # the same, late
        ("scoring", "ready"),
        ("scoring", "queued"),  # of an evaluation that begins again
        ("ready", "queued"),  # the same
        ("ready", "scoring"),  # scored with a sample that is generated again
        ("ready", "training"),  # handed to the trainer
    }
)


class LedgerError(UmbraError):
    """The balance broke: a bug in Umbra."""


class RunningLedger:
    def __init__(self) -> None:
        self.issued = 0
        self.trained = 0
        self.ended: Counter[str] = Counter()
        self._in_flight: dict[str, int] = dict.fromkeys(IN_FLIGHT, 0)

    @property
    def live(self) -> int:
        """Return the count of samples that were or will be trained: issued - ended."""
        return self.issued - self.ended.total()

    def count(self, state: str) -> int:
        return self._in_flight[state]

    def issue(self, samples: int) -> None:
        self.issued += samples
        self._in_flight["queued"] += samples

    def move(self, source: str, target: str) -> None:
        """Move one sample; raises LedgerError if there is no such move."""
        if (source, target) not in MOVES:
            raise LedgerError(f"a sample cannot go from {source} to {target}")
        self._in_flight[source] -= 1
        self._in_flight[target] += 1

    def train(self) -> None:
        self._in_flight["training"] -= 1
        self.trained += 1

    def untrain(self) -> None:
        """Move one trained sample back into training: the trainer lost its step."""
        self.trained -= 1
        self._in_flight["training"] += 1

    def restore(self, state: str) -> None:
        self._in_flight[state] += 1

    def end(self, source: str, reason: str) -> None:
        self._in_flight[source] -= 1
        self.ended[reason] += 1

    def check(self) -> None:
        balance = self.live - self.trained - sum(self._in_flight.values())
        if balance or min(self._in_flight.values()) < 0:
            raise LedgerError(f"the ledger is out of balance by {balance}: {self.snapshot()}")

    def snapshot(self) -> Ledger:
        return Ledger(
            issued=self.issued,
            trained=self.trained,
            ended=dict(self.ended),
            in_flight=dict(self._in_flight),
        )


PREFIX = "failed: "
REASONS_KEPT = 50  # distinct ones that are counted by name; others share one count
REASON_CHARS = 100
OTHER = PREFIX + "other"


def count_reason(counters: Counter[str], reason: str) -> bool:
    """Count a failure under `failed: <reason>`; True if it is the first of its name.

    Reasons come from user code, so any number of different texts is possible.
    """
    key = PREFIX + (one_line(reason[:REASON_CHARS]) or "no reason given")
    if key not in counters:
        reasons = sum(name.startswith(PREFIX) for name in counters)
        if reasons >= REASONS_KEPT:
            key = OTHER
    counters[key] += 1
    return counters[key] == 1
