"""An engine that hangs in the middle of a run, in each way there is: it is named, and ends."""

from collections.abc import Callable
from pathlib import Path

import pytest
from fakes.slowness import seconds
from integration.test_up import UpProcess, up

from umbra.services.monitor.client import StatusClient

__all__ = ["up"]  # a fixture

HANGING = Path(__file__).parents[1] / "programs" / "hanging"
STEPS = 12
STALL_S = seconds(6.0)
SETTINGS = (
    f"run.steps={STEPS}",
    f"buffer.stall_s={STALL_S / 4:g}",
    f"generator.stall_s={STALL_S:g}",
)


@pytest.fixture
def hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Has the engine hang once in the given way; the file is gone when it does."""

    def plan(kind: str) -> Path:
        file = tmp_path / "hang-plan"
        file.write_text(kind)
        monkeypatch.setenv("HANG_PLAN", str(file))
        monkeypatch.syspath_prepend(str(HANGING))
        return file

    return plan


def ended(process: UpProcess) -> str:
    """The run goes on to its end and has lost nothing; how its generator ended."""
    summary = process.finish()
    assert process.popen.returncode == 0, process.lines
    assert summary["restarts"] == {"generator-0": 1}
    ledger = summary["ledger"]
    assert (ledger["trained"], ledger["balance"]) == (STEPS * 16, 0)
    (line,) = [line for line in process.lines if "generator-0 ended" in line]
    return line + (process.run_dir / "logs" / "generator-0.log").read_text()


@pytest.mark.e2e
@pytest.mark.fault
@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", ["blocks", "idles", "loads"])
def test_a_stuck_engine_is_named_and_then_ends(
    kind: str, hang: Callable[[str], Path], up: Callable[..., UpProcess]
) -> None:
    """1. An engine hangs. 2. The status names it. Result: exit code 6, and nothing is lost."""
    plan = hang(kind)
    process = up(*SETTINGS)
    with StatusClient(process.broker()) as client:
        process.until(lambda: not plan.exists(), "a hang")
        seen: list[str] = []

        def named() -> bool:
            status = client.status(20.0)
            seen.extend(s.action for s in status.stuck if s.what.startswith("no progress in"))
            return bool(seen)

        process.until(named, "a word about it")
    assert seen[0] == "it ends itself after generator.stall_s"
    text = ended(process)
    assert "generator-0 ended (exit code 6)" in text
    doing = "loading version" if kind == "loads" else "decoding"
    assert "umbra: error: the torch engine is stuck: no token for" in text
    assert f"while it was {doing}" in text
    assert f"requests in flight (generator.stall_s = {STALL_S:g})" in text
    assert "most recent call first" in text


@pytest.mark.e2e
@pytest.mark.fault
@pytest.mark.timeout(240)
def test_one_that_holds_the_interpreter_ends_as_well(
    hang: Callable[[str], Path], up: Callable[..., UpProcess]
) -> None:
    hang("holds")
    process = up(*SETTINGS)
    text = ended(process)
    assert "generator-0 ended (exit code 1)" in text
    assert "Timeout (0:" in text


@pytest.mark.e2e
@pytest.mark.fault
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("kind", "what"), [("fails", "the generator"), ("receives", "the receiver of weights")]
)
def test_what_nobody_foresaw_ends_with_a_sentence(
    kind: str, what: str, hang: Callable[[str], Path], up: Callable[..., UpProcess]
) -> None:
    hang(kind)
    text = ended(up(*SETTINGS))
    assert "generator-0 ended (exit code 6)" in text
    assert f"umbra: error: {what} failed: KeyError: 7" in text
