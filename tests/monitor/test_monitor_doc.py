"""docs/operate.md lists the figures and warnings of a run by the names that the code emits."""

from __future__ import annotations

import re
from pathlib import Path

from fakes.broker_world import world
from fakes.looks import look

from umbra.deploy.files.run_folder import RunFolder
from umbra.deploy.report.summary import RunOutcome, summarise
from umbra.proto.errors import FailedSamplesError
from umbra.proto.messages import Rates
from umbra.services.buffer.health import NAMES, SHARES
from umbra.services.config import BufferConfig
from umbra.services.monitor.web.prometheus import prometheus_text
from umbra.services.reporting.figures import PHASES

DOC = (Path(__file__).resolve().parents[2] / "docs" / "operate.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    """The text under a heading."""
    (part,) = re.findall(rf"^###? {re.escape(title)}\n(.*?)(?=^##|\Z)", DOC, re.DOTALL | re.M)
    return part


def names(title: str) -> list[str]:
    """The names in the first column of its table."""
    cells = re.findall(r"^\| (`.+?) \|", section(title), re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def test_rates_and_shares() -> None:
    assert names("Recent rates") == list(Rates.__struct_fields__)
    assert names("Shares") == list(SHARES)
    health = world().broker.status(0.0).health
    assert set(health) == {*SHARES, *(f"{name}/run" for name in SHARES)}


def test_staleness() -> None:
    assert set(names("Staleness")) == set(world().broker.status(0.0).staleness)


def test_warnings_and_the_failures_that_end_a_run() -> None:
    assert names("Warnings") == list(NAMES)
    text = section("Warnings")
    assert f"`buffer.max_failed_share` ({BufferConfig().max_failed_share:g})" in text
    assert f"the exit code is {FailedSamplesError.exit_code}" in text


def test_pushes() -> None:
    assert names("Pushes") == list(PHASES)


def test_the_summary(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "run")
    summary = summarise(folder, RunOutcome(exit_reason="x", exit_code=1, total_s=0.0))
    assert sorted(names("The summary")) == sorted(summary)


def test_prometheus() -> None:
    told = re.findall(rb"^# HELP (\S+)", prometheus_text(look()), re.MULTILINE)
    assert names("Prometheus") == [name.decode() for name in told]
