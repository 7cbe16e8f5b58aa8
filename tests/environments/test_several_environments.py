"""Several environments in a run: their configuration, prompts, limits and pools."""

import json
from pathlib import Path
from typing import Any

import pytest
from fakes.trajectories import sample, trajectory

from umbra.proto.errors import UsageError
from umbra.services.buffer.prompts import open_prompts, rows_by_environment
from umbra.services.config import DataConfig, NamedEnvironment, RunConfig
from umbra.services.config.loader import as_dict, load_config, to_json, to_toml
from umbra.services.config.rules import check_feasible
from umbra.services.environments.built_in import ExactMatch, NumericMatch
from umbra.services.environments.pool import EnvironmentSet, InlinePool
from umbra.services.environments.protocol import EpisodeOutcome, SampleError, StepResult
from umbra.services.generator.service import settings_for
from umbra.services.modeling.run_file import located
from umbra.services.trainer.metrics import environment_metrics

RUN = """
[[environments]]
name = "words"
prompts = "words.jsonl"
weight = 3.0
max_turns = 2
sampling = { top_k = 0, stop = [] }
[[environments]]
name = "sums"
kind = "numeric"
prompts = "sums.jsonl"
options = { tolerance = 0.5 }
"""
ONE = "[[environments]]\nname = 'a'\n"
THEIRS = "[[environments]]\nname = 'x'\nkind = 'verifiers'\nid = 'y'\n"


def loaded(tmp_path: Path, text: str = RUN) -> RunConfig:
    (tmp_path / "run.toml").write_text(text)
    return load_config(tmp_path / "run.toml", environ={})


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps({"prompt": "p", **row}) + "\n" for row in rows))
    return str(path)


def two(tmp_path: Path, **changes: Any) -> tuple[NamedEnvironment, NamedEnvironment]:
    words = write(tmp_path / "words.jsonl", *({"answer": str(n)} for n in range(3)))
    sums = write(tmp_path / "sums.jsonl", {"answer": 1}, {"answer": 2, "environment": "sums"})
    return (
        NamedEnvironment(name="words", prompts=words, weight=3.0),
        NamedEnvironment(**{"name": "sums", "prompts": sums, **changes}),
    )


