"""Ready-made environments, tools, reward functions, and several environments in a run."""

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest
from fakes.trajectories import trajectory

from umbra.proto.errors import UsageError
from umbra.services.config import EnvironmentConfig, RunConfig
from umbra.services.config.loader import as_dict, load_config, to_json, to_toml
from umbra.services.config.rules import check_feasible
from umbra.services.environments.built_in import ExactMatch, Guess, NumericMatch
from umbra.services.environments.loading import load_environment, runs_inline
from umbra.services.environments.pool import EnvironmentSet, InlinePool
from umbra.services.environments.protocol import (
    EpisodeOutcome,
    Opening,
    ParsedTurn,
    Response,
    Row,
    SampleError,
    StepResult,
    schema,
    tool_schema,
)
from umbra.services.environments.rewards import (
    RewardedGroup,
    RewardedTurn,
    RewardFunction,
    Rewards,
)
from umbra.services.environments.tools import ToolUse, calculator
from umbra.services.modeling.run_file import located
from umbra.services.trainer.metrics import environment_metrics

USER_CODE = """
length = len
class Echo:
    def __init__(self, turns=2):
        self.turns = turns
    async def reset(self, row):
        return [{"role": "user", "content": row["prompt"]}]
    async def step(self, response):
        raise NotImplementedError
class Half:
    def reset(self, row):
        return []
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_modules: None) -> None:
    """Write a module of a user's, MODULE, into the working directory."""
    (tmp_path / "MODULE.py").write_text(USER_CODE)
    monkeypatch.chdir(tmp_path)


def outcome_of(pool: InlinePool, row: Row, *responses: str) -> EpisodeOutcome:
    pool.play("s", {"prompt": "p", **row}, [*responses])
    (outcome,) = pool.collect()
    return outcome


def test_guess_gives_hints_until_a_hit_or_the_last_try() -> None:
    environment = Guess()
    environment.reset({"prompt": "guess", "answer": "6"})
    for said, hint in (("3", ">"), ("9", "<"), ("x", "?")):
        result = environment.step(said)
        assert (result.done, result.messages[0]["content"]) == (False, hint)
    assert environment.step("6") == StepResult(reward=1.0)
    environment.reset({"prompt": "guess", "answer": "6"})
    results = [environment.step("1") for _ in range(4)]
    assert [r.done for r in results] == [False, False, False, True]
    assert (results[-1].reward, results[-1].reason) == (0.0, "turns")


@pytest.mark.usefixtures("user_module")
def test_usage_errors() -> None:
    for kind, reward, options, says in (
        ("exakt", "", {}, "did you mean 'exact'"),
        ("reward", "", {}, "needs environment.reward"),
        ("reward", "MODULE", {}, 'write it as "module:name"'),
        ("reward", "MODULE:lenght", {}, "no callable 'lenght'; did you mean 'length'"),
        ("reward", "MODULEX:length", {}, "did you mean 'MODULE'"),
        ("MODULE:Half", "", {}, "has no method step"),
        ("MODULE:Echo", "", {"turnz": 3}, "environment.options do not fit"),
        ("numeric", "", {"tolerance": -1}, "tolerance must be 0 or more"),
        ("tools", "", {"tools": "calculator"}, "must be a list of calculator"),
        ("tools", "", {"tools": ["calculater"]}, "did you mean 'calculator'"),
    ):
        with pytest.raises(UsageError) as caught:
            load_environment(EnvironmentConfig(kind=kind, reward=reward, options=options))
        assert says in str(caught.value)


def test_answers_are_compared() -> None:
    for kind, response, answer, reward in (
        ("exact", " 4\n", 4, 1.0),  # stripped text
        ("exact", "5", 4, 0.0),
        ("numeric", "so it is 1,234.", "1234", 1.0),  # the last number
        ("numeric", "7 or 8", 7, 0.0),
        ("numeric", "-2.50", "-2.5", 1.0),
        ("numeric", "1e3", 1000, 1.0),
        ("math", "thus $\\boxed{\\frac{1}{2}}$", "\\frac{2}{4}", 1.0),  # equal forms
        ("math", "0.5", "\\frac{2}{4}", 1.0),
        ("math", "0.6", "\\frac{2}{4}", 0.0),
    ):
        pool = InlinePool(load_environment(EnvironmentConfig(kind=kind)))
        outcome = outcome_of(pool, {"answer": answer}, response)
        assert isinstance(outcome.value, StepResult), outcome.error
        assert outcome.value.reward == reward


def test_only_what_is_ours_and_quick_runs_inline() -> None:
    inline = {"exact": True, "guess": True, "tools": True, "math": False, "reward": False}
    assert {kind: runs_inline(EnvironmentConfig(kind=kind)) for kind in inline} == inline
    assert not runs_inline(EnvironmentConfig(kind="tools", options={"tools": ["mine:search"]}))
    assert not runs_inline(EnvironmentConfig(kind="mine:World"))


