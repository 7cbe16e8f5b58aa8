"""`umbra runs`: every run in a folder, with what became of it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from umbra.deploy.commands.runs import RECENT, command
from umbra.deploy.run_folder import RunFolder
from umbra.proto.errors import UsageError


def made(name: str, begun: float, *, steps: int = 0, code: int | None = None) -> RunFolder:
    """The folder of a run that began `begun` seconds after the epoch, in `runs/` here."""
    folder = RunFolder(Path("runs").resolve() / name)
    folder.logs.mkdir(parents=True)
    folder.config.write_text(json.dumps({"run": {"name": "mine", "steps": 100}}))
    os.utime(folder.config, (begun, begun))
    rows = [{"kind": "step", "step": n, "reward/mean": n / 100} for n in range(1, steps + 1)]
    text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    folder.metrics.write_text(text + '{"kind":"step","st')
    if code is not None:
        ended = {"exit_code": code, "exit_reason": "because", "accuracy_after": 0.75}
        folder.summary.write_text(json.dumps(ended))
    return folder


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def listed() -> dict[str, dict[str, Any]]:
    done = CliRunner().invoke(command, ["--json"])
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in done.output.splitlines()]
    return {row["id"]: row for row in rows}


def test_what_became_of_each_oldest_first() -> None:
    made("well", 30.0, steps=25, code=0)
    made("badly", 10.0, steps=2, code=7)
    made("stopped", 20.0, steps=3, code=130)
    made("killed", 50.0)
    made("drained", 60.0, code=143)
    going = made("going", 40.0, steps=1)
    with going.held():
        found = listed()
    assert {name: run["state"] for name, run in found.items()} == {
        "badly": "failed", "stopped": "interrupted", "well": "ended", "going": "under way",
        "killed": "interrupted", "drained": "interrupted",
    }  # fmt: skip
    assert list(found) == ["badly", "stopped", "well", "going", "killed", "drained"]
    well = found["well"]
    assert (well["steps"], well["goal"], well["accuracy"]) == (25, 100, 0.75)
    assert well["reward"] == pytest.approx(sum(range(26 - RECENT, 26)) / RECENT / 100)
    assert (well["name"], well["reason"]) == ("mine", "because")
    assert found["killed"]["reward"] is None
    size = sum(path.stat().st_size for path in Path("runs/well").rglob("*") if path.is_file())
    assert well["bytes"] == size


@pytest.mark.timeout(30)
def test_what_others_put_there_neither_ends_nor_hangs_the_list() -> None:
    """Damaged files, pipes in the place of files, and names that steer a terminal."""
    for index, text in enumerate(
        (
            "null",
            "[1]",
            '{"exit_code": "x", "accuracy_after": "high"}',
            '{"accuracy_after": NaN}',
            "{",
            '{"accuracy_after": 1' + "0" * 400 + "}",
        )
    ):
        made(f"odd-{index}", index, code=0).summary.write_text(text)
    rows = '{"kind":"step","reward/mean":"x"}\n{"kind":"step","step":[],"reward/mean":1e999}\n'
    made("rows", 10.0).metrics.write_text(rows)
    made("goal", 11.0).config.write_text('{"run": {"steps": "many", "name": 7}}')
    piped = made("piped", 12.0)
    for path in (piped.summary, piped.metrics, piped.path / ".lock"):
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    made("\x1b[31mred", 13.0, code=0)
    (Path("runs") / "pipe").mkdir()
    os.mkfifo(Path("runs") / "pipe" / "config.json")
    late = made("late", 14.0, code=0)
    os.utime(late.config, (0, 2**40))
    assert len(listed()) == 11
    done = CliRunner().invoke(command, [])
    assert done.exit_code == 0, done.exception
    assert "\x1b" not in done.output and "\\x1b[31mred" in done.output


@pytest.mark.timeout(30)
@pytest.mark.parametrize("text", ['{"kind":"rollout"}\n', '{"kind":"x"}\n', '{"kind":[]}\n', None])
def test_rollouts_that_no_run_has_written_are_refused(text: str | None) -> None:
    folder = made("odd", 1.0)
    if text is None:
        os.mkfifo(folder.samples)
    else:
        folder.samples.write_text(text)
    with pytest.raises(UsageError, match=r"samples\.jsonl (holds what no run|cannot be read)"):
        CliRunner().invoke(command, ["odd", "--samples", "1"], catch_exceptions=False)
