"""Agents on a machine of their own: a runner and a generator's endpoint, over HTTP."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from fakes.agents import AgentWorld, send
from fakes.engine import ScriptedEngine
from fakes.fixtures import Closes
from fakes.library_environments import TRL
from fakes.library_worlds import KEY, BackgroundRunner, call
from fakes.rollouts import STOP, says, settings
from fakes.slowness import seconds
from fakes.trajectories import sample
from fakes.waiting import until

from umbra.proto.errors import UsageError
from umbra.proto.records import Sampling
from umbra.services.config import EnvironmentConfig, NamedEnvironment
from umbra.services.environments import runner as runners
from umbra.services.environments.runner import Generators, run_agents
from umbra.services.generator.runner import MOST_LOSSES
from umbra.services.modeling.chat import Chat
from umbra.services.modeling.pretrained import load_tokenizer

AUTHORIZED = {"authorization": f"Bearer {KEY}"}
USER_CODE = """
import asyncio, json, os, pathlib, time, urllib.request

def post(endpoint, path, body):
    headers = {"content-type": "application/json",
               "authorization": "Bearer " + endpoint["api_key"]}
    url = endpoint["base_url"] + path
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)

def plain(row, endpoint, turns=2):
    do = row["do"]
    messages = [{"role": "user", "content": "go"}]
    for _ in range(turns):
        said = post(endpoint, "/chat/completions", {"messages": messages})
        messages += [said["choices"][0]["message"], {"role": "user", "content": "more"}]
    if do == "hang":
        pathlib.Path("hangs").touch()
        time.sleep(600)
    if do == "post":
        post(endpoint, "/reward", {"reward": 0.75, "parts": {"tidy": 1.0}})
        return None
    return 0.5
"""
Make = Callable[..., AgentWorld]


@pytest.fixture
def make(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, closes: Closes
) -> Make:
    """A generator's endpoint whose agents run in a runner, unless `runner` is false."""
    (tmp_path / "mine.py").write_text(USER_CODE)
    (tmp_path / "theirs.py").write_text(TRL)
    monkeypatch.chdir(tmp_path)
    tokenizer = load_tokenizer(tiny_model_dir)

    def build(
        agent: str = "mine:plain",
        turns: Sequence[str] = ("one", "two", "three"),
        *,
        runner: bool = True,
        **options: Any,
    ) -> AgentWorld:
        chosen = settings(Chat(tokenizer, {STOP}), sampling=Sampling(), max_context=2048)
        environment = EnvironmentConfig(agent=agent, **{"kind": "agent", "workers": 0, **options})
        engine = ScriptedEngine(says(tokenizer, *turns))
        endpoint = closes(AgentWorld(engine, chosen, environment, key=KEY))
        if runner:
            closes(BackgroundRunner(environment, endpoint.url))
        return endpoint

    return build


def lease(endpoint: AgentWorld, **asked: Any) -> tuple[int, Any]:
    return send(f"{endpoint.url}/sessions", {"wait_s": seconds(20), **asked}, headers=AUTHORIZED)


def ask(work: Any, text: str, *, after: list[Any] | None = None) -> list[Any]:
    messages = [*(after or []), {"role": "user", "content": text}]
    url = work["base_url"] + "/chat/completions"
    status, said = send(url, {"messages": messages}, headers=AUTHORIZED)
    assert status == 200, said
    return [*messages, said["choices"][0]["message"]]


def renew(endpoint: AgentWorld, work: Any, lease_s: float) -> list[str]:
    asked = {"ids": [work["id"]], "lease_s": lease_s}
    status, answer = send(f"{endpoint.url}/sessions/renew", asked, headers=AUTHORIZED)
    assert status == 200, answer
    return answer["lost"]


def test_the_reward_of_an_agent_elsewhere(make: Make) -> None:
    endpoint = make()
    endpoint.add(sample({"do": ""}))
    trajectory = endpoint.trajectory()
    assert (trajectory.reward, trajectory.turns) == (0.5, 2)
    endpoint.add(sample({"do": "post"}))
    trajectory = endpoint.trajectory()
    assert (trajectory.reward, trajectory.reward_parts) == (0.75, {"tidy": 1.0})


def test_an_environment_of_another_library_elsewhere(make: Make) -> None:
    endpoint = make(
        "",
        [call("add", '{"number": 2}')] * 2,
        kind="trl",
        id="theirs:Sums",
        options={"tool_rounds": 1},
        memory_mb=0,
        timeout_s=600.0,
        setup_s=300.0,
    )
    endpoint.add(sample({"prompt": "add numbers", "target": 2}))
    trajectory = endpoint.trajectory()
    assert (trajectory.turns, trajectory.finish_reason) == (2, "turns")
    assert trajectory.reward_parts["tool_calls"] == 1.0


def test_a_silent_agent_fails_its_sample_and_is_ended(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runners, "LEASE_S", 1.5)
    endpoint = make(timeout_s=seconds(1.0))
    endpoint.add(sample({"do": "hang"}))
    assert "asked for nothing for environment.timeout_s" in endpoint.failed().reason
    endpoint.add(sample({"do": "good"}))
    assert endpoint.trajectory().reward == 0.5  # in the only process


