"""Agents that the run starts itself: functions of the user in processes of their own."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes.agents import AgentWorld
from fakes.engine import ScriptedEngine
from fakes.fixtures import Closes
from fakes.rollouts import STOP, says, settings
from fakes.slowness import limit, seconds
from fakes.trajectories import sample

from umbra.proto.errors import UsageError
from umbra.proto.records import Sampling, Task
from umbra.services.config import EnvironmentConfig, GeneratorConfig, RunConfig, SamplingConfig
from umbra.services.environments.loading import load_environment
from umbra.services.generator.checks import check_environment
from umbra.services.generator.evaluate import evaluate_model
from umbra.services.modeling.chat import Chat
from umbra.services.modeling.pretrained import load_tokenizer

USER_CODE = """
import asyncio, json, os, time, urllib.request

def post(url, body):
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)

def talk(base_url, turns=2):
    messages = [{"role": "user", "content": "go"}]
    for _ in range(turns):
        said = post(base_url + "/chat/completions", {"messages": messages})
        messages += [said["choices"][0]["message"], {"role": "user", "content": "more"}]
    return messages

def plain(row, endpoint, turns=2):
    assert os.environ["OPENAI_BASE_URL"] == endpoint["base_url"]
    assert os.environ["OPENAI_API_KEY"] == endpoint["api_key"]
    do = row["do"]
    if do == "silent":
        return 1.0
    talk(endpoint["base_url"], turns)
    if do == "raise":
        raise KeyError("gold")
    if do == "hang":
        time.sleep(600)
    if do == "exit":
        os._exit(3)
    if do == "nothing":
        return None
    if do == "text":
        return "1.0"
    if do == "post":
        post(endpoint["base_url"] + "/reward", {"reward": 0.75, "parts": {"tidy": 1.0}})
        return None
    if do == "linger":
        post(endpoint["base_url"] + "/reward", {"reward": 0.25})
        time.sleep(600)
    if do == "both":
        post(endpoint["base_url"] + "/reward", {"reward": 0.75})
        return 1.0
    return 0.5

async def together(row, endpoint):
    await asyncio.to_thread(talk, endpoint["base_url"])
    if row["do"] == "hang":
        await asyncio.sleep(600)
    if row["do"] == "block":
        time.sleep(600)
    return float(os.getpid())
