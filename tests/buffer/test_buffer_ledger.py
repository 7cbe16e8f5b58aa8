"""The ledger balances, and says so loudly when it does not."""

from __future__ import annotations

import pytest

from umbra.services.buffer.samples.ledger import LedgerError, RunningLedger


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
