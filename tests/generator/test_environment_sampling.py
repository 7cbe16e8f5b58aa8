"""Sampling of each environment: its configuration, and its way from the engine to the loss.

A batch of samples that were drawn at several temperatures is what every place that computes
logprobs has to get right: the update, the comparison with the generator, and the scorers.
"""

from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch
from fakes.rollouts import finish
from fakes.trajectories import sample, trajectory
from msgspec.structs import replace

from umbra.proto.errors import MismatchError, UsageError
from umbra.proto.records import Sampling, Support, Task, Trajectory, pack_int32, unpack_float32
from umbra.services.config import RunConfig
from umbra.services.config.loader import load_config
from umbra.services.config.rules import cautions, check_feasible
from umbra.services.config.trajectory_rules import RunFacts, find_fault, samplings_of
from umbra.services.generator.agents.protocols import Completions
from umbra.services.generator.engines.torch_engine import TorchEngine
from umbra.services.generator.rollout import Rollout
from umbra.services.generator.runner import RolloutRunner
from umbra.services.generator.service import open_environments, settings_for
from umbra.services.modeling.chat import Chat
from umbra.services.modeling.models import load_model
from umbra.services.modeling.pretrained import load_tokenizer
from umbra.services.scorer.logprobs import LogprobWorker
from umbra.services.trainer.batch import make_batch
from umbra.services.trainer.learner import Learner
from umbra.services.trainer.metrics import Row
from umbra.services.trainer.mismatch import MismatchCheck
from umbra.services.trainer.policy import load_policy
from umbra.services.trainer.update import PolicyUpdate

RUN = """
[model]
path = "model"
[sampling]
temperature = 0.9
top_k = 50
max_tokens = 12
stop_tokens = ["<|end|>"]
stop = ["so"]
[generator]
max_context = 64
slots = 12
device = "cpu"
[trainer]
device = "cpu"
threads = 1
learning_rate = 1e-3
[[environments]]
name = "cool"
prompts = "cool.jsonl"
sampling = { temperature = 0.4, max_tokens = 5, stop = [] }
[[environments]]
name = "plain"
prompts = "plain.jsonl"
sampling = { top_k = 0 }
[[environments]]
name = "hot"
prompts = "hot.jsonl"
[environments.sampling]
temperature = 1.6
"""
ROWS = [{"prompt": "3142", "answer": "1234", "environment": n} for n in ("cool", "plain", "hot")]


def loaded(tmp_path: Path, text: str = RUN) -> RunConfig:
    (tmp_path / "run.toml").write_text(text)
    return load_config(tmp_path / "run.toml", environ={})


def test_keys_of_an_environment_are_others_than_the_runs(tmp_path: Path) -> None:
    config = loaded(tmp_path)
    cool, plain, hot = map(config.sampling_for, config.environments)
    assert (cool.temperature, cool.top_k, cool.max_tokens, cool.stop) == (0.4, 50, 5, [])
    assert (plain.temperature, plain.top_k, plain.max_tokens, plain.stop) == (0.9, 0, 12, ["so"])
    assert (hot.temperature, hot.stop_tokens) == (1.6, ["<|end|>"])
    assert config.longest_turn == 12


def test_what_does_not_fit_one_of_them_is_refused_or_warned_of(tmp_path: Path) -> None:
    config = loaded(tmp_path)
    check_feasible(config)
    assert "max_tokens" not in dict(cautions(config))
    long = loaded(tmp_path, RUN.replace("max_tokens = 5", "max_tokens = 80"))
    assert (
        "environments.cool.sampling.max_tokens = 80 does not" in dict(cautions(long))["max_tokens"]
    )
    cold = loaded(tmp_path, RUN.replace("temperature = 0.4", "temperature = 0.004"))
    with pytest.raises(UsageError, match=r"environments\.cool\.sampling\.temperature = 0\.004 is"):
        check_feasible(load_config(tmp_path / "run.toml", overrides=["generator.engine=vllm"]))
    assert samplings_of(cold)["cool"].temperature == 0.004
    (tmp_path / "run.toml").write_text(RUN)
    punished = ["trainer.objective=dapo", "trainer.overlong_buffer=5"]
    check_feasible(load_config(tmp_path / "run.toml", overrides=punished))
    punished[1] = "trainer.overlong_buffer=6"
    with pytest.raises(UsageError, match=r"environments\.cool\.sampling\.max_tokens = 5: lower"):
        check_feasible(load_config(tmp_path / "run.toml", overrides=punished))


def test_the_buffer_knows_how_each_environment_samples(tmp_path: Path) -> None:
    facts = RunFacts(samplings=samplings_of(loaded(tmp_path)))
    cool, hot = Sampling(temperature=0.4, top_k=50), Sampling(temperature=1.6, top_k=50)
    for prompt_id, sampling, sound in (
        ("cool/1", cool, True),
        ("cool/1", hot, False),
        ("hot/data/1", hot, True),
        ("hot/data/1", cool, False),
    ):
        support = Support(sizes=b"\1\0" * 3, ids=pack_int32([3, 4, 5]))
        made = trajectory(prompt_id=prompt_id, sampling=sampling, support=support)
        fault = find_fault(made, facts)
        assert (fault is None) == sound, fault
        assert sound or "the run samples with" in str(fault)
        assert find_fault(made, facts, trained=False) is None
    one = RunFacts(samplings=samplings_of(RunConfig()))
    assert find_fault(trajectory(prompt_id="cool/1"), one) is None
    assert find_fault(trajectory(prompt_id="cool/1", sampling=cool), one) is not None


