"""Who counts as silent: one whose count stands still, however long a wait takes."""

from __future__ import annotations

from umbra.services.trainer.distributed.heartbeat import Silence


def test_silence_is_counted_from_the_last_sign_of_life() -> None:
    silence = Silence(now=100.0)
    assert silence.heard(0, 103.0) == 0.0, "the first thing that is heard"
    assert silence.heard(0, 110.0) == 7.0
    assert silence.heard(1, 111.0) == 0.0
    assert silence.heard(1, 111.5) == 0.5
    assert silence.heard(5000, 9000.0) == 0.0, "a wait of hours"
