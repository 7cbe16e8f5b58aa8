"""Several environments in a run: their configuration, prompts, limits and pools."""

from pathlib import Path

import pytest
from fakes.trajectories import trajectory

from umbra.proto.errors import UsageError
from umbra.services.config import RunConfig
from umbra.services.config.loader import as_dict, load_config, to_json, to_toml
from umbra.services.config.rules import check_feasible
from umbra.services.environments.built_in import ExactMatch, NumericMatch
from umbra.services.environments.pool import EnvironmentSet, InlinePool
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


def test_each_sample_is_played_by_the_environment_that_its_row_names() -> None:
    pools = EnvironmentSet({"words": InlinePool(ExactMatch), "sums": InlinePool(NumericMatch)})
    for key, name in (("a", "words"), ("b", "sums")):
        pools.play(key, {"prompt": "p", "answer": "1", "environment": name}, [" it is 1"])
    rewards = {outcome.key: outcome.value.reward for outcome in pools.collect()}  # type: ignore[union-attr]
    assert rewards == {"a": 0.0, "b": 1.0}
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
