"""Which version the engine may load, and when its memory may be written."""

from __future__ import annotations

from umbra.services.weights.manifest import build_manifest
from umbra.services.weights.receiver import StagedVersion, Staging

LAYOUT = build_manifest([("w", "F32", (4,))], 128)


def version(epoch: int) -> StagedVersion:
    return StagedVersion(epoch * 10, epoch, LAYOUT, memoryview(bytearray(LAYOUT.total_bytes)))


def offered(staging: Staging, epoch: int) -> StagedVersion:
    """A version that is staged and committed by the hub."""
    staged = version(epoch)
    staging.stage(staged)
    assert staging.commit(epoch)
    return staged


def test_a_version_is_taken_only_when_it_is_staged_and_committed() -> None:
    staging = Staging()
    assert not staging.commit(1)
    staged = version(1)
    staging.stage(staged)
    assert staging.take() is None
    assert staging.commit(1)
    assert staging.take() is staged
    assert staging.take() is None


def test_memory_is_not_written_while_the_engine_loads_it() -> None:
    staging = Staging()
    staged = offered(staging, 1)
    assert staging.has_room
    assert staging.take() is staged
    assert not staging.has_room
    staging.release(version(1))  # not the one that is loaded
    assert not staging.has_room
    staging.release(staged)
    assert staging.has_room


def test_an_aborted_version_is_forgotten() -> None:
    staging = Staging()
    offered(staging, 1)
    staging.abort(1)
    assert staging.take() is None
    offered(staging, 2)
    staging.abort(1)  # late
    assert staging.take() is not None


def test_a_load_under_way_is_not_aborted() -> None:
    staging = Staging()
    staged = offered(staging, 1)
    assert staging.take() is staged
    staging.abort(1)
    assert not staging.has_room


def test_messages_of_other_epochs_change_nothing() -> None:
    staging = Staging()
    staging.stage(version(2))
    assert not staging.commit(1)
    assert staging.commit(2)
    assert staging.take() is not None


def test_a_version_that_is_written_over_is_not_committed() -> None:
    staging = Staging()
    offered(staging, 1)
    staging.clear()
    assert staging.take() is None
    assert not staging.commit(1)
