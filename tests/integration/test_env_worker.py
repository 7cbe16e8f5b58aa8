"""Agents on a worker of their own: from the offer of a session to its reward, over HTTP."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fakes.agents import WAIT_S, AgentWorld, send
from fakes.engine import ScriptedEngine
from fakes.library_environments import TRL
from fakes.library_worlds import call
from fakes.rollouts import STOP, says, settings
from fakes.session_offers import KEY, Offers
from fakes.slowness import seconds
from fakes.trajectories import sample
from fakes.waiting import until

from umbra.proto.errors import UsageError
from umbra.proto.records import Sampling, SessionTask
from umbra.services.config import EnvironmentConfig, NamedEnvironment
from umbra.services.env_worker.host import AgentHost, EndedSession
from umbra.services.env_worker.hosts import AgentHosts
from umbra.services.modeling.chat import Chat
from umbra.services.modeling.models import load_tokenizer

pytestmark = pytest.mark.e2e

USER_CODE = """
import asyncio, json, os, time, urllib.request

def post(endpoint, path, body):
    headers = {"content-type": "application/json",
               "authorization": "Bearer " + endpoint["api_key"]}
    url = endpoint["base_url"] + path
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)

def plain(row, endpoint, turns=2):
    do = row["do"]
    if do == "silent":
        return 1.0
    messages = [{"role": "user", "content": "go"}]
    for _ in range(turns):
        said = post(endpoint, "/chat/completions", {"messages": messages})
        messages += [said["choices"][0]["message"], {"role": "user", "content": "more"}]
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
        post(endpoint, "/reward", {"reward": 0.75, "parts": {"tidy": 1.0}})
        return None
    if do == "both":
        post(endpoint, "/reward", {"reward": 0.75})
        return 1.0
    return 0.5

async def together(row, endpoint):
    await asyncio.to_thread(plain, {"do": ""}, endpoint)
    if row["do"] == "hang":
        await asyncio.sleep(600)
    return float(os.getpid())
"""


class Worker:
    """A generator's endpoint, and the agents of a worker for it."""

    def __init__(
        self, endpoint: AgentWorld, offered: queue.SimpleQueue[SessionTask], host: AgentHost
    ) -> None:
        self.endpoint, self.offered, self.host = endpoint, offered, host

    def play(self, do: str, name: str = "") -> SessionTask:
        """Have an agent do so on a new sample."""
        self.endpoint.add(sample({"do": do}, sample_id=name or do))
        task = self.offered.get(timeout=WAIT_S)
        self.host.begin(task)
        return task

    def ended(self) -> EndedSession:
        """The next session that has ended."""
        found: list[EndedSession] = []
        pause = threading.Event()
        for _ in range(int(WAIT_S / 0.05)):
            found += self.host.ended()
            if found:
                break
            pause.wait(0.05)
        (one,) = found
        return one


Make = Callable[..., Worker]


