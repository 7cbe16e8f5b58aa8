"""An engine that hangs in the middle of a run, in each way there is: it is named, and ends."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes.slowness import seconds
from integration import test_up
from integration.test_up import UpProcess, up

from umbra.services.monitor.client import StatusClient

__all__ = ["up"]  # a fixture

HANGING = Path(__file__).parents[1] / "programs" / "hanging"
STEPS = 24  # so that every life of the generator has something to do
STALL_S = seconds(6.0)
DEADLINE_S = seconds(240.0)  # the generator starts four times
SETTINGS = (
    f"run.steps={STEPS}",
    f"buffer.stall_s={STALL_S / 10:g}",
)


@pytest.fixture
def hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Has the engine hang in the given ways, once in each; the file has those to come."""

    def plan(*kinds: str) -> Path:
        file = tmp_path / "hang-plan"
        file.write_text("\n".join(kinds))
        monkeypatch.setattr(test_up, "DEADLINE_S", DEADLINE_S)
        monkeypatch.setenv("HANG_PLAN", str(file))
        monkeypatch.syspath_prepend(str(HANGING))
        return file

    return plan


def told(process: UpProcess, client: StatusClient) -> str:
    """What the status says will happen, once it names what is stuck.

    Others who wait for the generator may be named before it.
    """
    seen: list[str] = []

    def named() -> bool:
        stuck = [one for one in client.status(DEADLINE_S).stuck if one.holder == "generator-0"]
        seen.extend(one.action for one in stuck if one.what.startswith("no progress in"))
        return bool(seen)

    process.until(named, "a word about it")
    return seen[0]


def ended(process: UpProcess, *codes: int) -> str:
    """The run goes on to its end and has lost nothing; its generator ended so; its log."""
    summary = process.finish()
    assert process.popen.returncode == 0, process.lines
    assert summary["restarts"] == {"generator-0": len(codes)}
    ledger = summary["ledger"]
    assert (ledger["trained"], ledger["balance"]) == (STEPS * 16, 0)
    lines = [line for line in process.lines if "generator-0 ended" in line]
    assert [re.findall(r"exit code (\d+)", line) for line in lines] == [[str(c)] for c in codes]
    return (process.run_dir / "logs" / "generator-0.log").read_text()


@pytest.mark.e2e
@pytest.mark.fault
@pytest.mark.timeout(360)
def test_a_stuck_engine_is_named_and_then_ends(
    hang: Callable[..., Path], up: Callable[..., UpProcess]
) -> None:
    """1. An engine hangs. 2. The status names it; it ends. 3. The next one hangs in another way.

    Result: exit code 6 each time, and nothing is lost.
    """
    kinds = {"blocks": "decoding", "idles": "decoding", "loads": "loading version"}
    plan = hang(*kinds)
    process = up(*SETTINGS)
    with StatusClient(process.broker()) as client:
        for left in reversed(range(len(kinds))):
            process.until(lambda n=left: len(plan.read_text().splitlines()) == n, "a hang")
            assert told(process, client) == "it ends itself after 10 x buffer.stall_s"
    text = ended(process, 6, 6, 6)
    said = re.findall(r"umbra: error: the torch engine is stuck: no token for .*", text)
    for line, doing in zip(said, kinds.values(), strict=True):
        assert f"while it was {doing}" in line
        assert f"requests in flight ({STALL_S:g} s = 10 x buffer.stall_s)" in line
    assert text.count("most recent call first") >= len(kinds)


@pytest.mark.e2e
@pytest.mark.fault
@pytest.mark.timeout(360)
def test_what_nobody_foresaw_ends_as_well(
    hang: Callable[..., Path], up: Callable[..., UpProcess]
) -> None:
    """1. The engine raises. 2. What receives weights does. 3. Nobody gets the interpreter."""
    hang("fails", "receives", "holds")
    text = ended(up(*SETTINGS), 6, 6, 1)
    assert "umbra: error: the generator failed: KeyError: 7" in text
    assert "umbra: error: the receiver of weights failed: KeyError: 7" in text
    assert "Timeout (0:" in text
