"""One set of rules for trajectories: what the buffer takes is what scorers and trainer can use.

A sample with branches is one lease, one answer and one count, and every line of it is judged.
"""

import math
import random
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from fakes.broker_world import World, trajectory, world

from umbra.proto import messages as m
from umbra.proto.bounds import BRANCHES
from umbra.proto.records import (
    Branch,
    Sampling,
    Support,
    Task,
    Trajectory,
    VersionSpan,
    array_bytes,
    pack_float32,
    pack_int32,
    unpack_float32,
)
from umbra.services.buffer.endpoints import worker
from umbra.services.buffer.endpoints.worker import STRIKES
from umbra.services.buffer.samples.trajectories import MORE_BYTES, pack, size_fault
from umbra.services.config import TrainerConfig
from umbra.services.config.trajectory_rules import RunFacts, find_fault
from umbra.services.generator.line import line_of
from umbra.services.modeling.models import load_model
from umbra.services.scorer.logprobs import LogprobWorker
from umbra.services.trainer.batch import BatchError, make_batch

VOCABULARY = 151_936
CUT = Sampling(top_k=2)


def support(sizes: list[int], ids: list[int], logprobs: list[float] | None = None) -> Support:
    values = None if logprobs is None else pack_float32(logprobs)
    return Support(sizes=array("H", sizes).tobytes(), ids=pack_int32(ids), logprobs=values)


def branch(version: int = 0, tokens: int = 3, **changes: Any) -> Branch:
    values: dict[str, Any] = {
        "prompt_ids": pack_int32([5]),
        "response_ids": pack_int32([6] * tokens),
        "loss_mask": b"\1" * tokens,
        "logprobs": pack_float32([-0.25] * tokens),
        "spans": [VersionSpan(version=version, start=0, end=tokens)],
    }
    return Branch(**{**values, **changes})


def branched(task: Task, *versions: int, **changes: Any) -> Trajectory:
    """An answer whose lines are of these versions."""
    first, *further = versions
    return trajectory(task, first, branches=[branch(one) for one in further], **changes)


# What a generator's key may have in mind: the change, and the message.
POISON: list[tuple[dict[str, Any], str]] = [
    ({"prompt_ids": b""}, "no prompt tokens"),
    ({"response_ids": pack_int32([7, 2**31 - 1])}, "reach from 7 to 2147483647"),
    ({"response_ids": pack_int32([7, VOCABULARY])}, "the model has 151936 tokens"),
    ({"prompt_ids": pack_int32([-1, 2])}, "prompt_ids reach from -1"),
    ({"prompt_ids": pack_int32([1] * 2047)}, "2049 tokens, 2048 at most"),
    ({"loss_mask": b"\0\0"}, "no token to learn from"),
    ({"loss_mask": b"\1"}, "loss_mask has 1 entries for 2 response tokens"),
    ({"logprobs": b""}, "logprobs has 0 bytes for 2 tokens"),
    ({"spans": [VersionSpan(version=0, start=0, end=1)]}, "spans end at token 1 of 2"),
    ({"spans": [VersionSpan(version=0, start=1, end=2)]}, "does not follow token 0"),
    ({"logprobs": pack_float32([-0.5, 0.1])}, "above 0"),
    ({"logprobs": pack_float32([-0.5, -1e30])}, "below -128"),
    ({"logprobs": pack_float32([-0.5, -math.inf])}, "not finite"),
    ({"ref_logprobs": pack_float32([-0.5, 3.0])}, "ref_logprobs has values"),
    ({"reward": 1e308}, "reward is 1e+308"),
    ({"reward_parts": {"x": -1e300}}, "reward part 'x' is -1e+300"),
    ({"reward_parts": {"x\ny": 0.0}}, "has no short, printable name"),
    ({"reward_parts": {str(n): 0.0 for n in range(65)}}, "reward_parts has 65 names"),
    ({"sampling": Sampling(temperature=0.0)}, "temperature 0"),
    ({"sampling": Sampling(temperature=math.nan)}, "temperature is nan"),
    ({"sampling": Sampling(top_k=-5)}, "out of range"),
    ({"turns": 2**63}, "turns is"),
    ({"sampling": CUT}, "it has no support"),
    ({"sampling": CUT, "support": support([1], [7])}, "support.sizes has 2 bytes"),
    ({"sampling": CUT, "support": support([1, 1], [7])}, "other tokens than its sizes say"),
    ({"sampling": CUT, "support": support([2, 0], [7, 8])}, "or than loss_mask has"),
    ({"sampling": CUT, "support": support([1, 1], [7, VOCABULARY])}, "beyond the 151936 tokens"),
    ({"sampling": CUT, "support": support([1, 1], [1, 1])}, "its sampled token 0 is outside"),
    ({"sampling": CUT, "support": support([2, 1], [1, 7, 8])}, "its sampled token 1 is outside"),
    ({"support": support([1, 1], [7, 8], [-1.0])}, "support.logprobs has 4 bytes for 2 tokens"),
    ({"support": support([1, 1], [7, 8], [-1.0, 3.0])}, "support.logprobs has values"),
    ({"proximal_version": 2**63}, "proximal_version is"),
    ({"finish_reason": "x\x1b[2J"}, "no short name"),
    ({"generator": "g" * 101}, "no short name"),
    ({"started_at": math.inf}, "started_at"),
    ({"spans": [VersionSpan(version=2**63, start=0, end=2)]}, "span of version"),
    ({"branches": [branch(logprobs=b"1234")]}, "branch 2 of 2: logprobs has 4 bytes"),
    ({"branches": [branch(loss_mask=b"\0\0\0")]}, "branch 2 of 2: loss_mask has no token"),
    ({"branches": [branch(2**63)]}, "branch 2 of 2: span of version"),
    ({"branches": [branch(prompt_ids=b"")]}, "branch 2 of 2: no prompt tokens"),
    (
        {"branches": [branch(response_ids=pack_int32([6, -1, 6]))]},
        "branch 2 of 2: response_ids reach from -1",
    ),
    (
        {"branches": [branch()], "proximal_logprobs": pack_float32([-0.5] * 2)},
        "do not fit 2 branches",
    ),
]
TASK = Task(sample_id="s", group_id="g", prompt_id="p", attempt=1, row={}, lease_s=1.0)


