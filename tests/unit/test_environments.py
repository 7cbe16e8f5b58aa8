"""Environments, their loader, and the pool that runs them."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from umbra.proto.errors import UsageError
from umbra.services.modeling.environment_pool import EnvironmentPool, Outcome
from umbra.services.modeling.environments import (
    ExactMatch,
    Guess,
    SampleError,
    StepResult,
    load_environment,
)
from umbra.services.runtime.config import Environment

USER_CODE = """
import numbers
def length(prompt, completion, row):
    return len(completion) / row["most"]
def text(prompt, completion, row):
    return "1.0"
def nothing(**_):
    return float("nan")
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
not_callable = 3
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a module of a user's into the working directory and return its name."""
    name = f"rewards_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(USER_CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_exact_match_compares_stripped_text() -> None:
    environment = ExactMatch()
    assert environment.reset({"prompt": "2+2", "answer": 4}) == [{"role": "user", "content": "2+2"}]
    assert environment.step(" 4\n") == StepResult(reward=1.0)
    assert environment.step("5").reward == 0.0


def test_exact_match_needs_an_answer() -> None:
    environment = ExactMatch()
    environment.reset({"prompt": "2+2"})
    with pytest.raises(SampleError, match='"answer"'):
        environment.step("4")


def test_a_row_without_a_prompt_is_named() -> None:
    with pytest.raises(SampleError, match='no "prompt"'):
        ExactMatch().reset({"answer": "4"})


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


def test_a_reward_function_from_a_file_in_the_working_directory(user_module: str) -> None:
    make = load_environment(Environment(kind="reward", reward=f"{user_module}:length"))
    environment = make()
    environment.reset({"prompt": "p", "most": 10})
    assert environment.step("abcd") == StepResult(reward=0.4)


@pytest.mark.parametrize(("function", "value"), [("text", "'1.0'"), ("nothing", "nan")])
def test_a_reward_that_is_no_number(user_module: str, function: str, value: str) -> None:
    environment = load_environment(Environment(kind="reward", reward=f"{user_module}:{function}"))()
    environment.reset({"prompt": "p"})
    with pytest.raises(SampleError, match=f"{function} returned {value}, which is not a finite"):
        environment.step("abcd")


@pytest.mark.parametrize(
    ("kind", "reward", "options", "says"),
    [
        ("exakt", "", {}, "did you mean 'exact'"),
        ("reward", "", {}, "needs environment.reward"),
        ("reward", "MODULE", {}, 'write it as "module:name"'),
        ("reward", "MODULE:lenght", {}, "no callable 'lenght'; did you mean 'length'"),
        ("reward", "MODULE:not_callable", {}, "no callable"),
        ("reward", "MODULEX:length", {}, "did you mean 'MODULE'"),
        ("MODULE:Half", "", {}, "has no method step"),
        ("MODULE:Echo", "", {"turnz": 3}, "environment.options do not fit"),
        ("guess", "", {"turns": 3}, "environment.options do not fit"),
    ],
)
def test_usage_errors(
    user_module: str, kind: str, reward: str, options: dict[str, Any], says: str
) -> None:
    config = Environment(
        kind=kind.replace("MODULE", user_module),
        reward=reward.replace("MODULE", user_module),
        options=options,
    )
    with pytest.raises(UsageError) as caught:
        load_environment(config)
    assert says.replace("MODULE", user_module) in str(caught.value)


# -- the pool -------------------------------------------------------------------------------------


class Waker:
    """Waits for outcomes without polling."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def __call__(self) -> None:
        self._event.set()

    def collect(self, pool: EnvironmentPool, count: int) -> dict[str, Outcome]:
        found: dict[str, Outcome] = {}
        while len(found) < count:
            assert self._event.wait(10)
            self._event.clear()
            found |= {outcome.key: outcome for outcome in pool.collect()}
        return found


@pytest.fixture
def waker() -> Waker:
    return Waker()


@pytest.fixture
def make_pool(waker: Waker) -> Iterator[Callable[..., EnvironmentPool]]:
    pools: list[EnvironmentPool] = []

    def make(**options: Any) -> EnvironmentPool:
        pools.append(EnvironmentPool(wake=waker, **{"timeout_s": 10.0, **options}))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def test_calls_run_beside_each_other(make_pool: Any, waker: Waker) -> None:
    pool = make_pool()
    meet = threading.Barrier(3, timeout=10)
    for key in "abc":
        pool.submit(key, "meeting", meet.wait)
    assert sorted(o.value for o in waker.collect(pool, 3).values()) == [0, 1, 2]
    assert pool.pending == 0


def test_an_instant_call_is_made_at_once(make_pool: Any) -> None:
    pool = make_pool()
    pool.submit("a", "naming", lambda: threading.current_thread().name, instant=True)
    assert pool.collect() == [Outcome("a", threading.current_thread().name)]


def test_async_functions_are_awaited(make_pool: Any, waker: Waker) -> None:
    async def later() -> int:
        await asyncio.sleep(0)
        return 7

    pool = make_pool()
    pool.submit("a", "sleeping", later)
    assert waker.collect(pool, 1)["a"].value == 7


def test_an_exception_becomes_the_reason(make_pool: Any, waker: Waker) -> None:
    pool = make_pool()
    pool.submit("a", "reward r:f", lambda: 1 / 0)
    error = waker.collect(pool, 1)["a"].error
    assert error == "reward r:f raised ZeroDivisionError: division by zero"


def test_a_hanging_call_is_given_up_and_its_thread_replaced(make_pool: Any, waker: Waker) -> None:
    now = [0.0]
    pool = make_pool(timeout_s=5.0, threads=1, clock=lambda: now[0])
    hanging, started = threading.Event(), threading.Event()

    def hang() -> None:
        started.set()
        hanging.wait(30)

    pool.submit("slow", "reward r:f", hang)
    pool.submit("next", "reward r:f", lambda: "fine")
    assert started.wait(10)
    assert pool.collect() == []
    now[0] = 5.5
    (overdue,) = pool.collect()
    assert overdue.error == "reward r:f took longer than environment.timeout_s = 5 s"
    assert waker.collect(pool, 1)["next"].value == "fine"
    hanging.set()  # its answer comes too late and goes nowhere
    pool.submit("last", "reward r:f", lambda: "fine too")
    assert waker.collect(pool, 1) == {"last": Outcome("last", "fine too")}
