"""`kill -9` of trainers and of whole runs: the learned weights are the same to the bit.

Two runs never see the same samples, so the run that is killed is given the batches of one that was
not: a copy of its folder, whose store has kept them all, is resumed from step 1.
"""

import re
import shutil
import socket
from pathlib import Path

import msgspec
import pytest
from fakes.slowness import limit, until
from fakes.whole_runs import ORPHANS_S, Up, UpProcess, leftovers
from safetensors.torch import load_file

from umbra.services.buffer.state import SURVIVING
from umbra.services.buffer.store import LmdbStore
from umbra.services.config import CheckpointConfig
from umbra.services.trainer.checkpoints.folder import CheckpointFolder, export_checkpoint

STEPS = 12
SETTINGS = (
    f"run.steps={STEPS}",
    "trainer.deterministic=true",
    "checkpoint.every=2",
    "checkpoint.keep=99",  # so that the store keeps all batches
)
KILLED = Path(__file__).parents[1] / "programs/killed_up.py"
# After commits, before them, while checkpoints are written, before and after they get their names.
MOMENTS = ("trained 3", "committed 4", "writing 4", "written 6", "named 8", "written 12")
Weights = dict[str, bytes]


def weights(directory: Path) -> Weights:
    tensors = load_file(directory / "model.safetensors")
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def port_of_buffer(folder: Path) -> int:
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
    now[list(SURVIVING).index("finished")] = ""
    store.put("now", msgspec.msgpack.encode(now))
    store.commit()
    store.close()
    return copy


@pytest.mark.timeout(450)
def test_a_killed_trainer_learns_the_same(up: Up, tmp_path: Path) -> None:
    """1. A run ends well. 2. Another process gets the port of its buffer. 3. The same batches, with
    a trainer that is killed at each moment. Result: the same weights, bit for bit."""
    whole = up(*SETTINGS)
    whole.finish()
    folder = whole.run_dir
    expected = weights(folder / "model")
    again = copy_from_the_beginning(folder, tmp_path / "again")
    plan = tmp_path / "plan"
    plan.write_text("\n".join(MOMENTS))
    with socket.create_server(("127.0.0.1", port_of_buffer(folder))):
        process = up(run=again, program=("-P", KILLED, plan))
        output, errors = process.popen.communicate(timeout=limit(180.0))
    assert process.popen.returncode == 0, (output, errors)
    assert plan.read_text() == ""
    assert output.count("trainer ended (killed by SIGKILL)") == len(MOMENTS), output
    assert weights(again / "model") == expected
    assert "going on from the checkpoint of step" in (again / "logs" / "trainer.log").read_text()
    kept = CheckpointFolder(again / "checkpoints", CheckpointConfig())
    assert kept.steps() == [*range(2, STEPS + 1, 2)]
    assert weights(export_checkpoint(kept.of(STEPS), tmp_path / "hf")) == expected


@pytest.mark.timeout(450)
def test_a_run_that_was_killed_as_a_whole_goes_on(project: Path, up: Up) -> None:
    """1. `umbra up` and all its processes are killed. 2. `umbra up FOLDER`. Result: it ends well,
    with the ledger balanced, and the store drops what the checkpoints cover."""
    steps = 60  # so many that it is not done before it is killed
    first = up(f"run.steps={steps}", "checkpoint.every=4")
    first.until(lambda: has_checkpoint(first, 10), "step 10, and a checkpoint")
    first.popen.kill()
    first.popen.wait()
    folder = first.run_dir
    # Memory may be left of a hub that was killed; whoever goes on removes it.
    living = lambda: [one for one in leftovers(project) if not one.startswith("/dev/shm")]  # noqa: E731
    until(lambda: not living(), living, quiet_s=ORPHANS_S)
    checkpoints = CheckpointFolder(folder / "checkpoints", CheckpointConfig())
    newest = checkpoints.steps()[-1]
    second = up(run=folder)
    summary = second.finish()
    assert summary["steps"] == steps
    assert summary["ledger"]["trained"] == steps * 16
    assert f"going on from the checkpoint of step {newest}\n" in second.log("trainer")
    kept = checkpoints.steps()
    assert len(kept) == 2 and kept[-1] == steps
    third = up(run=folder)
    _, errors = third.popen.communicate(timeout=limit(60.0))
    assert third.popen.returncode == 2
    assert "has reached its end: its model is" in errors


def has_checkpoint(process: UpProcess, steps: int) -> bool:
    """True if it has made so many steps, and a checkpoint: of which ones the disk decides."""
    return len(process.steps()) >= steps and any(process.run_dir.glob("checkpoints/step-*"))