@pytest.fixture
def make(tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    (tmp_path / "mine.py").write_text(USER_CODE)
    (tmp_path / "theirs.py").write_text(TRL)
    monkeypatch.chdir(tmp_path)
    tokenizer = load_tokenizer(tiny_model_dir)
    made: list[Worker] = []

    def build(
        agent: str = "mine:plain", turns: Sequence[str] = ("one", "two", "three"), **options: Any
    ) -> Worker:
        chosen = settings(
            Chat(tokenizer, {STOP}), sampling=Sampling(), max_context=2048, agents=True
        )
        given = {"kind": "agent", "workers": 1, **options}
        environment = EnvironmentConfig(agent=agent, run_on="env_worker", **given)
        host = AgentHost(environment)
        offered: queue.SimpleQueue[SessionTask] = queue.SimpleQueue()
        offers = Offers(offered.put)
        engine = ScriptedEngine(says(tokenizer, *turns))
        endpoint = AgentWorld(engine, chosen, environment, key=KEY, offers=offers)
        offers.at(endpoint.url, KEY)
        made.append(Worker(endpoint, offered, host))
        return made[-1]

    yield build
    for each in made:
        each.host.close()
        each.endpoint.close()


def test_the_reward_of_an_agent_elsewhere(make: Make) -> None:
    worker = make()
    task = worker.play("")
    trajectory = worker.endpoint.trajectory()
    assert (trajectory.reward, trajectory.turns) == (0.5, 2)
    assert worker.ended() == EndedSession((task.sample_id, task.attempt))
    worker.play("post")
    trajectory = worker.endpoint.trajectory()
    assert (trajectory.reward, trajectory.reward_parts) == (0.75, {"tidy": 1.0})
    assert not worker.ended().failure


def test_a_worker_is_without_what_it_cannot_load(make: Make) -> None:
    make()  # puts the agent's module there
    here = NamedEnvironment(name="here", kind="agent", agent="mine:together", run_on="env_worker")
    other = NamedEnvironment(name="other", kind="agent", agent="absent:x", run_on="env_worker")
    with closing(AgentHosts.open([other, here], wake=lambda: None)) as hosts:
        assert list(hosts.rooms) == ["here"] and hosts.rooms["here"] >= 64
        strange = SessionTask(
            sample_id="s", attempt=1, url="http://h", environment="other", lease_s=9.0
        )
        hosts.begin(strange)
        (ended,) = hosts.ended()
        assert ended.lease == ("s", 1) and "'other'" in ended.unreachable
        hosts.forget([("s", 1)])
        assert hosts.ended() == []
    with pytest.raises(UsageError, match="absent"):
        AgentHosts.open([other], wake=lambda: None)


def test_an_environment_of_another_library_elsewhere(make: Make) -> None:
    worker = make(
        "",
        [call("add", '{"number": 2}')] * 2,
        kind="trl",
        id="theirs:Sums",
        options={"tool_rounds": 1},
        memory_mb=0,
        timeout_s=600.0,
        setup_s=300.0,
    )
    worker.endpoint.add(sample({"prompt": "add numbers", "target": 2}))
    worker.host.begin(worker.offered.get(timeout=WAIT_S))
    trajectory = worker.endpoint.trajectory()
    assert (trajectory.turns, trajectory.finish_reason) == (2, "turns")
    assert trajectory.reward_parts["tool_calls"] == 1.0
    assert not worker.ended().failure


def test_what_an_agent_does_costs_its_own_sample_only(make: Make) -> None:
    worker = make()
    faults = {
        "raise": "agent mine:plain raised KeyError: 'gold'",
        "exit": "the process of its environment ended (exit code 3)",
        "nothing": "its agent returned no reward, and has posted none",
        "text": "agent mine:plain returned '1.0', which is not a finite number",
        "silent": "the model has said nothing in this session",
    }
    for do, reason in faults.items():
        worker.play(do)
        assert reason in worker.endpoint.failed().reason
        assert reason in worker.ended().failure
    worker.play("both")
    assert worker.endpoint.trajectory().reward == 0.75  # the first one counts
    assert worker.ended().lease[0] == "both"
    worker.play("good")
    assert worker.endpoint.trajectory().reward == 0.5


def test_a_silent_agent_fails_its_sample_and_is_ended_when_it_is_forgotten(make: Make) -> None:
    worker = make(timeout_s=seconds(1.0))
    task = worker.play("hang")
    assert "asked for nothing for environment.timeout_s" in worker.endpoint.failed().reason
    worker.host.forget([(task.sample_id, task.attempt)])  # as the buffer tells at the next renewal
    worker.play("good")
    assert worker.endpoint.trajectory().reward == 0.5  # in the only process
    assert worker.ended().lease[0] == "good"  # nothing is told of the other


def test_async_agents_share_a_process(make: Make) -> None:
    worker = make("mine:together")
    assert worker.host.room == 64
    for index in range(8):
        worker.play("", f"s{index}")
    assert len({worker.endpoint.trajectory().reward for _ in range(8)}) == 1


def test_a_session_has_one_agent(make: Make) -> None:
    worker = make(timeout_s=600.0)
    worker.endpoint.add(sample({"do": "x"}))
    task = worker.offered.get(timeout=WAIT_S)
    key = {"authorization": f"Bearer {KEY}"}
    status, work = send(f"{task.url}/begin", headers=key)
    assert (status, work["row"]) == (201, {"do": "x"})
    status, refused = send(f"{task.url}/begin", headers=key)
    assert (status, refused["error"]["code"]) == (400, "session_begun")
    assert send(f"{task.url}/begin")[0] == 401
    assert send(f"{worker.endpoint.url}/sessions", {"wait_s": 0}, headers=key)[0] == 404
    worker.host.begin(task)
    assert worker.ended() == EndedSession((task.sample_id, task.attempt))  # nothing to do for it


def test_a_generator_that_is_not_there(make: Make) -> None:
    worker = make()
    task = SessionTask(sample_id="s", attempt=1, url="http://127.0.0.1:9/sessions/x", lease_s=30.0)
    worker.host.begin(task)
    ended = worker.ended()
    assert ended.lease == ("s", 1)
    assert "http://127.0.0.1:9/sessions/x/begin" in ended.unreachable


def test_a_sample_whose_agent_has_begun_takes_no_slot(make: Make) -> None:
    worker = make(timeout_s=600.0)
    worker.endpoint.add(sample({"do": "x"}))
    task = worker.offered.get(timeout=WAIT_S)
    assert worker.endpoint.runner.wanting == 1
    send(f"{task.url}/begin", headers={"authorization": f"Bearer {KEY}"})
    until(lambda: worker.endpoint.runner.wanting == 0, "an agent that began")
    assert worker.endpoint.runner.active == 1


def test_an_agent_that_cannot_be_loaded(make: Make) -> None:
    with pytest.raises(UsageError, match="did you mean 'plain'"):
        make("mine:plan")
