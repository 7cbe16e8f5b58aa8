"""The buffer is killed and starts again, at any moment: nothing is lost, nothing is repeated.

And a trajectory and its scores stay the very bytes in which they came, up to the trainer.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from fakes.broker_world import World, trajectory, world
from msgspec.structs import replace

from umbra.proto import messages as m
from umbra.proto.codec import Encoder, decode
from umbra.proto.errors import UsageError, WireError
from umbra.proto.records import Score, Task, pack_float32
from umbra.services.buffer.effects import Reply
from umbra.services.buffer.samples import journal
from umbra.services.buffer.store import StoreError
from umbra.services.config import EnvironmentConfig, NamedEnvironment, TrainerConfig


def test_members_and_leases_outlive_the_buffer() -> None:
    run = world(durable=True)
    tasks = run.lease("a", 3, 0)
    run.restart_broker()
    held = [(task.sample_id, task.attempt) for task in tasks]
    assert run.get("a", m.RenewLeases(leases=held), m.TaskLeases).lost == []
    assert run.deliver("a", tasks).accepted == 3
    assert run.deliver("a", tasks[:1]).accepted == 1  # its ack was lost
    assert run.pool.ledger.in_flight["ready"] == 3
    lost = run.lease("b", 2, 0)
    run.restart_broker()
    assert isinstance(run.join("generator", "a", "a-2", replaces=0), m.Welcome), "not heard since"
    for _ in range(2):
        run.pass_time(10)
        run.beat("a")
    again = run.lease("a", 2, 0)
    assert [(t.sample_id, t.attempt) for t in again] == [(t.sample_id, 2) for t in lost]


def test_a_copied_folder_of_a_run_has_a_name_of_its_own() -> None:
    """Its store went with it; a store that is elsewhere may be another run's by a mistake."""
    run, other = world(durable=True), world(durable=True, store="/elsewhere")
    tasks = run.lease("a", 3, 0)
    run.run_id = other.run_id = "copied"
    with pytest.raises(UsageError, match="is of a run with run_id = run-1, this one has"):
        other.restart_broker()
    for _ in range(2):
        run.restart_broker()
    assert run.status.run_id == "copied"
    assert run.deliver("a", tasks).accepted == 3


def test_no_prompt_is_skipped_or_repeated() -> None:
    """Also where spare groups, and those that were dropped as stale, were not trained."""
    run = world(durable=True, run_ahead=2, max_staleness=2, oversample=2)
    tasks = run.lease("a", 100, 0)
    run.answer("a", tasks, 0)
    for step in (1, 2, 3):
        run.train(step)
    assert run.pool.ledger.ended["stale"] == 4
    seen = [task.prompt_id for task in [*tasks, *run.lease("a", 4, 3)]]
    run.restart_broker()
    seen += [task.prompt_id for task in run.lease("a", 100, 3)]
    assert list(dict.fromkeys(seen)) == [str(n) for n in range(1, len(seen) // 2 + 1)]


def test_what_a_checkpoint_covers_cannot_be_repeated_and_takes_no_room() -> None:
    run = world(durable=True, run_ahead=0)
    run.steps("a", 1, 2, 3)
    assert len(run.store.keys("t/")) == 12
    run.get("trainer", m.CheckpointSaved(step=2), m.Ok)
    assert len(run.store.keys("t/")) == 4
    for step, incarnation in ((3, "trainer-1"), (2, "trainer-2")):  # the same one never goes back
        run.join("trainer", "trainer", incarnation)
        assert isinstance(run.ask("trainer", m.LeaseBatch(step=step, wait_s=0)), m.Nack)
    assert len(run.batch(3).trajectories) == 4
    assert (run.broker.batches.version, run.broker.counters["steps_repeated"]) == (2, 1)


def test_a_bound_that_is_lower_now_holds_for_what_was_made_before() -> None:
    """Also no group stays due so late that nobody could serve it."""
    run = world(durable=True, run_ahead=2, max_staleness=2)
    run.produce("a", 0, 12)
    for step in (1, 2):
        run.train(step)
    run.restart_broker(max_staleness=1)
    assert run.pool.ledger.ended == {"stale": 4}
    run.produce("a", 2)
    assert {made.oldest_version for made in run.batch(3).trajectories} == {2}
    run = world(durable=True, run_ahead=2, max_staleness=2)
    for due, failed in (([0, 0, 1, 1, 2, 2], 4), ([1, 1, 2, 2], 2), ([2, 2], 0)):
        tasks = run.lease("a", 12, 0)
        assert [run.pool.groups[task.group_id].due for task in tasks[::2]] == due
        for task in tasks[: 2 * failed : 2]:
            run.back("a", task, failed=True)
    run.restart_broker(max_staleness=1)
    run.join("generator", "a", "a-2")
    assert len(run.produce("a", 0)) == 12


RANKED = NamedEnvironment(name="ranked", kind="reward", reward_scope="group")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"environments": (RANKED,)}, r"group = \[\], this one has \['environments.ranked'\]"),
        ({"environment": EnvironmentConfig(reward_scope="group")}, r"has \['environment'\]"),
        ({"trainer": TrainerConfig(router_replay=True)}, "replay = False, this one has True"),
        ({"trainer": TrainerConfig(score_centering=4)}, "centering = 0, this one has 4"),
    ],
)
def test_what_samples_in_flight_would_lack_is_not_changed(changes: Any, words: str) -> None:
    """They waited for ever to be scored at once, or were refused as malformed again and again."""
    run = world(durable=True)
    run.config = replace(run.config, **changes)
    with pytest.raises(UsageError, match=words):
        run.restart_broker()