"""
World = Callable[..., AgentWorld]


@pytest.fixture
def world(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, closes: Closes
) -> World:
    (tmp_path / "mine.py").write_text(USER_CODE)
    monkeypatch.chdir(tmp_path)
    tokenizer = load_tokenizer(tiny_model_dir)

    def make(agent: str, **options: Any) -> AgentWorld:
        chosen = settings(Chat(tokenizer, {STOP}), sampling=Sampling(), max_context=2048)
        environment = EnvironmentConfig(kind="agent", agent=agent, **{"workers": 1, **options})
        engine = ScriptedEngine(says(tokenizer, "one", "two", "three"))
        return closes(AgentWorld(engine, chosen, environment))

    return make


def task(name: str, do: str) -> Task:
    return sample({"do": do}, sample_id=name)


@pytest.mark.parametrize("agent", ["mine:plain", "mine:together"])
def test_agents_reach_the_endpoint_past_a_proxy(
    world: World, monkeypatch: pytest.MonkeyPatch, agent: str
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    made = world(agent)
    made.add(task("s0", ""))
    assert made.trajectory().turns == 2


def test_what_an_agent_does_costs_its_own_sample_only(world: World) -> None:
    patience_s = seconds(1.0)
    endpoint = world("mine:plain", timeout_s=patience_s)
    faults = {
        "raise": "agent mine:plain raised KeyError: 'gold'",
        "hang": f"asked for nothing for environment.timeout_s = {patience_s:g} s after turn 2",
        "exit": "the process of its environment ended (exit code 3)",
        "nothing": "its agent returned no reward, and has posted none",
        "text": "agent mine:plain returned '1.0', which is not a finite number",
        "silent": "this session has no completion yet",
        "both": "this session has its reward already: 0.75",
    }
    for do, reason in faults.items():
        endpoint.add(task(do, do))
        assert reason in endpoint.failed().reason
    endpoint.add(task("good", ""))
    trajectory = endpoint.trajectory()
    assert (trajectory.reward, trajectory.turns) == (0.5, 2)
    endpoint.add(task("posted", "post"))
    trajectory = endpoint.trajectory()
    assert (trajectory.reward, trajectory.reward_parts) == (0.75, {"tidy": 1.0})
    endpoint.add(task("rewarded", "linger"))
    assert endpoint.trajectory().reward == 0.25  # what hangs after that is ended


def test_async_agents_share_a_process(world: World) -> None:
    endpoint = world("mine:together", timeout_s=seconds(1.0))
    endpoint.add(*(task(f"s{i}", "") for i in range(8)), task("hung", "hang"))
    rewards = {endpoint.trajectory().reward for _ in range(8)}
    assert len(rewards) == 1
    assert endpoint.failed().sample_id == "hung"
    endpoint.add(task("next", ""))
    assert endpoint.trajectory().reward in rewards  # what hung was ended, not its process


def test_a_model_is_evaluated_by_its_agent(world: World, tiny_model_dir: Path) -> None:
    del world  # but for the module
    agent = EnvironmentConfig(kind="agent", agent="mine:plain", options={"turns": 1}, workers=1)
    config = RunConfig(
        environment=agent,
        sampling=SamplingConfig(max_tokens=4),
        generator=GeneratorConfig(slots=2, max_context=64, device="cpu", threads=1),
    )
    result = evaluate_model(tiny_model_dir, [{"do": ""}], config, samples=3, greedy=True)
    assert (result.accuracy, result.failed, result.mean_turns) == (0.5, 0, 1.0)


@pytest.mark.parametrize(
    ("agent", "options", "says"),
    [
        ("mine:plan", {}, "did you mean 'plain'"),
        ("nowhere:plain", {}, "no module 'nowhere'"),
        ("mine:plain", {"turn": 1}, "environment.options do not fit"),
        ("", {}, "needs environment.agent"),
    ],
)
def test_an_agent_that_cannot_be_loaded(
    world: World, agent: str, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        load_environment(EnvironmentConfig(kind="agent", agent=agent, options=options))
    if agent:
        with pytest.raises(UsageError, match=says):
            world(agent, options=options)


def test_a_check_loads_the_agent_without_running_it(world: World) -> None:
    check_environment(
        RunConfig(environment=EnvironmentConfig(kind="agent", agent="mine:plain")), {}
    )
    check_environment(RunConfig(environment=EnvironmentConfig(kind="agent")), {})
    with pytest.raises(UsageError, match="did you mean"):
        check_environment(
            RunConfig(environment=EnvironmentConfig(kind="agent", agent="mine:plan")), {}
        )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_runner_that_is_told_to_end_leaves_in_order(tmp_path: Path, number: int) -> None:
    (tmp_path / "mine.py").write_text("def plain(row, endpoint):\n    return 1.0\n")
    (tmp_path / "run.toml").write_text('[environment]\nkind = "agent"\nagent = "mine:plain"\n')
    words = f"run-agents --config {tmp_path}/run.toml --generator http://127.0.0.1:9".split()
    environ = {**os.environ, "UMBRA_ENVIRONMENT__WORKERS": "0"}
    before = signal.signal(number, signal.SIG_DFL)  # under nohup it would be ignored
    try:
        runner = subprocess.Popen(
            [sys.executable, "-m", "umbra", *words],
            cwd=tmp_path.parent, env=environ, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    finally:
        signal.signal(number, before)
    with runner:
        assert runner.stderr is not None
        assert any("running [" in line for line in runner.stderr)
        runner.send_signal(number)
        assert runner.wait(limit(30.0)) == 0
