"""`kill -9` of trainers and of whole runs: what is learned is the same to the bit.

Two runs never see the same samples, so the run that is killed is given the batches of one that was
not: a copy of its folder, whose store has kept them all, is gone on with from step 1.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from fakes.slowness import seconds
from integration.test_up import DEADLINE_S, UMBRA, UpProcess, leftovers
from safetensors.torch import load_file

from umbra.services.buffer.store import LmdbStore
from umbra.services.config import CheckpointConfig
from umbra.services.trainer.checkpoints.export import export_checkpoint
from umbra.services.trainer.checkpoints.folder import CheckpointFolder

STEPS = 20
SETTINGS = (
    f"run.steps={STEPS}",
    "trainer.deterministic=true",
    "checkpoint.every=4",
    "checkpoint.keep=99",  # so that the store keeps all batches
)
KILLING = Path(__file__).parents[1] / "programs" / "killing"
PLANS = {
    "before the commit, while writing, before the name": ["trained 5", "writing 8", "written 12"],
    "after the commit, after the name, at the end": ["committed 8", "named 12", "written 20"],
}
Weights = dict[str, bytes]


def weights(directory: Path) -> Weights:
    tensors = load_file(directory / "model.safetensors")
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def up(project: Path, *words: str, plan: Path | None = None) -> UpProcess:
    """`umbra up` with these words."""
    path = os.pathsep.join([*([str(KILLING)] if plan else []), *sys.path])
    popen = subprocess.Popen(
        [*UMBRA, "up", *words],
        cwd=project,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, **({"KILL_PLAN": str(plan)} if plan else {})},
    )
    return UpProcess(popen, project)


@pytest.fixture
def run(project: Path) -> Iterator[Callable[..., UpProcess]]:
    """Starts runs, of which nothing is left after the test."""
    started: list[UpProcess] = []

    def start(*words: str, plan: Path | None = None) -> UpProcess:
        started.append(up(project, *words, plan=plan))
        return started[-1]

    yield start
    for process in started:
        if process.popen.poll() is None:
            process.popen.kill()
        process.popen.communicate()
    deadline = time.monotonic() + seconds(10)
    while (left := leftovers(project)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


def settings(*words: str) -> list[str]:
    return [part for word in words for part in ("--set", word)]


def port_of_buffer(folder: Path) -> int:
    """Where it listened last."""
    log = (folder / "logs" / "buffer.log").read_text()
    return int(re.findall(r"broker tcp://127\.0\.0\.1:(\d+)", log)[-1])


def copy_from_the_beginning(folder: Path, parent: Path) -> Path:
    """The run again, with its batches and nothing learned; its buffer waits for a trainer."""
    copy = parent / folder.name
    shutil.copytree(folder, copy)
    for name in ("checkpoints", "model"):
        shutil.rmtree(copy / name)
    for name in ("summary.json", "metrics.jsonl"):
        (copy / name).unlink()
    store = LmdbStore(copy / "store")
    now = msgspec.msgpack.decode(store.get("now"))
    store.put("now", msgspec.msgpack.encode({**now, "finished": ""}))
    store.commit()
    store.close()
    return copy


@pytest.mark.e2e
@pytest.mark.fault
@pytest.mark.timeout(450)
def test_a_killed_trainer_learns_the_same(
    project: Path, run: Callable[..., UpProcess], tmp_path: Path
) -> None:
    """1. A run ends well. 2. Another process gets the port of its buffer. 3. The same batches, with
    a trainer that is killed at three moments. Result: the same weights, bit for bit; whichever the
    moments."""
    whole = run("run.toml", *settings(*SETTINGS))
    whole.finish()
    assert whole.popen.returncode == 0, whole.lines
    folder = whole.run_dir
    expected = weights(folder / "model")
    stranger = socket.create_server(("127.0.0.1", port_of_buffer(folder)))
    for number, (name, plan) in enumerate(PLANS.items()):
        again = copy_from_the_beginning(folder, tmp_path / f"again-{number}")
        (tmp_path / "plan").write_text("\n".join(plan))
        process = run(str(again), plan=tmp_path / "plan")
        output, errors = process.popen.communicate(timeout=3 * DEADLINE_S)  # it starts four times
        assert process.popen.returncode == 0, (name, output, errors)
        assert (tmp_path / "plan").read_text() == "", name
        assert output.count("trainer ended (killed by SIGKILL)") == 3, (name, output)
        assert weights(again / "model") == expected, name
        log = (again / "logs" / "trainer.log").read_text()
        assert "going on from the checkpoint of step" in log
        kept = CheckpointFolder(again / "checkpoints", CheckpointConfig())
        assert kept.steps() == [4, 8, 12, 16, 20]
        assert weights(export_checkpoint(kept.of(STEPS), tmp_path / f"hf-{number}")) == expected
    stranger.close()


@pytest.mark.e2e
@pytest.mark.fault
@pytest.mark.timeout(450)
def test_a_run_that_was_killed_as_a_whole_goes_on(
    project: Path, run: Callable[..., UpProcess], tmp_path: Path
) -> None:
    """1. `umbra up` and all its processes are killed. 2. `umbra up FOLDER`. Result: it ends well,
    with the ledger balanced, and the store drops what the checkpoints cover."""
    steps = 3 * STEPS  # so many that it is not done before it is killed
    first = run("run.toml", *settings(f"run.steps={steps}", "checkpoint.every=4"))
    first.until(lambda: first_has(first, 10), "step 10, and a checkpoint")
    first.popen.send_signal(signal.SIGKILL)
    first.popen.wait()
    folder = first.run_dir
    deadline = time.monotonic() + seconds(30)
    while any(str(folder) in line for line in leftovers(project)) and time.monotonic() < deadline:
        if all(line.startswith("/dev/shm") for line in leftovers(project)):
            break  # memory is left of a hub that was killed; whoever goes on removes it
        time.sleep(0.1)
    checkpoints = CheckpointFolder(folder / "checkpoints", CheckpointConfig())
    newest = checkpoints.steps()[-1]
    second = run(str(folder))
    summary = second.finish()
    assert second.popen.returncode == 0, second.lines
    assert summary["steps"] == steps
    assert (summary["ledger"]["trained"], summary["ledger"]["balance"]) == (steps * 16, 0)
    log = (folder / "logs" / "trainer.log").read_text()
    assert f"going on from the checkpoint of step {newest}\n" in log
    kept = checkpoints.steps()
    assert len(kept) == 2 and kept[-1] == steps
    third = run(str(folder))
    _, errors = third.popen.communicate(timeout=DEADLINE_S)
    assert third.popen.returncode == 2
    assert "has reached its end: its model is" in errors


def first_has(process: UpProcess, steps: int) -> bool:
    """Whether it has made so many steps, and a checkpoint: of which ones the disk decides."""
    if not any((process.project / "runs").glob("*")) or len(process.steps()) < steps:
        return False
    return any((process.run_dir / "checkpoints").glob("step-*"))
