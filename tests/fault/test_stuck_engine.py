"""An engine that hangs in the middle of a run, in each way there is: it is named, and ends."""

import re
from pathlib import Path

import pytest
from fakes.slowness import limit, seconds
from fakes.whole_runs import Up, UpProcess

from umbra.services.monitor.client import StatusClient

HANGING = Path(__file__).parents[1] / "programs/hanging_up.py"
STEPS = 20  # so that every life of the generator has something to do
QUIET_S = 240.0  # the generator starts four times
STALL_S = 3.0


def told(process: UpProcess, client: StatusClient) -> str:
    """Return the action in the status, once it names the stuck process.

    Others who wait for the generator may be named before it.
    """
    seen: list[str] = []

    def named() -> bool:
        stuck = [one for one in client.status(limit(QUIET_S)).stuck if one.holder == "generator-0"]
        seen.extend(one.action for one in stuck if one.what.startswith("no progress in"))
        return bool(seen)

    process.until(named, "a word about it")
    return seen[0]


@pytest.mark.timeout(400)
def test_a_stuck_engine_is_named_and_then_ends(tmp_path: Path, up: Up) -> None:
    """1. An engine hangs. 2. The status names it; it ends. 3. The next one hangs while it loads.
    4. The one after it lets nobody have the interpreter.

    Result: exit code 6, or that of the interpreter's own watchdog, and nothing is lost.
    """
    kinds = {"blocks": "decoding", "loads": "loading version"}
    plan = tmp_path / "plan"
    plan.write_text("\n".join([*kinds, "holds"]))
    stall_s = seconds(STALL_S)
    settings = (f"run.steps={STEPS}", f"buffer.stall_s={stall_s / 10:g}")
    process = up(*settings, quiet_s=QUIET_S, program=("-P", HANGING, plan))
    with StatusClient(process.broker()) as client:
        for left in (2, 1):
            process.until(lambda n=left: len(plan.read_text().splitlines()) == n, "a hang")
            assert told(process, client) == "it ends itself after 10 x buffer.stall_s"
    summary = process.finish()
    assert summary["restarts"] == {"generator-0": 3}
    assert summary["ledger"]["trained"] == STEPS * 16
    lines = [line for line in process.lines if "generator-0 ended" in line]
    assert [re.findall(r"exit code (\d+)", line) for line in lines] == [["6"], ["6"], ["1"]]
    text = process.log("generator-0")
    said = re.findall(r"umbra: error: the torch engine is stuck: no token for .*", text)
    for line, doing in zip(said, kinds.values(), strict=True):
        assert f"while it was {doing}" in line
        assert f"({stall_s:g} s = 10 x buffer.stall_s)" in line
    assert text.count("most recent call first") >= len(kinds)
    assert "Timeout (0:" in text
