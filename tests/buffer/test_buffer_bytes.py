"""A trajectory and its scores stay the very bytes in which they came, up to the trainer."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from fakes.broker_world import World, trajectory, world

from umbra.proto.codec import Encoder, decode
from umbra.proto.errors import WireError
from umbra.proto.messages import BatchLease, LeaseBatch, SubmitResults, TaskLeases
from umbra.proto.records import Score, Task, pack_float32
from umbra.services.buffer.effects import Reply
from umbra.services.buffer.samples import journal
from umbra.services.buffer.store import StoreError

LOGPROBS = pack_float32([-0.25, -0.75])
FOUND: Mapping[str, dict[str, Any]] = {  # by the stages, of each sample
    "reward": {"reward": 0.5, "reward_parts": {"late": 0.5}},
    "ref_logp": {"logprobs": LOGPROBS},
}


def unusual(record: msgspec.Struct) -> bytes:
    """The same in other bytes than we would write: last key first, the integer 1 in nine bytes."""
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(record))
    pairs = [
        msgspec.msgpack.encode(key)
        + (b"\xcf" + bytes(7) + b"\1" if value == 1 and type(value) is int else pack(value))
        for key, value in reversed(fields.items())
    ]
    return b"\xde" + len(pairs).to_bytes(2, "big") + b"".join(pairs)


def pack(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


def submit(run: World, name: str, field: str, pieces: list[bytes]) -> TaskLeases:
    frame = pack({field: list(map(msgspec.Raw, pieces))})
    body = msgspec.msgpack.decode(frame, type=SubmitResults)
    return run.get(name, body, TaskLeases, frame=frame)


def scored(**said: Any) -> tuple[World, list[Task]]:
    """Two samples whose trajectories and scores came in unusual bytes; `said` of trajectories."""
    run = world(stages=["reward", "ref_logp"], batch_groups=1, durable=True)
    run.join("scorer", "r")
    tasks = run.lease("a", 2, 0)
    pieces = [unusual(trajectory(task, 0, **said)) for task in tasks]
    assert submit(run, "a", "trajectories", pieces).accepted == 2
    for stage, values in FOUND.items():
        scores = [
            unusual(Score(sample_id=task.sample_id, attempt=task.attempt, **values))
            for task in run.to_score("r", stage)
        ]
        assert not submit(run, "r", "scores", scores).refused
    return run, tasks


def test_what_came_is_what_is_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(journal, "_decode_trajectory")  # nobody needs to look at it again
    said: dict[str, Any] = {"reward": 0.25, "reward_parts": {}}
    run, tasks = scored(**said)
    made = [trajectory(task, 0, **said) for task in tasks]
    pieces = list(map(unusual, made))
    assert pieces[0] != pack(made[0])
    request = run.request("trainer", LeaseBatch(step=1, wait_s=0))
    (lease,) = (one.body for one in run.broker.handle(request, run.now) if isinstance(one, Reply))
    assert all(piece in pack(lease) for piece in pieces)
    body = decode(Encoder("buffer", "b").encode(lease)[1]).body
    assert isinstance(body, BatchLease)
    assert body.trajectories == made
    assert [one.reward for one in body.scored()] == [0.75, 0.75]
    assert [one.reward_parts for one in body.scored()] == [{"late": 0.5}] * 2
    assert [one.ref_logprobs for one in body.scored()] == [LOGPROBS] * 2
    mixed = {stage: scores[::-1] for stage, scores in body.scores.items()}
    with pytest.raises(WireError, match="of other samples"):
        msgspec.structs.replace(body, scores=mixed).scored()


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("trajectory", {"made_up": [[]]}), ("span", {"made_up": 1}), ("sampling", {"made_up": 1})],
)
def test_nothing_is_kept_that_was_not_looked_at(kind: str, changes: dict[str, Any]) -> None:
    (task, _) = world().lease("a", 2, 0)
    plain = msgspec.to_builtins(trajectory(task, 0), builtin_types=(bytes,))
    where = {"trajectory": plain, "span": plain["spans"][0], "sampling": plain["sampling"]}
    where[kind].update(changes)
    header, _ = Encoder("a", "1").encode(SubmitResults(trajectories=[]))[1]
    with pytest.raises(WireError, match="unknown field `made_up`"):
        decode([header, pack({"trajectories": [plain]})])


def test_nor_what_is_said_twice() -> None:
    run = world()
    (task, _) = run.lease("a", 2, 0)
    answer = trajectory(task, 0)
    plain = msgspec.to_builtins(answer, builtin_types=(bytes,))
    again = (pack("prompt_ids") + pack(bytes(30_000))) * 3
    twice = b"\xde" + (len(plain) + 3).to_bytes(2, "big") + again
    twice += b"".join(pack(key) + pack(value) for key, value in plain.items())
    assert msgspec.msgpack.decode(twice, type=type(answer)) == answer
    reply = submit(run, "a", "trajectories", [twice])
    assert reply.refused[task.sample_id].startswith("malformed: ")
    assert run.broker.counters["malformed_trajectory"] == 1


def test_scores_are_there_after_a_restart_and_gone_with_their_sample() -> None:
    run, _ = scored()
    run.restart_broker()
    run.join("trainer", "trainer")
    assert [one.reward for one in run.train(1).scored()] == [1.5, 1.5]
    assert run.store.keys("x/"), "the batch may be asked for again"
    run.broker.batches.cover(1)
    assert not run.store.keys("x/") and not run.store.keys("t/")
    run, tasks = scored()
    run.store.delete(journal.score_key(tasks[0].sample_id, "reward"))
    with pytest.raises(StoreError, match="the trajectory of sample s-0, or a score of it, is gone"):
        run.restart_broker()