def test_a_run_file_has_several_and_is_written_back(tmp_path: Path) -> None:
    config = loaded(tmp_path)
    words, sums = config.environments
    assert (words.name, words.weight, words.max_turns, words.kind) == ("words", 3.0, 2, "exact")
    assert (sums.kind, sums.options) == ("numeric", {"tolerance": 0.5})
    (tmp_path / "back.json").write_bytes(to_json(config))
    assert load_config(tmp_path / "back.json", environ={}) == config
    assert loaded(tmp_path, to_toml(as_dict(config))) == config
    for name in ("words", "sums"):
        (tmp_path / f"{name}.jsonl").write_text("{}")
    resolved = located(config, tmp_path / "run.toml").environments[1]
    assert resolved.prompts == str(tmp_path / "sums.jsonl")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[environments]\nname = 'a'", "write each of environments as"),
        ("[[environments]]\nweight = 1.0", "needs a name"),
        (ONE + ONE, "have the name a"),
        ("[[environments]]\nname = 'a/b'", "environments.name must be text like"),
        (f"{ONE}kinds = 'x'", "unknown key environments.kinds"),
        (f"{ONE}weight = 0", "environments.weight must be a number > 0"),
        (
            f"{ONE}sampling = {{ temperature = 0 }}",
            r"environments\.a: sampling\.temperature must be a number > 0",
        ),
        (
            f"{ONE}sampling = {{ temprature = 1.0 }}",
            r"unknown key sampling\.temprature; did you mean sampling\.temp",
        ),
        (
            f"{ONE}sampling = {{ stop_tokens = ['a'] }}",
            r"environments\.a: sampling\.stop_tokens end turns in all",
        ),
        (f"{ONE}sampling = 'refuse'", r"environments\.sampling must be a table"),
    ],
)
def test_a_run_file_wrong_about_them_is_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        loaded(tmp_path, text)


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ("[environment]\nkind = 'numeric'", "are both set"),
        ("[buffer]\nstages = ['reward']", "stages has reward: set reward_scope = group in"),
        ("[[environments]]\nname = 'x'\nkind = 'trl'", "environments.x.kind = trl needs"),
        ("[[environments]]\nname = 'x'\nid = 'm:C'", "environments.x.id = m:C has no effect"),
        (f"{THEIRS}max_turns = 2", "environments.x.max_turns is not for verifiers"),
        (
            f"{THEIRS}{THEIRS.replace('x', 'z')}[generator]\nserve_advertise = 'proxy:80'",
            "proxy:80 has a port",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_a_start(tmp_path: Path, extra: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        check_feasible(loaded(tmp_path, RUN + extra))


def test_prompts_are_drawn_by_the_weights_of_their_environments(tmp_path: Path) -> None:
    environments, data = two(tmp_path), DataConfig()
    feed = open_prompts(data, seed=1, environments=environments)
    drawn = [next(feed) for _ in range(400)]
    names = [prompt.row["environment"] for prompt in drawn]
    assert 0.65 < names.count("words") / 400 < 0.85
    assert all(p.prompt_id.startswith(f"{p.row['environment']}/") for p in drawn)
    position = feed.position()
    ahead = [next(feed) for _ in range(20)]
    again = open_prompts(data, seed=1, environments=environments)
    again.seek(position)
    assert [next(again) for _ in range(20)] == ahead
    assert rows_by_environment(data, environments)["sums"][0].row["answer"] == 1


@pytest.mark.parametrize(
    ("prompts", "changes", "says"),
    [
        ("shared.jsonl", {}, r"data.prompts = shared.jsonl, and .* of its own: remove it"),
        ("", {"prompts": ""}, r"environments.sums.prompts is not set"),
        ("", {"name": "other"}, r"\"environment\" is 'sums', but the file is that of 'other'"),
    ],
)
def test_prompts_that_are_of_no_environment_are_refused(
    tmp_path: Path, prompts: str, changes: dict[str, Any], says: str
) -> None:
    environments = two(tmp_path, **changes)
    with pytest.raises(UsageError, match=says):
        open_prompts(DataConfig(prompts=prompts), seed=0, environments=environments)


def test_each_sample_has_the_limits_of_its_environment(tmp_path: Path) -> None:
    chat: Any = None
    named = (
        NamedEnvironment(name="a", max_turns=3),
        NamedEnvironment(name="b", kind="trl", id="m:C"),
    )
    config = RunConfig(environments=named)
    settings = settings_for(config, chat)
    a, b = settings.of({"environment": "a"}), settings.of({"environment": "b"})
    assert (a.turns, b.turns) == (3, 0)
    with pytest.raises(SampleError, match=r"is 'c', none of \[\[environments\]\]"):
        settings.of({"environment": "c"})
    one = settings_for(RunConfig(), chat)
    assert one.of({"environment": "anything"}) is one


def rewards(outcomes: list[EpisodeOutcome]) -> dict[str, float]:
    values = {outcome.key: outcome.value for outcome in outcomes}
    return {key: v.reward for key, v in values.items() if isinstance(v, StepResult)}


def test_each_sample_is_played_by_the_environment_that_its_row_names() -> None:
    pools = EnvironmentSet({"words": InlinePool(ExactMatch), "sums": InlinePool(NumericMatch)})
    for key, name in (("a", "words"), ("b", "sums")):
        pools.play(key, {"prompt": "p", "answer": "1", "environment": name}, [" it is 1"])
    assert rewards(pools.collect()) == {"a": 0.0, "b": 1.0}
    pools.forget("a")
    pools.forget("unknown")
    pools.close()


def test_metrics_tell_environments_apart() -> None:
    ended = [
        trajectory(prompt_id="words/1", reward=1.0),
        trajectory(prompt_id="words/2", reward=0.0, response=(3, 4)),
        trajectory(prompt_id="words2/2", reward=9.0),
    ]
    assert environment_metrics(ended, ["words", "sums"]) == {
        "environment/words/samples": 2.0,
        "environment/words/reward": 0.5,
        "environment/words/response_length": 2.5,
        "environment/sums/samples": 0.0,
    }
    assert sample({"environment": "words"}).row["environment"] == "words"