def test_counts_of_another_kind_are_refused_in_a_sentence() -> None:
    run = world(durable=True)
    run.store.put("now", msgspec.msgpack.encode({"version": "three"}))
    with pytest.raises(StoreError, match=r"cannot be read .*: begin a new run"):
        run.restart_broker()


def test_a_finished_run_goes_on_when_it_gets_more_steps() -> None:
    run = world(steps=1, durable=True)
    run.steps("a", 1)
    run.get("trainer", m.FinishRun(reason="done"), m.RunFinished)
    run.restart_broker()
    assert run.broker.run.state == "draining"
    run.config = replace(run.config, run=replace(run.config.run, steps=2))
    run.restart_broker()
    assert (run.broker.run.state, run.broker.run.finished) == ("ready", "")
    run.join("trainer", "trainer", incarnation="again")
    run.join("generator", "a", incarnation="again")
    run.produce("a", 1)
    assert run.batch(2).step == 2
    run.restart_broker()
    assert run.broker.run.state == "ready"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["r/g-0"], "the prompt of group g-0 is gone"),
        (["g/g-0"], "the state of group g-0 is gone"),
        (["g/g-0", "r/g-0"], "2 samples are unaccounted for"),
        (["g/g-2", "r/g-2"], "group g-2 of the batch of step 1 is gone"),
        (["t/s-4"], "the trajectory of sample s-4, or a score of it, is gone"),
    ],
)
def test_a_store_with_a_gap_is_refused(keys: list[str], words: str) -> None:
    """Also in a committed batch, which is kept for a trainer that starts again before its step."""
    run = world(durable=True, run_ahead=3)
    tasks = run.lease("a", 8, 0)
    run.answer("a", tasks[4:], 0)
    run.batch(1)
    if "trajectory" in words:
        run.commit(1)
    for key in keys:
        run.store.delete(key)
    with pytest.raises(StoreError, match=words):
        run.restart_broker()


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


def submit(run: World, name: str, field: str, pieces: list[bytes]) -> m.TaskLeases:
    frame = pack({field: list(map(msgspec.Raw, pieces))})
    body = msgspec.msgpack.decode(frame, type=m.SubmitResults)
    return run.get(name, body, m.TaskLeases, frame=frame)


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
    request = run.request("trainer", m.LeaseBatch(step=1, wait_s=0))
    effects = run.broker.handle_all([request], run.now)
    (lease,) = (one.body for one in effects if isinstance(one, Reply))
    assert all(piece in pack(lease) for piece in pieces)
    body = decode(Encoder("buffer", "b").encode(lease)[1]).body
    assert isinstance(body, m.BatchLease)
    assert body.trajectories == made
    assert [one.reward for one in body.scored()] == [0.75, 0.75]
    assert [one.reward_parts for one in body.scored()] == [{"late": 0.5}] * 2
    assert [one.ref_logprobs for one in body.scored()] == [LOGPROBS] * 2
    mixed = {stage: scores[::-1] for stage, scores in body.scores.items()}
    with pytest.raises(WireError, match="of other samples"):
        replace(body, scores=mixed).scored()


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("trajectory", {"made_up": [[]]}), ("span", {"made_up": 1}), ("sampling", {"made_up": 1})],
)
def test_nothing_is_kept_that_was_not_looked_at(kind: str, changes: dict[str, Any]) -> None:
    (task, _) = world().lease("a", 2, 0)
    plain = msgspec.to_builtins(trajectory(task, 0), builtin_types=(bytes,))
    where = {"trajectory": plain, "span": plain["spans"][0], "sampling": plain["sampling"]}
    where[kind].update(changes)
    header, _ = Encoder("a", "1").encode(m.SubmitResults(trajectories=[]))[1]
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