def judging(**changes: Any) -> World:
    """Three generators, two of them sound, and a trainer that has said what its model is."""
    run = World(group_size=2, batch_groups=2, run_ahead=2, **changes)
    for name in ("bad", "a", "b"):
        run.join("generator", name)
    run.join("trainer", "trainer", vocabulary=VOCABULARY)
    return run


@pytest.mark.parametrize(("changes", "words"), POISON, ids=[words for _, words in POISON])
def test_poison_is_refused_before_it_is_acknowledged(changes: dict[str, Any], words: str) -> None:
    """The trainer refuses it by the same rules: the sample is named, the others are not."""
    run = judging()
    run.batch(1)
    run.produce("a", 0, 1)
    (task,) = run.lease("bad", 1, 0)
    refused = run.submit("bad", trajectory(task, 0, **changes)).refused
    assert words in refused[task.sample_id]
    assert run.broker.counters["malformed_trajectory"] == 1
    run.produce("b", 0, 8)
    batch = run.batch(1).trajectories
    assert len(batch) == 4
    make_batch(batch, VOCABULARY)
    assert run.pool.ledger.snapshot().balance == 0
    with pytest.raises(BatchError) as caught:
        make_batch([*batch, trajectory(TASK, 0, **changes)], VOCABULARY, 2048)
    assert str(caught.value).startswith("sample s of ") and words in str(caught.value)


def test_the_sampling_is_the_runs() -> None:
    facts = RunFacts(samplings={"": Sampling(temperature=0.7)})
    assert "the run samples with" in (find_fault(trajectory(TASK, 0), facts) or "")
    fit = trajectory(TASK, 0, sampling=Sampling(temperature=0.7, max_tokens=9))
    assert find_fault(fit, facts) is None
    greedy = trajectory(TASK, 0, sampling=Sampling(temperature=0.0))
    assert find_fault(greedy, facts, trained=False) is None, "an eval sample may be greedy"


