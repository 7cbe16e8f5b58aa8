"""`umbra buffer --repair`: what a repair drops, and how the run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fakes.broker_world import World, trajectory

from umbra.proto.errors import UsageError
from umbra.proto.messages import LeaseBatch, Nack
from umbra.services.buffer.command import command as buffer_command
from umbra.services.buffer.store.api import StoreError
from umbra.services.buffer.store.log import LogStore
from umbra.services.buffer.store.repair import repair
from umbra.services.buffer.store.segments import segment_path


class StoredWorld(World):
    """A world whose store is on the disk."""

    folder: Path

    def __init__(self, folder: Path, **buffer: Any) -> None:
        super().__init__(durable=True, **buffer)
        self.folder = folder
        self.open()

    def open(self) -> None:
        """The buffer starts on what is on the disk."""
        self.log = LogStore(self.folder)
        self.store = self.log  # type: ignore[assignment]
        self.broker = self._make_broker()

    def stop(self) -> None:
        """The buffer ends."""
        self.broker.save()
        self.log.commit()
        self.log.close()


def trained(folder: Path) -> StoredWorld:
    """The first batch is committed; what follows from that is not yet written."""
    world = StoredWorld(folder)
    world.join("generator", "a")
    world.join("trainer", "trainer")
    world.produce("a", 0)
    world.log.commit()
    world.batch(1)
    world.log.commit()
    world.commit(1)
    return world


def worked(folder: Path) -> StoredWorld:
    world = trained(folder)
    world.log.commit()
    world.lease("a", 3, 1)
    return world


def mend(world: StoredWorld) -> str:
    return "\n".join(repair(world.folder))


def test_no_store_is_a_mistake_of_the_user(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no store"):
        repair(tmp_path / "none")


def test_a_sound_store_needs_no_repair(tmp_path: Path) -> None:
    world = worked(tmp_path / "store")
    world.stop()
    assert "nothing to repair" in mend(world)


def test_a_repair_says_what_it_drops_and_the_run_goes_on(tmp_path: Path) -> None:
    """One trajectory that was ready is destroyed: its sample is generated again."""
    world = worked(tmp_path / "store")
    world.stop()
    path = segment_path(world.folder, 0)
    data = bytearray(path.read_bytes())
    at = data.index(b"t/s-5")
    data[at + 40] ^= 255
    path.write_bytes(data)
    with pytest.raises(StoreError, match="umbra buffer --repair --store"):
        LogStore(world.folder)
    text = mend(world)
    assert text.count("dropped") == 1 and "wrong checksum" in text
    assert (tmp_path / "store.damaged").is_dir()
    world.open()
    ledger = world.pool.ledger.snapshot()
    assert ledger.balance == 0 and not ledger.ended
    assert world.pool.samples["s-5"].state == "queued"
    (task,) = world.lease("a", 1, 1)
    assert task.sample_id == "s-5"
    assert world.submit("a", trajectory(task, 1)).accepted == 1
    world.stop()
    world.open()  # the mark of the repair is gone, and all fits together
    world.stop()


def test_what_a_repair_cannot_save_ends_as_lost(tmp_path: Path) -> None:
    world = worked(tmp_path / "store")
    world.stop()
    path = segment_path(world.folder, 0)
    data = bytearray(path.read_bytes())
    at = data.rindex(b"g/g-3")
    data[at + 1] ^= 255
    path.write_bytes(data)
    mend(world)
    world.open()
    ledger = world.pool.ledger.snapshot()
    assert ledger.balance == 0 and ledger.ended == {"lost": 2}
    world.stop()


def spoil(folder: Path, key: bytes, occurrence: int = -1) -> None:
    """Flip a bit in a record of `key`, the newest if nothing is said."""
    path = segment_path(folder, 0)
    data = bytearray(path.read_bytes())
    places = [n for n in range(len(data)) if data.startswith(key, n)]
    data[places[occurrence] + len(key) + 2] ^= 4
    path.write_bytes(data)


def test_the_samples_that_a_repair_costs_are_named_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = worked(tmp_path / "store")
    world.stop()
    spoil(world.folder, b"t/s-5")
    spoil(world.folder, b"g/g-3")
    spoil(world.folder, b"t/s-0")  # of a committed batch that is kept
    text = mend(world)
    assert text.count("wrong checksum") == 2  # two of them lie side by side
    world.open()
    assert "sample s-5 starts again: its trajectory is gone" in caplog.text
    assert "group g-3 ends as lost, with s-6, s-7: its state is gone" in caplog.text
    assert "the batches up to step 1 cannot be handed out again" in caplog.text
    assert world.pool.ledger.snapshot().balance == 0
    world.stop()
    world.open()  # what was mended once is sound
    assert world.pool.samples["s-5"].oldest is None
    world.join("trainer", "trainer", "trainer-2")
    reply = world.ask("trainer", LeaseBatch(step=1, wait_s=0))
    assert isinstance(reply, Nack)  # its trajectories are not all there
    world.stop()


def test_a_batch_that_was_handed_out_goes_on_without_what_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = worked(tmp_path / "store")
    for task in list(world.pool.held["a"].values()):
        world.submit("a", trajectory(world.pool.task(task), 1))
    assert len(world.batch(2).trajectories) == 4
    world.log.commit()
    world.stop()
    spoil(world.folder, b"t/s-5")
    mend(world)
    world.open()
    assert "the batch of step 2 goes on without 1 groups" in caplog.text
    assert len(world.batch(2).trajectories) == 2
    world.stop()
    world.open()
    world.commit(2)
    assert world.pool.ledger.snapshot().balance == 0
    world.stop()


def test_the_counts_are_made_up_for_from_what_they_counted(tmp_path: Path) -> None:
    """The newest record of the counts is spoilt: those of one commit before do not know of it."""
    world = trained(tmp_path / "store")
    world.stop()
    spoil(world.folder, b"now")
    text = mend(world)
    assert "wrong checksum" in text
    world.open()
    ledger = world.pool.ledger.snapshot()
    assert (world.broker.batches.version, ledger.trained, ledger.balance) == (1, 4, 0)
    world.stop()


def test_the_buffer_itself_repairs_its_store(tmp_path: Path) -> None:
    world = worked(tmp_path / "store")
    world.stop()
    result = CliRunner().invoke(buffer_command, ["--repair", "--run-dir", str(tmp_path)])
    assert (result.exit_code, result.output) == (0, result.output)
    assert "nothing to repair" in result.output
    spoil(world.folder, b"t/s-5")
    result = CliRunner().invoke(buffer_command, ["--repair", "--store", str(world.folder)])
    assert result.exit_code == 0
    assert "wrong checksum" in result.output
    with pytest.raises(UsageError, match="--repair needs a store"):
        CliRunner().invoke(buffer_command, ["--repair"], catch_exceptions=False)
