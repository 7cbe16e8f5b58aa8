"""Output of a first run: what goes on meanwhile, what its figures mean, and what to type next."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from umbra.deploy.run.live import PlainView, View


def test_lines_say_what_goes_on_once_and_details_now_and_then(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    view = PlainView(every_s=5.0, clock=lambda: now[0])

    def said(*calls: Sequence[str]) -> list[str]:
        for call in calls:
            view.doing(*call)
        return capsys.readouterr().out.splitlines()

    assert said(["warm start"], ["warm start", "step 1/9"]) == ["warm start ..."]
    now[0] = 5.0
    assert said(["warm start", "step 4/9"], ["warm start", "step 5/9"]) == ["  step 4/9"]
    now[0] = 10.0
    assert said(["warm start", "step 4/9"]) == []
    assert said(["starting"], ["starting"]) == ["starting ..."]
    View().doing("anything")
    assert capsys.readouterr().out == ""