@pytest.mark.parametrize("vocabulary", [1, 255, 256, 65_535, 65_536, VOCABULARY, 1 << 24])
def test_token_ids_are_compared_exactly(vocabulary: int) -> None:
    """The many that are compared at once, against one at a time, at and around every bound."""
    chance = random.Random(vocabulary)
    near = [vocabulary - 1, vocabulary, vocabulary + 1, 0, -1, -(2**31), 2**31 - 1]
    facts = RunFacts(vocabulary)
    for length in (1, 2, 1023, 1024, 1025, 2100):
        for bad in [None, *near]:
            ids = [chance.randrange(vocabulary) for _ in range(length)]
            if bad is not None:
                ids[chance.randrange(length)] = bad
            made = trajectory(TASK, 0, prompt_ids=pack_int32(ids), response_ids=pack_int32([0, 0]))
            sound = all(0 <= one < vocabulary for one in ids)
            assert (find_fault(made, facts) is None) == sound, (length, bad)


@pytest.mark.parametrize(
    ("ids", "words"),
    [([7, 9, 3], None), ([7, 3, 9], None), ([8, 9, 3], "token 0 is"), ([7, 8, 3], "token 1 is")],
)
def test_the_support_is_that_of_learned_tokens_alone(ids: list[int], words: str | None) -> None:
    """The second token is what the environment said."""
    made = trajectory(
        TASK, 0, response_ids=pack_int32([7, 8, 9]), loss_mask=b"\1\0\1", sampling=CUT,
        logprobs=pack_float32([-0.5] * 3), spans=[VersionSpan(version=0, start=0, end=3)],
        support=support([1, 0, 2], ids),
    )  # fmt: skip
    fault = find_fault(made, RunFacts(VOCABULARY))
    assert fault is None if words is None else words in (fault or "")


def test_malformed_answers_cost_a_generator_its_leases_and_no_sample_an_attempt() -> None:
    """It is alone at first, as before the trainer has joined, and its answers are poison."""
    run = judging(max_attempts=1)
    for _ in range(STRIKES):
        (task,) = run.lease("bad", 1, 0)
        poison = trajectory(task, 0, reward=1e308)
        ack = run.get("bad", m.SubmitResults(trajectories=[poison]), m.TaskLeases)
        assert ack.refused[task.sample_id].startswith("malformed: ")
    refused = run.get("bad", m.LeaseTasks(capacity=1, version=0, wait_s=0), m.Nack)
    assert refused.code == "malformed_answers"
    assert not run.pool.leases.of("bad")
    for step in range(1, 4):
        while not run.batch(step).trajectories:
            run.produce("a", step - 1, 4)
        run.commit(step)
    assert not run.broker.failure and not run.pool.ledger.ended["failed"]
    assert run.pool.ledger.snapshot().balance == 0


def test_the_waiting_question_of_who_struck_out_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "STRIKES", 1)
    run = judging()
    (task, *_) = run.lease("bad", 1000, 0)
    assert run.ask("bad", m.LeaseTasks(capacity=1, version=0, wait_s=9)) is None
    run.submit("bad", trajectory(task, 0, reward=1e308))
    (refused,) = run.late["bad"]
    assert isinstance(refused, m.Nack) and refused.code == "malformed_answers"
    assert not run.pool.leases.of("bad")


def test_a_sound_answer_forgives_malformed_ones_of_the_same_process() -> None:
    run = judging(max_attempts=1)

    def poison() -> None:
        (task,) = run.lease("bad", 1, 0)
        run.ask("bad", m.SubmitResults(trajectories=[trajectory(task, 0, reward=1e308)]))

    for _ in range(2):
        for _ in range(STRIKES - 1):
            poison()
        run.produce("bad", 0, 4)
    run.ask("bad", m.Leave(reason="done"))
    run.join("generator", "bad")
    failed = run.pool.ledger.ended["failed"]
    poison()
    assert run.pool.ledger.ended["failed"] == failed, "a new one has to show it again"