class Opens:
    """Opens a conversation with what the row has of it."""

    def reset(self, row: Row) -> Opening:
        return Opening(row["messages"], row["tools"])

    def step(self, response: str) -> StepResult:
        raise NotImplementedError


USER = {"role": "user", "content": "go"}
CALLED = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}


def test_what_no_template_can_write_fails_the_sample() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    parts = [{"type": "text", "text": "x"}]
    texts = [[{**USER, "content": content}] for content in (None, 5, parts)]
    for messages, tools, says in (
        ([USER, CALLED], [tool], ""),
        *((wrong, [], "whose contents are texts") for wrong in (*texts, [{**USER, 1: 2}], USER)),
        ([{"role": "user"}], [], "whose contents are texts"),
        ([USER], None, "reset gave tools None"),
        ([USER], [{"name": "f"}], "instead of schemas"),
    ):
        outcome = outcome_of(InlinePool(Opens, "mine"), {"messages": messages, "tools": tools})
        assert says in outcome.error
        assert (outcome.value is None) == bool(says)


# -- tools: calls, answers to the model, schemas ---------------------------------------------------


def call(expression: Any, name: str = "calculator", argument: str = "expression") -> ParsedTurn:
    function = {"name": name, "arguments": {argument: expression}}
    return ParsedTurn(text="called", tool_calls=[{"type": "function", "function": function}])


def step(environment: ToolUse, said: ParsedTurn | str) -> StepResult:
    return asyncio.run(environment.step(Response.of(said)))


def test_the_calculator_calculates_or_refuses() -> None:
    for expression, says in (
        ("1 +", "is not an arithmetic expression"),
        ("__import__('os')", "is not arithmetic"),
        ("9**9**9", "the power is too large"),
        ("(-8)**0.5", "not a real number"),
        ("'a'*3", "is not arithmetic"),
        ("1" * 300, "longer than"),
    ):
        assert calculator("(1-2)**3 + 1e3 % 7 + 3*4 - 7/2") == "13.5"
        assert calculator(" -7 // 2 ") == "-4"
        with pytest.raises(ValueError, match=says.replace("*", "[*]")):
            calculator(expression)


def test_a_tool_is_called_and_its_answer_goes_back() -> None:
    environment = ToolUse()
    opening = environment.reset({"prompt": "2+3?", "answer": "5"})
    assert isinstance(opening, Opening)
    assert opening.tools == [schema(calculator)]
    result = step(environment, call("2+3"))
    assert (result.done, result.reward) == (False, 0.0)
    assert result.messages == [{"role": "tool", "content": "5"}]
    assert step(environment, "It is 5.") == StepResult(reward=1.0)


def test_a_wrong_call_costs_a_turn_and_nothing_else() -> None:
    for response, says in (
        (call("3", name="search"), "there is no tool 'search', only calculator"),
        (call("3", argument="text"), "missing a required argument: 'expression'"),
        (call("1/0"), "calculator: division by zero"),
        (call(3), "calculator: "),
        (ParsedTurn(text="x", content="x", problem="it is not closed"), "it is not closed"),
    ):
        environment = ToolUse(calls=2)
        environment.reset({"prompt": "2+3?", "answer": "5"})
        result = step(environment, response)
        assert result.messages[0]["content"].startswith("error: ")
        assert says in result.messages[0]["content"]
        assert result.reward_parts == {"tool_calls": 1.0, "malformed_calls": 1.0}
        last = step(environment, response)
        assert (last.done, last.reason, last.reward) == (True, "turns", 0.0)


def test_a_schema_says_what_a_function_takes() -> None:
    def search(query: str, limit: int = 3, *, exact: bool = False) -> str:
        """Find documents.

        More words.
        """
        return query * limit * exact

    given = {"type": "function", "function": {"name": "other"}}
    opening = Opening([], [search, given])
    assert opening.tools == [schema(search), given]
    kinds = {"query": "string", "limit": "integer", "exact": "boolean"}
    properties = {name: {"type": kind} for name, kind in kinds.items()}
    parameters = {"type": "object", "properties": properties, "required": ["query"]}
    assert schema(search) == tool_schema("search", "Find documents.", parameters)


# -- reward functions: ours and TRL's, one or several, for one sample or a whole group ------------

ROW = {"prompt": "say", "target": "hi"}
CHAT = {**ROW, "prompt": [{"role": "user", "content": "say"}]}


def ours(prompt: Any, completion: str, row: Row) -> float:
    assert prompt == row["prompt"]
    return float(completion == row["target"])


def trls(prompts: list[Any], completions: list[Any], target: list[str], **kwargs: Any) -> list[Any]:
    assert len(prompts) == len(completions) == len(target) == 1
    kwargs["log_metric"]("seen", 2.0)
    kwargs["log_extra"]("column", ["text"])
    (completion,) = completions
    text = completion if isinstance(completion, str) else completion[0]["content"]
    return [len(text)]


async def later(completions: list[Any], **kwargs: Any) -> list[float]:
    await asyncio.sleep(0)
    return [0.5]


def never(completions: list[Any], **kwargs: Any) -> list[None]:
    return [None]