def test_a_lease_that_is_not_renewed_begins_the_sample_again(make: Make) -> None:
    endpoint = make(runner=False)
    endpoint.add(sample({"do": ""}))
    status, first = lease(endpoint, lease_s=1000.0)
    assert status == 201
    said = ask(first, "go")
    decoded = endpoint.runner.engine.decoded_tokens
    assert renew(endpoint, first, 1000.0) == []
    assert renew(endpoint, first, 0.0) == []  # as if its time were over
    status, second = lease(endpoint, lease_s=1000.0)
    assert (status, second["row"]) == (201, {"do": ""})
    assert renew(endpoint, first, 9.0) == [first["id"]]
    assert send(f"{first['url']}/reward", {"reward": 1.0}, headers=AUTHORIZED)[0] == 410
    assert ask(second, "go") == said
    assert endpoint.runner.engine.decoded_tokens == decoded  # the recorded turn was given again
    ask(second, "more", after=said)
    status, _ = send(f"{second['url']}/reward", {"reward": 0.25}, headers=AUTHORIZED)
    assert status == 200
    trajectory = endpoint.trajectory()
    assert (trajectory.reward, trajectory.turns) == (0.25, 2)


def test_a_rewarded_session_needs_no_lease(make: Make) -> None:
    endpoint = make(runner=False)
    endpoint.add(sample({"do": ""}))
    _, work = lease(endpoint, lease_s=1000.0)
    ask(work, "go")
    assert send(f"{work['url']}/reward", {"reward": 1.0}, headers=AUTHORIZED)[0] == 200
    renew(endpoint, work, 0.0)
    assert endpoint.trajectory().reward == 1.0


def test_a_sample_whose_agents_are_lost_again_and_again_fails(make: Make) -> None:
    endpoint = make(runner=False)
    endpoint.add(sample({"do": ""}))
    for _ in range(MOST_LOSSES):
        status, work = lease(endpoint, lease_s=1000.0)
        assert status == 201
        renew(endpoint, work, 0.0)
    assert f"its agents were lost {MOST_LOSSES} times" in endpoint.failed().reason


def test_a_runner_that_ends_gives_its_sessions_back(make: Make, tmp_path: Path) -> None:
    endpoint = make(runner=False, timeout_s=600.0)
    runner = BackgroundRunner(endpoint.environment, endpoint.url)
    endpoint.add(sample({"do": "hang"}))
    until(lambda: (tmp_path / "hangs").exists(), "an agent at work")
    runner.close()
    status, work = lease(endpoint)  # long before the lease of the runner would have ended
    assert (status, work["row"]) == (201, {"do": "hang"})


def test_who_gets_sessions(make: Make) -> None:
    endpoint = make(runner=False)
    url = f"{endpoint.url}/sessions"
    for headers in (None, {"authorization": "Bearer wrong"}):
        assert send(url, {"wait_s": 0}, headers=headers)[0] == 401
        assert send(f"{url}/renew", {"ids": [], "lease_s": 1}, headers=headers)[0] == 401
    status, refused = lease(endpoint, environment="agent mine:other")
    assert (status, refused["error"]["code"]) == (404, "other_environment")
    assert "serves agent mine:plain, not agent mine:other" in refused["error"]["message"]
    for bad in ({"lease_s": -1}, {"lease_s": 4000}, {"lease_s": "x"}):
        assert lease(endpoint, **bad)[0] == 400
    for bad in ({"ids": [], "lease_s": -1}, {"ids": ["x"] * 20_000, "lease_s": 1}, {}):
        assert send(f"{url}/renew", bad or {"x": 1}, headers=AUTHORIZED)[0] == 400
    assert lease(endpoint, wait_s=0)[1]["error"]["code"] == "no_work"


async def run_until(environments: Sequence[EnvironmentConfig], *urls: str, key: str = KEY) -> None:
    await run_agents(environments, Generators(urls, key), asyncio.Event())


def test_a_wrong_key_ends_a_runner(make: Make) -> None:
    endpoint = make(runner=False)
    agent = EnvironmentConfig(kind="agent", agent="mine:plain", workers=1)
    with pytest.raises(UsageError, match="refuses the key: give both sides the same UMBRA_AGENT"):
        asyncio.run(run_until([agent], endpoint.url, key="wrong"))


def test_a_runner_is_without_what_it_cannot_load(make: Make, tmp_path: Path) -> None:
    endpoint = make(runner=False)
    here = EnvironmentConfig(kind="agent", agent="mine:plain", workers=1)
    other = NamedEnvironment(name="other", kind="agent", agent="mine:plane", workers=1)
    with pytest.raises(UsageError, match="did you mean 'plain'"):
        asyncio.run(run_until([other], "http://127.0.0.1:9"))
    runner = BackgroundRunner([other, here], endpoint.url)
    endpoint.add(sample({"do": ""}))
    assert endpoint.trajectory().reward == 0.5
    runner.close()


def test_a_runner_ends_when_its_generators_are_gone(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runners, "GONE_S", 1.0)
    monkeypatch.setattr(runners, "LEASE_S", 0.3)
    caplog.set_level("INFO")
    endpoint = make(runner=False)
    runner = BackgroundRunner(endpoint.environment, endpoint.url)
    endpoint.add(sample({"do": ""}))
    assert endpoint.trajectory().reward == 0.5
    endpoint.close()
    until(lambda: runner.ended, "the runner's end")
    assert "no generator has answered for" in caplog.text
    runner.close()
