"""The count of samples by state: `issued = trained + ended + in flight`, always."""

from __future__ import annotations

from collections import Counter

from umbra.proto.bounds import one_line
from umbra.proto.errors import UmbraError
from umbra.proto.records import Ledger

IN_FLIGHT = ("queued", "generating", "scoring", "ready", "training")
MOVES = {
    "queued": {"generating", "scoring", "ready"},  # leased; answered late, while nobody has it
    "generating": {"queued", "scoring", "ready"},  # taken back; answered
    "scoring": {"queued", "ready"},  # of an evaluation that begins again; scored
    "ready": {"queued", "scoring", "training"},  # the same; of a group to score again; in a batch
}
PREFIX = "failed: "
REASONS_KEPT = 50  # distinct ones that are counted by name; others share one count
REASON_CHARS = 100


class LedgerError(UmbraError):
    """The balance broke: a bug in Umbra."""


class RunningLedger:
    def __init__(self) -> None:
        self.issued = 0
        self.trained = 0
        self.ended: Counter[str] = Counter()
        self.in_flight: dict[str, int] = dict.fromkeys(IN_FLIGHT, 0)

    @property
    def live(self) -> int:
        """Return the count of samples that were or will be trained: issued - ended."""
        return self.issued - self.ended.total()

    def issue(self, samples: int) -> None:
        self.issued += samples
        self.in_flight["queued"] += samples

    def move(self, source: str, target: str) -> None:
        """Move one sample; raises LedgerError if there is no such move."""
        if target not in MOVES.get(source, ()):
            raise LedgerError(f"a sample cannot go from {source} to {target}")
        self.in_flight[source] -= 1
        self.in_flight[target] += 1

    def train(self, samples: int = 1) -> None:
        """Count samples in training as trained; -1 takes one back, whose step the trainer lost."""
        self.in_flight["training"] -= samples
        self.trained += samples

    def end(self, source: str, reason: str) -> None:
        self.in_flight[source] -= 1
        self.ended[reason] += 1

    def check(self) -> None:
        balance = self.live - self.trained - sum(self.in_flight.values())
        if balance or min(self.in_flight.values()) < 0:
            raise LedgerError(f"the ledger is out of balance by {balance}: {self.snapshot()}")

    def snapshot(self) -> Ledger:
        ended, in_flight = dict(self.ended), dict(self.in_flight)
        return Ledger(issued=self.issued, trained=self.trained, ended=ended, in_flight=in_flight)


def count_reason(counters: Counter[str], reason: str) -> bool:
    """Count a failure under `failed: <reason>`; True if it is the first of its name.

    Reasons come from user code, so any number of different texts is possible.
    """
    key = PREFIX + (one_line(reason[:REASON_CHARS]) or "no reason given")
    if key not in counters and sum(name.startswith(PREFIX) for name in counters) >= REASONS_KEPT:
        key = PREFIX + "other"
    counters[key] += 1
    return counters[key] == 1