def rank(prompts: list[Any], completions: list[str], target: list[str], **kwargs: Any) -> Any:
    assert (prompts, target) == (["say"] * len(completions), ["hi"] * len(completions))
    kwargs["log_metric"]("different", float(len(set(completions))))
    return [sum(len(other) < len(own) for other in completions) for own in completions]


def only_some(completions: list[str], **kwargs: Any) -> list[float | None]:
    return [1.0 if own == "hi" else None for own in completions]


async def alone(prompt: Any, completion: str, row: Row) -> float:
    await asyncio.sleep(0)
    return ours(prompt, completion, row)


def scored(
    row: Row, said: str | list[str], *functions: tuple[Any, float], named: bool = True
) -> Any:
    """Return the result of one sample, or all of a group if `said` is a list."""
    made = [RewardFunction(f, f"mine:{f.__name__}", weight) for f, weight in functions]
    turn, group = RewardedTurn(Rewards(made, named=named)), RewardedGroup(Rewards(made))

    async def wait() -> StepResult | list[StepResult]:
        turn.reset(row)
        group.reset(row)
        answer = turn.step(said) if isinstance(said, str) else group.step_all(said)
        return await answer if isinstance(answer, Awaitable) else answer

    return asyncio.run(wait())


def test_values_count_by_their_weights_and_are_named() -> None:
    result = scored(ROW, "hi", (ours, 2.0), (trls, 0.5), (later, 1.0), (never, 9.0))
    assert result.reward == 2.0 + 1.0 + 0.5
    assert result.reward_parts == {"ours": 1.0, "trls": 2.0, "later": 0.5, "seen": 2.0}
    assert scored(ROW, "hi", (ours, 1.0), named=False) == StepResult(reward=1.0)
    assert scored(CHAT, "hello", (trls, 1.0)).reward == 5.0


def test_a_function_gets_all_samples_of_a_group_or_each() -> None:
    found = scored(ROW, ["hi", "hello", ""], (rank, 0.5))
    assert [one.reward for one in found] == [0.5, 1.0, 0.0]
    assert found[1].reward_parts == {"rank": 2.0, "different": 3.0}
    found = scored(ROW, ["hi", "hello", ""], (rank, 1.0), (alone, 10.0), (only_some, 100.0))
    assert [one.reward for one in found] == [111.0, 2.0, 0.0]
    assert found[0].reward_parts["only_some"] == 1.0
    assert "only_some" not in found[1].reward_parts


EACH = "instead of a list with one number for each of 3 completions"
GROUP = ["a", "b", "c"]


def test_what_is_no_reward_fails_the_sample_or_its_group() -> None:
    for said, returned, says in (
        ("hi", [1.0, 2.0], "instead of a list with one number"),
        ("hi", [None], "all"),
        ("hi", [float("nan")], "returned nan, which is not a finite number"),
        (GROUP, 0.5, EACH),
        (GROUP, [1.0, None, 1.0], "no reward function has a reward for this sample"),
        (GROUP, [1.0, "2", 1.0], "'2', which is not a finite number"),
    ):

        def function(completions: list[Any], returned: Any = returned, **kwargs: Any) -> Any:
            return returned

        with pytest.raises(SampleError, match=says):
            scored(ROW, said, (function, 1.0))


def test_a_function_that_cannot_be_called_so_is_refused() -> None:
    def function(completions: list[Any], trainer_state: Any, **kwargs: Any) -> Any:
        return [1.0]

    own = EnvironmentConfig(kind="reward", reward=f"{__name__}:alone", reward_scope="group")
    with pytest.raises(UsageError, match=":alone has no function with the parameter completions"):
        load_environment(own)
    with pytest.raises(UsageError, match="mine:f needs the argument trainer_state"):
        RewardFunction(function, "mine:f")
    assert RewardFunction(later, "mine:later").waits


# -- several environments in a run: configuration, limits, pools, metrics --------------------------

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


def test_a_run_file_wrong_about_them_is_refused(tmp_path: Path) -> None:
    for text, says in (
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
    ):
        with pytest.raises(UsageError, match=says):
            loaded(tmp_path, text)


def test_what_cannot_work_is_refused_before_a_start(tmp_path: Path) -> None:
    for extra, says in (
        ("[environment]\nkind = 'numeric'", "are both set"),
        ("[buffer]\nstages = ['reward']", "stages has reward: set reward_scope = group in"),
        ("[[environments]]\nname = 'x'\nkind = 'trl'", "environments.x.kind = trl needs"),
        ("[[environments]]\nname = 'x'\nid = 'm:C'", "environments.x.id = m:C has no effect"),
        (f"{THEIRS}max_turns = 2", "environments.x.max_turns is not for verifiers"),
        (
            f"{THEIRS}{THEIRS.replace('x', 'z')}[generator]\nserve_advertise = 'proxy:80'",
            "proxy:80 has a port",
        ),
    ):
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
        **dict.fromkeys(["environment/sums/reward", "environment/sums/response_length"]),
    }
