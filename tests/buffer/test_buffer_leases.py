"""One queue of leases: what each role may ask for, and how much of it one reply brings."""

from itertools import count

import msgspec
import pytest
from fakes.broker_world import EndlessPrompts, trajectory, world

from umbra.proto.access import LEASE_BYTES
from umbra.proto.messages import LeaseTasks, Message, Nack, RenewLeases, SubmitResults, TaskLeases
from umbra.proto.records import Score
from umbra.services.buffer.samples import groups
from umbra.services.buffer.samples.ledger import LedgerError, RunningLedger
from umbra.services.prompts import Prompt


def test_leases_are_filled_by_bytes_as_well_as_by_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 3 MiB: a reply fits into a frame, and the rest comes with the next one."""
    numbers = count(1)

    def draw(_prompts: EndlessPrompts) -> Prompt:
        return Prompt(str(next(numbers)), {"prompt": "x" * (3 << 20)})

    monkeypatch.setattr(EndlessPrompts, "__next__", draw)
    run = world(group_size=8, batch_groups=16)
    ask = LeaseTasks(capacity=512, version=0, wait_s=0)
    reply = run.get("a", ask, TaskLeases)
    assert len(msgspec.msgpack.encode(reply)) <= groups.FILL_BYTES + (4 << 20) < LEASE_BYTES
    assert len(reply.tasks) == 22
    assert len(run.lease("a", 512, 0)) == 22


def test_a_row_beyond_a_reply_is_leased_and_scored_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "FILL_BYTES", 10)
    run = world(stages=["ref_logp"])
    run.join("scorer", "r")
    assert [len(run.produce(name, 0, 8)) for name in "abab"] == [1, 1, 1, 1]
    assert len(run.to_score("r", "ref_logp")) == 1
    monkeypatch.undo()
    assert len(run.to_score("r", "ref_logp")) == 3


def test_a_role_has_its_own_tasks_and_results() -> None:
    run = world(stages=["ref_logp"])
    run.join("scorer", "r")
    (task, other) = run.lease("a", 2, 0)
    assert not run.submit("a", trajectory(task, 0)).refused
    made = trajectory(other, 0)
    score = Score(sample_id=task.sample_id, attempt=1, logprobs=b"")
    refused: list[tuple[str, Message]] = [
        ("a", LeaseTasks(kind="ref_logp", capacity=1, wait_s=0)),
        ("r", LeaseTasks(capacity=1, version=0, wait_s=0)),
        ("a", SubmitResults(scores=[score])),
        ("r", SubmitResults(trajectories=[made])),
        ("r", SubmitResults(trajectories=[made], scores=[score])),
        ("r", SubmitResults(capacity=4)),
    ]
    for name, body in refused:
        assert run.get(name, body, Nack).code == "wrong_role", body
    assert run.broker.counters["wrong_role"] == len(refused)
    assert run.pool.samples[other.sample_id].holder == "a"


def test_a_scorer_cannot_replace_what_it_scores_nor_gets_samples_with_its_ack() -> None:
    run = world(stages=["ref_logp"])
    run.join("scorer", "r")
    (task,) = run.lease("a", 1, 0)
    made = trajectory(task, 0)
    run.submit("a", made)
    (scoring,) = run.to_score("r", "ref_logp", 1)
    assert scoring.attempt == task.attempt
    other = trajectory(task, 0, 0)
    assert run.get("r", RenewLeases(partials=[other]), TaskLeases).lost == [task.sample_id]
    assert run.pool.journal.trajectory(task.sample_id) == made
    score = Score(sample_id=task.sample_id, attempt=1, logprobs=made.logprobs)
    ack = run.get("r", SubmitResults(scores=[score], capacity=8), TaskLeases)
    assert (ack.accepted, ack.tasks) == (1, [])


@pytest.mark.parametrize(
    ("source", "target"), [("training", "queued"), ("ready", "generating"), ("queued", "training")]
)
def test_a_move_that_there_is_not_is_refused(source: str, target: str) -> None:
    with pytest.raises(LedgerError, match=f"from {source} to {target}"):
        RunningLedger().move(source, target)


def test_a_broken_balance_is_an_internal_error() -> None:
    ledger = RunningLedger()
    ledger.issue(1)
    ledger.issued += 1
    with pytest.raises(LedgerError, match="out of balance by 1") as caught:
        ledger.check()
    assert caught.value.exit_code == 6