def task(number: int, partial: Trajectory | None = None) -> Task:
    row = ROWS[number % 3]
    names = {"sample_id": f"s{number}", "group_id": f"g{number % 3}"}
    return sample(row, prompt_id=f"{row['environment']}/0", trajectory=partial, **names)


def test_a_partial_that_was_drawn_otherwise_is_begun_anew(chat: Chat, tmp_path: Path) -> None:
    """A run that goes on with another temperature: no sample is of two distributions."""
    settings = settings_for(loaded(tmp_path), chat).of(ROWS[0])
    for temperature, kept in ((0.4, True), (0.5, False)):
        sampling = Sampling(temperature=temperature, top_k=50)
        made = trajectory([5, 6], [7, 8], finish_reason="partial", sampling=sampling)
        assert bool(Rollout(task(0, made), settings).tokens) == kept


def sampled(config: RunConfig, directory: Path, *, greedy: bool = False) -> list[Trajectory]:
    """Four samples of each environment, by the torch engine, all in one batch; rewarded anyhow."""
    model: Any = load_model(directory, torch.device("cpu"), torch.float32)
    tokenizer = load_tokenizer(directory)
    stops = {tokenizer.convert_tokens_to_ids("<|end|>")}
    chat = Chat.configured(config.model, tokenizer, stops)
    engine = TorchEngine(model, stop_ids=stops, slots=12, max_context=64, seed=1, version=0)
    with closing(engine), closing(open_environments(config, config.environment, chat)) as pool:
        runner = RolloutRunner(engine, pool, settings_for(config, chat, greedy=greedy))
        runner.add(task(n) for n in range(12))
        made = sorted(finish(runner), key=lambda t: (t.group_id, t.sample_id))
    assert len(made) == 12
    return [replace(t, reward=sum(t.response_ids) % 7) for t in made]


def of(made: Iterable[Trajectory], name: str) -> list[Trajectory]:
    return [t for t in made if t.prompt_id.startswith(f"{name}/")]


@pytest.mark.parametrize("top_k", [0, 50])
def test_logprobs_of_a_mixed_batch_are_the_same_everywhere(
    tiny_model_dir: Path, tmp_path: Path, top_k: int
) -> None:
    """Three environments with a sampling each. 1. The engine makes samples of all of them at once.
    2. They pass the buffer's rules, and an update and a scorer find their logprobs. Result: all
    agree, and neither update nor scorer would with one temperature for all.
    """
    text = RUN.replace('path = "model"', f'path = "{tiny_model_dir}"')
    text = text.replace('stop = ["so"]', "").replace("top_k = 50", f"top_k = {top_k}")
    config = loaded(tmp_path, text)
    made = sampled(config, tiny_model_dir)
    facts = RunFacts(samplings=samplings_of(config))
    assert [find_fault(t, facts) for t in made] == [None] * 12
    assert {t.sampling.temperature for t in made} == {0.4, 0.9, 1.6}
    assert max(t.response_tokens for t in of(made, "cool")) == 5
    assert max(t.response_tokens for t in of(made, "hot")) == 12

    row = updated(config, tiny_model_dir, made)
    assert row["mismatch/compared"] == sum(sum(t.loss_mask) for t in made)
    assert (row["mismatch/judged"] or 0) < 1e-10
    if top_k:
        return  # what the engine drew from is no longer the softmax that scorers compute
    assert (row["mismatch/k3"] or 0) < 1e-10
    assert worst_by_scorer(config, tiny_model_dir, made) < 1e-4
    alike = [replace(t, sampling=Sampling(temperature=0.9)) for t in made]
    assert worst_by_scorer(config, tiny_model_dir, alike) > 0.1
    with pytest.raises(MismatchError, match="do not agree on equal weights"):
        updated(config, tiny_model_dir, alike)


def updated(config: RunConfig, directory: Path, made: list[Trajectory]) -> Row:
    """Return the metrics of an update on `made`."""
    policy, _ = load_policy(directory)
    learner = Learner(policy, config.trainer, config.run.steps)
    batch = make_batch(made, policy.config.vocab_size)
    row = PolicyUpdate(config, learner, None, MismatchCheck(config, learner))(
        batch, 0, lambda: True
    )
    assert row is not None
    return row


def worst_by_scorer(config: RunConfig, directory: Path, made: list[Trajectory]) -> float:
    served = load_model(directory, torch.device("cpu"), torch.float32)
    tasks = [sample({}, sample_id=one.sample_id, trajectory=one) for one in made]
    scores = LogprobWorker(served, config.trainer).score(tasks, lambda: None)
    found = [x for (score,) in scores for x in unpack_float32(score.logprobs or b"")]
    asked = [x for t in made for x in unpack_float32(t.logprobs)]
    return max(abs(one - other) for one, other in zip(found, asked, strict=True))


def test_agents_are_held_to_the_sampling_of_their_environment(
    chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = 'name = "hot"\nkind = "agent"\nagent = "m:f"'
    text = RUN.replace('name = "hot"', agent)
    config, rules = loaded(tmp_path, text), []

    def pool(_environment: Any, settings: Any, bound: Any, **_others: Any) -> Any:
        rules.append(settings.rules)
        bound.close()
        return Mock()

    monkeypatch.setattr("umbra.services.generator.agents.pool.AgentPool", pool)
    open_environments(config, config.environments[2], chat)
    assert rules[0].sampling == Sampling(temperature=1.6, top_k=50, max_tokens=12)
    for asked in ("temperature", "top_k"):
        body = msgspec.json.encode({"messages": [{"role": "user", "content": "a"}], asked: 1})
        Completions.call(body, rules[0])
    assert rules[0].overruled == {"temperature", "top_k"}
