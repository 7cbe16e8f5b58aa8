"""`kill -9` of trainers and of whole runs: the learned weights are the same to the bit.

Two runs never see the same samples, so the run that is killed is given the batches of one that was
not: a copy of its folder, whose store has kept them all, is resumed from step 1.
"""

import re
import shutil
import socket
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from fakes.slowness import limit, until
from fakes.whole_runs import ORPHANS_S, Up, leftovers
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


def weights(directory: Path) -> dict[str, bytes]:
    tensors = load_file(directory / "model.safetensors")
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def copy_from_the_beginning(folder: Path, parent: Path) -> Path:
    """The run again, with its batches and nothing learned; its buffer waits for a trainer."""
    copy = parent / folder.name
    shutil.copytree(folder, copy)
    for name in ("checkpoints", "model"):
        shutil.rmtree(copy / name)
    for name in ("summary.json", "metrics.jsonl"):
        (copy / name).unlink()
    with closing(LmdbStore(copy / "store")) as store:
        now = msgspec.msgpack.decode(store.get("now"))
        now[list(SURVIVING).index("finished")] = ""
        store.put("now", msgspec.msgpack.encode(now))
        store.commit()
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
    log = (folder / "logs" / "buffer.log").read_text()
    port = int(re.findall(r"broker tcp://127\.0\.0\.1:(\d+)", log)[-1])
    with socket.create_server(("127.0.0.1", port)):
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
    first.until_step(10)
    folder = first.run_dir
    first.until(lambda: any(folder.glob("checkpoints/step-*")), "a checkpoint")
    first.popen.kill()
    first.popen.wait()
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


def test_a_run_whose_trainer_has_two_ranks(up: Up) -> None:
    process = up("trainer.ranks=2", "run.steps=5", quiet_s=150.0)
    summary = process.finish()
    assert summary["ledger"]["trained"] == 5 * 16
    assert summary["mismatch_k3_on_policy"] < 1e-6, "the generators have the ranks' weights"


@pytest.mark.timeout(300)
def test_an_adapter_survives_every_restart(up: Up) -> None:
    """1. A run publishes an adapter alone. 2. Generator, hub and trainer are killed, one by one.

    Result: each is started again. The generator joins late and gets the newest version on its own
    base, the hub gets it again, and the trainer goes on from its checkpoint.
    """
    keys = ("trainer.lora_rank=2", "trainer.learning_rate=0.02", "trainer.lora_publish=adapter")
    steps = 60  # so many that it is under way still when its trainer is killed: 24 take two seconds
    process = up(*keys, f"run.steps={steps}", "checkpoint.every=1", quiet_s=150.0)
    services = ("generator-0", "weight-hub", "trainer")
    for name in services:
        process.until_step(len(process.steps()) + 2)
        process.kill(name)
    summary = process.finish()
    assert summary["restarts"] == dict.fromkeys(services, 1)
    assert summary["ledger"]["trained"] == steps * 16
    assert summary["mismatch_k3_on_policy"] < 1e-6
