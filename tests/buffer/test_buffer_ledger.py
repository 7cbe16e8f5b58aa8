"""The ledger balances, and says so loudly when it does not."""

from __future__ import annotations

import pytest

from umbra.services.buffer.samples.ledger import LedgerError, RunningLedger


def test_every_move_keeps_the_balance() -> None:
    ledger = RunningLedger()
    ledger.issue(3)
    for source, target in [
        ("queued", "generating"),
        ("generating", "ready"),
        ("ready", "training"),
    ]:
        ledger.move(source, target)
        ledger.check()
    ledger.train()
    ledger.end("queued", "stale")
    ledger.check()
    snapshot = ledger.snapshot()
    assert (snapshot.issued, snapshot.trained, snapshot.ended) == (3, 1, {"stale": 1})
    assert snapshot.in_flight == {
        "queued": 1,
        "generating": 0,
        "scoring": 0,
        "ready": 0,
        "training": 0,
    }
    assert ledger.live == 2 and snapshot.balance == 0


@pytest.mark.parametrize(
    ("source", "target"), [("training", "queued"), ("ready", "generating"), ("queued", "training")]
)
def test_a_move_that_there_is_not_is_refused(source: str, target: str) -> None:
    with pytest.raises(LedgerError, match=f"from {source} to {target}"):
        RunningLedger().move(source, target)


def test_a_broken_balance_is_an_internal_error() -> None:
    ledger = RunningLedger()
    ledger.issue(1)
    ledger.issued += 1
    with pytest.raises(LedgerError, match="out of balance by 1") as caught:
        ledger.check()
    assert caught.value.exit_code == 6


def test_a_negative_count_is_an_internal_error() -> None:
    ledger = RunningLedger()
    ledger.issue(1)
    ledger.move("generating", "ready")
    with pytest.raises(LedgerError):
        ledger.check()
