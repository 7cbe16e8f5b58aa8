"""Functions of the user as agents, in processes beside the generator or of runners elsewhere."""

import asyncio
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fakes.agents import KEY, AgentWorld, ask, reward, send, user
from fakes.library_worlds import BackgroundRunner, LibraryPlay
from fakes.slowness import limit, seconds, until
from fakes.trajectories import sample

from umbra.proto.errors import UsageError
from umbra.proto.records import Task
from umbra.services.config import (
    EnvironmentConfig,
    GeneratorConfig,
    NamedEnvironment,
    RunConfig,
    SamplingConfig,
)
from umbra.services.environments import runner as runners
from umbra.services.environments.loading import load_environment
from umbra.services.environments.runner import Generators, run_agents
from umbra.services.generator.checks import check_environment
from umbra.services.generator.evaluate import evaluate_model
from umbra.services.generator.runner import MOST_LOSSES

USER_CODE = """
import asyncio, json, os, pathlib, time, urllib.request

def post(endpoint, path, body):
    headers = {"content-type": "application/json",
               "authorization": "Bearer " + endpoint["api_key"]}
    url = endpoint["base_url"] + path
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)

def talk(endpoint, turns=2):
    messages = [{"role": "user", "content": "go"}]
    for _ in range(turns):
        said = post(endpoint, "/chat/completions", {"messages": messages})
        messages += [said["choices"][0]["message"], {"role": "user", "content": "more"}]

def plain(row, endpoint, turns=2):
    assert os.environ["OPENAI_BASE_URL"] == endpoint["base_url"]
    assert os.environ["OPENAI_API_KEY"] == endpoint["api_key"]
    do = row["do"]
    if do == "silent":
        return 1.0
    talk(endpoint, turns)
    if do == "raise":
        raise KeyError("gold")
    if do == "hang":
        pathlib.Path("hangs").touch()
        time.sleep(600)
    if do == "exit":
        os._exit(3)
    if do == "nothing":
        return None
    if do == "text":
        return "1.0"
    if do == "post":
        post(endpoint, "/reward", {"reward": 0.75, "parts": {"tidy": 1.0}})
        return None
    if do == "linger":
        post(endpoint, "/reward", {"reward": 0.25})
        time.sleep(600)
    if do == "both":
        post(endpoint, "/reward", {"reward": 0.75})
        return 1.0
    return 0.5

async def together(row, endpoint):
    await asyncio.to_thread(talk, endpoint)
    if row["do"] == "hang":
        await asyncio.sleep(600)
    return float(os.getpid())
"""
PLAIN = EnvironmentConfig(kind="agent", agent="theirs:plain", workers=1)
NOBODY_YET = pytest.mark.parametrize("place", ["nowhere"])


@pytest.fixture
def play(library_play: LibraryPlay) -> LibraryPlay:
    """Makes a generator's endpoint whose agents are the user's, `theirs:plain` if none is named."""
    return partial(library_play, "agent", USER_CODE, "one", "two", "three", agent="theirs:plain")


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents reach the endpoint past a proxy."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")


def task(do: str = "") -> Task:
    return sample({"do": do}, sample_id=do or "good")


@pytest.mark.usefixtures("proxy")
@pytest.mark.parametrize("place", ["generator", "runner"])
def test_rewards_are_returned_or_posted(play: LibraryPlay) -> None:
    endpoint = play()
    for do, value, parts in (("", 0.5, {}), ("post", 0.75, {"tidy": 1.0})):
        endpoint.add(task(do))
        made = endpoint.trajectory()
        assert (made.reward, made.reward_parts, made.turns) == (value, parts, 2)


def test_what_an_agent_does_costs_its_own_sample_only(play: LibraryPlay) -> None:
    patience_s = seconds(1.0)
    endpoint = play(timeout_s=patience_s)
    faults = {
        "raise": "agent theirs:plain raised KeyError: 'gold'",
        "hang": f"asked for nothing for environment.timeout_s = {patience_s:g} s after turn 2",
        "exit": "the process of its environment ended (exit code 3)",
        "nothing": "its agent returned no reward, and has posted none",
        "text": "agent theirs:plain returned '1.0', which is not a finite number",
        "silent": "this session has no completion yet",
        "both": "this session has its reward already: 0.75",
    }
    for do, reason in faults.items():
        endpoint.add(task(do))
        assert reason in endpoint.failed()
    endpoint.add(task("linger"))
    assert endpoint.trajectory().reward == 0.25  # what hangs after that is ended


