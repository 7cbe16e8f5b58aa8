"""An agent endpoint with an engine behind it, driven by a thread as a generator would."""

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fakes.slowness import limit
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
Make = Callable[..., "AgentWorld"]  # from an engine, a temperature and more options


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
        stop_tokens: tuple[str, ...] = (),
        advertise: str = "",
        between: Callable[[RolloutRunner], object] = lambda runner: None,
    ) -> None:
        self.environment = environment
        self.failure: Exception | None = None
        self._wake = threading.Event()
        self._settings = settings
        calls = settings.chat.parser.calls
        rules = CallRules(settings.sampling, stop_tokens, reads_calls=calls)
        self.rules = rules
        self.pool = AgentPool(
            environment,
            AgentSettings(rules, "tiny", key, advertise),
            bind("", key),
            wake=self._wake.set,
        )
        self.url = self.pool.url
        self.runner = RolloutRunner(engine, self.pool, settings)
        self._between = between
        self._added: list[Task] = []
        self._dropped: list[tuple[str, int]] = []
        self._finished: list[Trajectory] = []
        self._failed: list[ReturnedSample] = []
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._main, name="generator")
        self._thread.start()

    def add(self, *tasks: Task) -> None:
        with self._changed:
            self._added += tasks
        self._wake.set()

    def drop(self, sample_id: str, attempt: int) -> None:
        """The lease on a sample is lost; returns when its session is over."""
        with self._changed:
            self._dropped.append((sample_id, attempt))
        self._wake.set()
        self._until(lambda: not self._dropped and not self.runner.active, "end of the sample")

    def trajectory(self, wait_s: float = WAIT_S) -> Trajectory:
        """The next sample that is finished; it fails if instead one has failed."""
        self._until(lambda: bool(self._finished or self._failed), "a finished sample", wait_s)
        assert self._finished, self._failed
        return self._finished.pop(0)

    def failed(self) -> ReturnedSample:
        self._until(lambda: bool(self._failed), "a failed sample")
        return self._failed.pop(0)

    def lease(self, wait_s: float = WAIT_S, headers: dict[str, str] | None = None) -> Any:
        status, work = send(f"{self.url}/sessions", {"wait_s": wait_s}, headers=headers)
        assert status == 201, work
        return work

    def close(self) -> None:
        self._stop.set()
        self._wake.set()
        self._thread.join(WAIT_S)
        self.pool.close()
        assert not self._thread.is_alive(), "the generator hangs"

    def _until(self, condition: Callable[[], bool], what: str, wait_s: float = WAIT_S) -> None:
        with self._changed:
            met = self._changed.wait_for(lambda: condition() or self.failure is not None, wait_s)
        if self.failure is not None:
            raise self.failure
        assert met, f"no {what}; failed: {self._failed}"

    def _main(self) -> None:
        try:
            while not self._stop.is_set():
                self._turn()
        except Exception as error:  # noqa: BLE001 - raised in the test's own thread
            self.failure = error
            with self._changed:
                self._changed.notify_all()

    def _turn(self) -> None:
        with self._changed:
            added, self._added = self._added, []
            if self._dropped:
                self.runner.drop(self._dropped)
                self._dropped.clear()
                self._changed.notify_all()
        self.runner.add(added)
        self.runner.poll(0.0)
        self._between(self.runner)
        finished, failed = self.runner.results()
        if finished or failed:
            with self._changed:
                self._finished += finished
                self._failed += failed
                self._changed.notify_all()
        if not self.runner.engine.busy:
            self._wake.wait(0.02)
            self._wake.clear()


def send(
    url: str, body: Any = None, *, method: str = "POST", headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    """Status and JSON of a request; `body` is JSON, or bytes as they are."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode() if body else None
    given = {"content-type": "application/json", **(headers or {})}
    request = urllib.request.Request(url, data, given, method=method)
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def reward(work: Any, value: Any, **parts: float) -> tuple[int, Any]:
    return send(f"{work['url']}/reward", {"reward": value, "parts": parts})


@contextmanager
def client(work: Any, **options: Any) -> Iterator[Any]:
    """The openai client of an agent that works on `work`."""
    from openai import OpenAI  # tests of a GPU's machine do without it

    with OpenAI(**{"base_url": work["base_url"], "api_key": "none", **options}) as made:
        yield made


class Interruption:
    """Takes all samples back once the engine has decoded `cut` more tokens."""

    def __init__(self, engine: Engine, cut: int) -> None:
        self.begun = False
        self.over = threading.Event()
        self.returned: list[ReturnedSample] = []
        self._engine = engine
        self._until = engine.decoded_tokens + cut

    def __call__(self, runner: RolloutRunner) -> None:
        if not self.begun and self._engine.decoded_tokens >= self._until:
            self.begun = True
            self.returned = runner.drain("next")
            self.over.set()


def converse(endpoint: AgentWorld, hints: list[str]) -> bool:
    """An agent that says each of `hints` in turn; whether it came to its end."""
    work = endpoint.lease()
    messages: list[Any] = [{"role": "user", "content": work["row"]["prompt"]}]
    for hint in hints:
        status, said = send(work["base_url"] + "/chat/completions", {"messages": messages})
        if status == 410:
            return False
        assert status == 200, said
        messages += [said["choices"][0]["message"], {"role": "user", "content": hint}]
    assert reward(work, float(len(messages)))[0] == 200
    return True


def play(
    make: Make,
    engine_of: Callable[[int], Engine],
    cuts: list[int],
    hints: Callable[[int], list[str]],
) -> Trajectory:
    """The greedy trajectory of an agent that the next generator goes on with after each cut.

    Args:
        make: makes an endpoint over an engine.
        engine_of: an idle engine that serves the version of this number.
        cuts: tokens after which the sample is handed back.
        hints: what the agent says at this attempt, from the first on.
    """
    partial = None
    for attempt, cut in enumerate([*cuts, 10_000], start=1):
        engine = engine_of(attempt)
        interruption = Interruption(engine, cut)
        endpoint = make(engine, 0.0, between=interruption)
        endpoint.add(sample({"prompt": "talk"}, attempt=attempt, trajectory=partial))
        done = False
        while not interruption.begun and not done:  # a sample that restarts has another session
            done = converse(endpoint, hints(attempt))
        if done:
            trajectory = endpoint.trajectory()
            endpoint.close()
            return trajectory
        assert interruption.over.wait(WAIT_S)
        endpoint.close()  # the engine may be the next one's, too
        partial = interruption.returned[0].partial
    raise AssertionError("it does not end")