@pytest.mark.parametrize(
    ("stage", "changes", "words"),
    [
        ("reward", {"reward": 1e308}, "reward is 1e+308"),
        ("reward", {"reward": math.nan}, "reward is nan"),
        ("reward", {"reward_parts": {"x": 1e300}}, "reward part 'x' is 1e+300"),
        ("ref_logp", {"logprobs": pack_float32([-0.5, 2.0])}, "above 0"),
        ("ref_logp", {"logprobs": pack_float32([-0.5, -1e30])}, "below -131072"),
        ("ref_logp", {"logprobs": None}, "logprobs has 0 bytes"),
        ("logp", {"logprobs": pack_float32([-0.5, -9.0]), "version": 2**63}, "version is"),
    ],
)
def test_scores_are_judged_by_the_same_rules(
    stage: str, changes: dict[str, Any], words: str
) -> None:
    run = judging(stages=[stage])
    run.join("scorer", "r")
    run.produce("a", 0, 1)
    (task,) = run.to_score("r", stage, 1)
    ack = run.give("r", [task], **changes)
    assert words in ack.refused[task.sample_id]
    assert run.broker.counters["malformed_scores"] == 1


def test_a_sample_counts_once_however_many_branches_it_has() -> None:
    run = world(durable=True)
    answers = [branched(task, *[0] * (1 + n)) for n, task in enumerate(run.lease("a", 4, 0))]
    assert not run.submit("a", *answers).refused
    assert not run.submit("a", answers[3]).refused, "an answer that comes again"
    run.restart_broker()
    run.join("trainer", "trainer")
    assert run.train(1).trajectories == answers, "to the byte"
    assert run.broker.counters["accepted"] == run.pool.ledger.trained == 4


@pytest.mark.parametrize("old", [0, 1])
def test_a_stale_token_of_any_branch_makes_the_sample_stale(old: int) -> None:
    run = world(max_staleness=1, run_ahead=1)
    late = run.lease("b", 2, 0)
    run.steps("a", 1, 2, 3)
    versions = [3, 3, 3]
    versions[old] = 0
    for task in late:
        run.submit("b", branched(task, *versions))
    assert run.broker.counters["stale_answers"] >= 1
    assert run.pool.ledger.snapshot().ended == {"stale": 2}, "the group of both"


def test_a_partial_is_one_line() -> None:
    made = world()
    task = made.lease("a", 1, 0)[0]
    partial = branched(task, 0, 0, finish_reason="partial")
    made.back("a", task, partial=partial)
    assert made.broker.counters["malformed_partial"] == 1
    assert made.lease("b", 1, 0)[0].trajectory is None, "it restarts"
    assert line_of(partial, partial.sampling) is None


def test_as_many_branches_as_there_may_be_fit() -> None:
    spans = [VersionSpan(version=n, start=n, end=n + 1) for n in range(128)]
    most = branch(tokens=128, spans=spans)
    made = trajectory(TASK, 0, branches=[most] * (BRANCHES - 1))
    assert array_bytes(made) == 8 + 8 + 2 + 8 + (BRANCHES - 1) * (4 + 128 * 9)
    assert size_fault(pack(made), array_bytes(made), len(made.branches)) is None
    assert size_fault(b"x" * (8 + MORE_BYTES), 8) is None
    assert size_fault(b"x" * (9 + MORE_BYTES), 8) == (
        f"it has {9 + MORE_BYTES} bytes, far more than its arrays (8)"
    )
    more = msgspec.to_builtins(msgspec.structs.replace(made, branches=[most] * BRANCHES))
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(more, Trajectory)


def test_scorers_find_logprobs_of_every_line(tiny_model_dir: Path) -> None:
    """Two lines, scored together and each alone: the same numbers."""
    run = world(stages=["ref_logp"])
    run.join("scorer", "r")
    task = run.lease("a", 1, 0)[0]
    further = branch(loss_mask=b"\1\0\1", logprobs=pack_float32([-0.5, 0, -0.5]))
    run.submit("a", trajectory(task, 0, branches=[further]))
    (scoring,) = run.to_score("r", "ref_logp", 1)
    worker = LogprobWorker(
        load_model(tiny_model_dir, torch.device("cpu"), torch.float32), TrainerConfig()
    )

    def score(made: Trajectory) -> bytes:
        told = msgspec.structs.replace(scoring, trajectory=made)
        ((found,),) = worker.score([told], lambda: None)
        return found.logprobs or b""

    together = score(scoring.made)
    alone = [unpack_float32(score(line)) for line in scoring.made.lines]
    assert unpack_float32(together) == pytest.approx(alone[0] + alone[1], abs=1e-6)
    assert alone[1][1] == 0 != alone[1][2]
    assert not run.give("r", [scoring], logprobs=together).refused
    assert run.pool.samples[task.sample_id].state.value == "ready"