@pytest.mark.usefixtures("proxy")
def test_async_agents_share_a_process(play: LibraryPlay) -> None:
    endpoint = play(agent="theirs:together", timeout_s=seconds(1.0))
    endpoint.add(*(sample({"do": ""}, sample_id=f"s{i}") for i in range(8)), task("hang"))
    rewards = {endpoint.trajectory().reward for _ in range(8)}
    assert len(rewards) == 1
    assert "asked for nothing" in endpoint.failed()
    endpoint.add(task())
    assert endpoint.trajectory().reward in rewards  # what hung was ended, not its process


def test_a_model_is_evaluated_by_its_agent(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "theirs.py").write_text(USER_CODE)
    monkeypatch.chdir(tmp_path)
    config = RunConfig(
        environment=EnvironmentConfig(kind="agent", agent="theirs:plain", options={"turns": 1}),
        sampling=SamplingConfig(max_tokens=4),
        generator=GeneratorConfig(slots=2, max_context=64, device="cpu", threads=1),
    )
    result = evaluate_model(tiny_model_dir, [{"do": ""}], config, samples=3, greedy=True)
    assert (result.accuracy, result.failed, result.mean_turns) == (0.5, 0, 1.0)


@pytest.mark.parametrize(
    ("agent", "options", "says"),
    [
        ("theirs:plan", {}, "did you mean 'plain'"),
        ("nowhere:plain", {}, "no module 'nowhere'"),
        ("theirs:plain", {"turn": 1}, "environment.options do not fit"),
        ("", {}, "needs environment.agent"),
    ],
)
def test_an_agent_that_cannot_be_loaded_is_refused_without_running_it(
    play: LibraryPlay, agent: str, options: dict[str, Any], says: str
) -> None:
    Path("theirs.py").write_text(USER_CODE)
    config = EnvironmentConfig(kind="agent", agent=agent, options=options)
    with pytest.raises(UsageError, match=says):
        load_environment(config)
    if agent:  # else agents come from elsewhere
        with pytest.raises(UsageError, match=says):
            play(agent=agent, options=options)
    check_environment(RunConfig(environment=PLAIN if agent else config), {})


# -- runners --------------------------------------------------------------------------------------


