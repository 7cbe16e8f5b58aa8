"""Which of two buffers a receiver may write, load and give back."""

from __future__ import annotations

from umbra.services.weights.staging import Candidate, Staging


def offered(staging: Staging, epoch: int) -> Candidate:
    """A version that is staged and committed by the hub."""
    candidate = staging.prepare(epoch, version=epoch * 10)
    staging.staged(epoch)
    assert staging.commit(epoch)
    return candidate


def test_a_version_is_taken_only_when_it_is_staged_and_committed() -> None:
    staging = Staging(2)
    staging.prepare(1, 10)
    assert staging.take() is None
    assert not staging.commit(1)
    staging.staged(1)
    assert staging.take() is None
    assert staging.commit(1)
    taken = staging.take()
    assert taken is not None
    assert (taken.epoch, taken.version) == (1, 10)
    assert staging.take() is None
    assert staging.ignored == 1


def test_the_buffer_that_is_loaded_is_not_staged_into() -> None:
    staging = Staging(2)
    offered(staging, 1)
    loading = staging.take()
    assert loading is not None
    for epoch in (2, 3, 4):
        assert offered(staging, epoch).buffer != loading.buffer
        assert staging.take() is None  # one at a time
    staging.release(loading)
    newest = staging.take()
    assert newest is not None
    assert newest.epoch == 4
    assert staging.prepare(5, 50).buffer == loading.buffer


def test_an_aborted_version_is_forgotten() -> None:
    staging = Staging(2)
    offered(staging, 1)
    staging.abort(1)
    assert staging.take() is None
    offered(staging, 2)
    staging.abort(1)  # late
    assert staging.take() is not None


def test_what_is_being_loaded_is_not_aborted() -> None:
    staging = Staging(2)
    offered(staging, 1)
    loading = staging.take()
    assert loading is not None
    staging.abort(1)
    assert staging.prepare(2, 20).buffer != loading.buffer


def test_messages_of_other_epochs_change_nothing() -> None:
    staging = Staging(2)
    staging.prepare(2, 20)
    staging.staged(1)
    assert not staging.commit(2)
    staging.staged(2)
    assert not staging.commit(1)
    assert staging.commit(2)
    staging.release(Candidate(2, 20, 0))  # not the one that is out
    assert staging.take() is not None
    assert staging.take() is None
