"""The demo itself, `examples/sort.toml` with fewer steps, with its buffer or trainer killed.

Only its warm start is left out: the policy begins at random, which changes nothing about the data
path.
"""

import json
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes.fixtures import FIXTURE_DEADLINE_S
from fault.test_run_kill import kill
from integration.test_up import UMBRA, UpProcess, up

__all__ = ["up"]  # a fixture

EXAMPLES = Path(__file__).parents[2] / "examples"
BATCH = 8 * 32  # of the run file
STEPS = 20


@pytest.fixture(scope="module")
def sort(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The task, and a random model as its base."""
    where = tmp_path_factory.mktemp("demo")
    sizes = ("--prompts", "512", "--heldout", "64", "--demos", "1")
    for command in (("make-model", "sort/base"), ("make-task", "sort", "--out", "sort", *sizes)):
        subprocess.run(
            [*UMBRA, *command],
            cwd=where,
            check=True,
            capture_output=True,
            timeout=FIXTURE_DEADLINE_S,
        )
    return where / "sort"


@pytest.fixture
def project(tmp_path: Path, sort: Path) -> Path:
    """A folder with the demo's run file and what it names."""
    shutil.copy(EXAMPLES / "sort.toml", tmp_path / "run.toml")
    (tmp_path / "sort").symlink_to(sort)
    return tmp_path


def rows(process: UpProcess, kind: str) -> list[dict[str, Any]]:
    """What the run has measured."""
    lines = (process.run_dir / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


@pytest.mark.e2e
@pytest.mark.fault
@pytest.mark.timeout(180)
def test_the_demo_outlives_its_buffer_and_so_do_its_evaluations(
    up: Callable[..., UpProcess],
) -> None:
    evals = ("eval.every=10", "eval.mode=concurrent", "eval.samples=64")
    process = up(f"run.steps={STEPS}", *evals, flags=("--no-eval",))
    process.broker()
    for killed_at in (4, 13):
        process.until(lambda at=killed_at: len(process.steps()) >= at, f"step {killed_at}")
        kill(process, "buffer")
    summary = process.finish()
    assert process.popen.returncode == 0, process.lines
    assert summary["restarts"] == {"buffer": 2}
    assert [row["step"] for row in process.steps()] == list(range(1, STEPS + 1))
    ledger = summary["ledger"]
    assert (ledger["trained"], ledger["balance"]) == (STEPS * BATCH, 0)
    assert not any(ledger["in_flight"].values())
    assert summary["staleness"]["max"] <= 3
    found = summary["evals"]
    assert [one["version"] // 10 for one in found] == [1, 2]
    assert all(one["answered"] == one["samples"] == 64 for one in found), found


@pytest.mark.e2e
@pytest.mark.fault
@pytest.mark.timeout(180)
def test_the_demos_trainer_gets_the_same_batches_again(
    up: Callable[..., UpProcess],
) -> None:
    """Its bytes are told by their checksum, which the buffer notes whenever it hands one out."""
    process = up(f"run.steps={STEPS}", "checkpoint.every=0", flags=("--no-eval",))
    process.broker()
    process.until(lambda: len(process.steps()) >= 8, "step 8")
    kill(process, "trainer")
    summary = process.finish()
    assert process.popen.returncode == 0, process.lines
    assert summary["restarts"] == {"trainer": 1}
    order = [row["step"] for row in rows(process, "handed_out")]
    again = order.index(1, 1)
    assert order[:again] == list(range(1, again + 1)) and again >= 8
    assert order[again:] == list(range(1, STEPS + 1))
    digests: defaultdict[int, set[str]] = defaultdict(set)
    for row in rows(process, "handed_out"):
        digests[row["step"]].add(row["digest"])
    assert all(len(found) == 1 for found in digests.values())
    assert len({next(iter(found)) for found in digests.values()}) == STEPS
    ledger = summary["ledger"]
    assert ledger["trained"] == STEPS * BATCH
    assert ledger["balance"] == 0