def test_a_runner_that_is_told_to_end_leaves_in_order(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text("def plain(row, endpoint):\n    return 1.0\n")
    (tmp_path / "run.toml").write_text('[environment]\nkind = "agent"\nagent = "theirs:plain"\n')
    words = f"run-agents --config {tmp_path}/run.toml --generator http://127.0.0.1:9".split()
    environ = {**os.environ, "UMBRA_ENVIRONMENT__WORKERS": "0"}
    command = [sys.executable, "-m", "umbra", *words]
    with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as runner:
        assert runner.stderr is not None
        assert any("running [" in line for line in runner.stderr)
        runner.terminate()
        assert runner.wait(limit(30.0)) == 0


@pytest.mark.parametrize("place", ["runner"])
def test_a_silent_agent_fails_its_sample_and_is_ended(
    play: LibraryPlay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runners, "LEASE_S", 1.5)
    endpoint = play(timeout_s=seconds(1.0))
    endpoint.add(task("hang"))
    assert "asked for nothing for environment.timeout_s" in endpoint.failed()
    endpoint.add(task())
    assert endpoint.trajectory().reward == 0.5  # in the only process


def leased(endpoint: AgentWorld) -> Any:
    """The next session, for as long as it takes."""
    work = endpoint.lease(lease_s=1000.0)
    assert work["row"] == {"do": ""}
    return work


def said(work: Any, *messages: Any) -> list[Any]:
    """`messages` and what the model answers."""
    status, answer = ask(work, *messages)
    assert status == 200, answer
    return [*messages, answer["choices"][0]["message"]]


def renew(endpoint: AgentWorld, work: Any, lease_s: float) -> list[str]:
    asked = {"ids": [work["id"]], "lease_s": lease_s}
    status, answer = send(f"{endpoint.url}/sessions/renew", asked)
    assert status == 200, answer
    return answer["lost"]


@NOBODY_YET
def test_a_lease_that_is_not_renewed_begins_the_sample_again(play: LibraryPlay) -> None:
    endpoint = play()
    endpoint.add(task())
    first = leased(endpoint)
    turn = said(first, user("go"))
    decoded = endpoint.runner.engine.decoded_tokens
    assert renew(endpoint, first, 1000.0) == []
    assert renew(endpoint, first, 0.0) == []  # as if its time were over
    second = leased(endpoint)
    assert renew(endpoint, first, 9.0) == [first["id"]]
    assert reward(first, 1.0) == 410
    assert said(second, user("go")) == turn
    assert endpoint.runner.engine.decoded_tokens == decoded  # the recorded turn was given again
    said(second, *turn, user("more"))
    assert reward(second, 0.25) == 200
    renew(endpoint, second, 0.0)  # a session that is rewarded needs no lease
    trajectory = endpoint.trajectory()
    assert (trajectory.reward, trajectory.turns) == (0.25, 2)


@NOBODY_YET
def test_a_sample_whose_agents_are_lost_again_and_again_fails(play: LibraryPlay) -> None:
    endpoint = play()
    endpoint.add(task())
    for _ in range(MOST_LOSSES):
        renew(endpoint, leased(endpoint), 0.0)
    assert f"its agents were lost {MOST_LOSSES} times" in endpoint.failed()


@NOBODY_YET
def test_a_runner_that_ends_gives_its_sessions_back(
    play: LibraryPlay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runners, "LEASE_S", 1000.0)
    endpoint = play(timeout_s=600.0)
    runner = BackgroundRunner(endpoint.environment, endpoint.url)
    endpoint.add(task("hang"))
    until(lambda: (tmp_path / "hangs").exists(), "an agent at work")
    runner.close()
    assert endpoint.lease()["row"] == {"do": "hang"}  # long before its lease would have ended


@NOBODY_YET
def test_who_gets_sessions(play: LibraryPlay) -> None:
    endpoint = play()
    url = f"{endpoint.url}/sessions"
    for headers in ({}, {"authorization": "Bearer wrong"}):
        assert send(url, {"wait_s": 0}, headers=headers)[0] == 401
        assert send(f"{url}/renew", {"ids": [], "lease_s": 1}, headers=headers)[0] == 401
    status, refused = send(url, {"environment": "agent theirs:other"})
    assert (status, refused["error"]["code"]) == (404, "other_environment")
    assert "serves agent theirs:plain, not agent theirs:other" in refused["error"]["message"]
    for bad in ({"lease_s": -1}, {"lease_s": 4000}, {"lease_s": "x"}):
        assert send(url, bad)[0] == 400
    for bad in ({"ids": [], "lease_s": -1}, {"ids": ["x"] * 20_000, "lease_s": 1}, {"x": 1}):
        assert send(f"{url}/renew", bad)[0] == 400
    assert send(url, {"wait_s": 0})[1]["error"]["code"] == "no_work"


@NOBODY_YET
def test_a_runner_is_without_what_it_cannot_load_and_ends_if_that_is_all(play: LibraryPlay) -> None:
    endpoint = play()
    other = NamedEnvironment(name="other", kind="agent", agent="theirs:plane", workers=1)
    runner = BackgroundRunner([other, PLAIN], endpoint.url)
    endpoint.add(task())
    assert endpoint.trajectory().reward == 0.5
    runner.close()
    for only, key, says in (
        (other, KEY, "did you mean 'plain'"),
        (PLAIN, "wrong", "refuses the key: give both sides the same UMBRA_AGENT"),
    ):
        with pytest.raises(UsageError, match=says):
            asyncio.run(run_agents([only], Generators([endpoint.url], key), asyncio.Event()))


@NOBODY_YET
def test_a_runner_ends_when_its_generators_are_gone(
    play: LibraryPlay, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runners, "GONE_S", 1.0)
    monkeypatch.setattr(runners, "LEASE_S", 0.3)
    caplog.set_level("INFO")
    endpoint = play()
    runner = BackgroundRunner(endpoint.environment, endpoint.url)
    endpoint.add(task())
    assert endpoint.trajectory().reward == 0.5
    endpoint.close()
    until(lambda: runner.ended, "the runner's end")
    assert "no generator has answered for" in caplog.text
    runner.close()
