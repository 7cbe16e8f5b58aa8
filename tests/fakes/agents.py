"""An agent endpoint with an engine behind it, driven by a thread as a generator would."""

import json
import threading
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fakes.slowness import limit, until
from fakes.trajectories import sample

from umbra.proto.messages import ReturnedSample
from umbra.proto.records import Task, Trajectory
from umbra.services.config import EnvironmentConfig
from umbra.services.generator.agents.calls import CallRules
from umbra.services.generator.agents.pool import AgentPool, AgentSettings, bind
from umbra.services.generator.engines.engine import Engine
from umbra.services.generator.rollout import RolloutSettings
from umbra.services.generator.runner import RolloutRunner

WAIT_S = limit(30.0)
KEY = "only for agents"
AUTHORIZED = {"authorization": f"Bearer {KEY}"}


class AgentWorld:
    """Runs the samples that it is given until agents have ended them.

    Args:
        between: called in the driving thread after every step, for what happens between tokens.
    """

    def __init__(
        self,
        engine: Engine,
        settings: RolloutSettings,
        environment: EnvironmentConfig,
        *,
        key: str = "",
        advertise: str = "",
        between: Callable[[RolloutRunner], object] = lambda runner: None,
    ) -> None:
        self.environment, self.settings = environment, settings
        self._wake = threading.Event()
        rules = CallRules(settings.sampling, (), reads_calls=settings.chat.parser.calls)
        facts = AgentSettings(rules, "tiny", key, advertise)
        self.pool = AgentPool(environment, facts, bind("", key), wake=self._wake.set)
        self.url = self.pool.url
        self.runner = RolloutRunner(engine, self.pool, settings)
        self._between = between
        self._orders: deque[Callable[[], object]] = deque()  # for the driving thread
        self._finished: list[Trajectory] = []
        self._failed: list[ReturnedSample] = []
        self._fault: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._main, name="generator")
        self._thread.start()

    def add(self, *tasks: Task) -> None:
        self._orders.append(lambda: self.runner.add(tasks))
        self._wake.set()

    def drop(self, sample_id: str, attempt: int) -> None:
        """The lease on a sample is lost; returns when its session is over."""
        self._orders.append(lambda: self.runner.drop([(sample_id, attempt)]))
        self._wake.set()
        self._until(lambda: not self.runner.active, "end of the sample")

    def trajectory(self, quiet_s: float = 30.0) -> Trajectory:
        """The next sample that is finished; it fails if instead one has failed."""
        self._until(lambda: bool(self._finished or self._failed), "finished sample", quiet_s)
        assert self._finished, self._failed
        return self._finished.pop(0)

    def failed(self) -> str:
        """Why the next sample has failed."""
        self._until(lambda: bool(self._failed), "failed sample")
        return self._failed.pop(0).reason

    def lease(self, **asked: Any) -> Any:
        """The next session."""
        status, work = send(f"{self.url}/sessions", {"wait_s": WAIT_S, **asked})
        assert status == 201, work
        return work

    def begin(self, prompt: str = "go") -> Any:
        """The session of a new sample."""
        self.add(sample({"prompt": prompt}))
        return self.lease()

    def close(self) -> None:
        self.close_driver()
        self.pool.close()
        assert not self._thread.is_alive(), "the generator hangs"

    def close_driver(self) -> None:
        self._stop.set()
        self._wake.set()
        self._thread.join(WAIT_S)

    def _until(self, condition: Callable[[], bool], what: str, quiet_s: float = 30.0) -> None:
        until(lambda: condition() or self._fault, lambda: (what, self._failed), quiet_s=quiet_s)
        if self._fault is not None:
            raise self._fault

    def _main(self) -> None:
        try:
            while not self._stop.is_set():
                while self._orders:
                    self._orders.popleft()()
                self.runner.poll(0.0)
                self._between(self.runner)
                finished, failed = self.runner.results()
                self._finished += finished
                self._failed += failed
                if not self.runner.engine.busy:
                    self._wake.wait(0.02)
                    self._wake.clear()
        except Exception as error:  # noqa: BLE001 - raised in the test's own thread
            self._fault = error


def send(
    url: str, body: Any = None, *, method: str = "POST", headers: dict[str, str] = AUTHORIZED
) -> tuple[int, Any]:
    """Status and JSON of a request; `body` is JSON, or bytes as they are."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode() if body else None
    given = {"content-type": "application/json", **headers}
    request = urllib.request.Request(url, data, given, method=method)
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def ask(work: Any, *messages: dict[str, Any], **fields: Any) -> tuple[int, Any]:
    return send(f"{work['base_url']}/chat/completions", {"messages": list(messages), **fields})


def reward(work: Any, value: Any, **parts: Any) -> int:
    return send(f"{work['url']}/reward", {"reward": value, "parts": parts})[0]


def user(text: Any) -> Any:
    return {"role": "user", "content": text}


@contextmanager
def client(work: Any) -> Iterator[Any]:
    """The openai client of an agent that works on `work`."""
    from openai import OpenAI  # tests of a GPU's machine do without it

    with OpenAI(base_url=work["base_url"], api_key=KEY) as made:
        yield made
