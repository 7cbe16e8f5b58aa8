"""The demo itself, `examples/sort.toml` with fewer steps, with its buffer or trainer killed.

Only its warm start is left out: the policy begins at random, which changes nothing about the data
path.
"""

import shutil
from pathlib import Path

import pytest
from fakes.commands import call
from fakes.whole_runs import UMBRA, Up

EXAMPLES = Path(__file__).parents[2] / "examples"
BATCH = 8 * 32  # of the run file
STEPS = 20


@pytest.fixture(scope="module")
def sort(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("demo")
    sizes = ("--prompts", "512", "--heldout", "64", "--demos", "1")
    for command in (("make-model", "sort/base"), ("make-task", "sort", "--out", "sort", *sizes)):
        call([*UMBRA, *command], cwd=where, check=True)
    return where / "sort"


@pytest.fixture
def project(tmp_path: Path, sort: Path) -> Path:
    shutil.copy(EXAMPLES / "sort.toml", tmp_path / "run.toml")
    (tmp_path / "sort").symlink_to(sort)
    return tmp_path


def test_the_demo_outlives_its_buffer_and_so_do_its_evaluations(up: Up) -> None:
    evals = ("eval.every=10", "eval.at_ends=false", "eval.mode=concurrent", "eval.samples=64")
    process = up(f"run.steps={STEPS}", *evals)
    process.broker()
    for killed_at in (4, 13):
        process.until_step(killed_at)
        process.kill("buffer")
    summary = process.finish()
    assert summary["restarts"] == {"buffer": 2}
    assert [row["step"] for row in process.steps()] == list(range(1, STEPS + 1))
    assert summary["ledger"]["trained"] == STEPS * BATCH
    assert not any(summary["ledger"]["in_flight"].values())
    assert summary["staleness"]["max"] <= 3
    found = summary["evals"]
    assert [one["version"] // 10 for one in found] == [1, 2]
    assert all(one["answered"] == one["samples"] == 64 for one in found), found
