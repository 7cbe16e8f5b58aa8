"""`umbra run-agents`: runs agents for the sessions of generators, on any machine.

A runner is no member of the run. It leases sessions over HTTP (`generator.serve`), plays each in
processes of its own, renews the leases meanwhile, and posts the rewards. Sessions of a runner that
is killed begin again for another one when their leases expire.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import click
import msgspec

from umbra.proto.errors import PeerLostError, RejectedError, UsageError
from umbra.services.config import EnvironmentConfig
from umbra.services.config.loader import load_config
from umbra.services.environments.agent_workers import (
    NO_REWARD,
    PLAYED_TWICE,
    agent_workers,
    offered_name,
    start_agent,
)
from umbra.services.environments.environment_host import Delivered
from umbra.services.environments.protocol import StepResult
from umbra.services.http import read_key
from umbra.services.process.logs import setup_logging
from umbra.services.process.loop_thread import ends_with_it

LEASE_S = 30.0
WAIT_S = 2.0  # for a generator to find a session
PAUSE_S = 1.0  # before a generator without sessions for us, or without an answer, is asked again
GONE_S = 120.0  # without an answer of any generator, after which the run is taken to be over
_ANSWER_S = 30.0
_RETRY_S = (0.5, 1.0, 2.0)  # pauses between the tries of a report, which may be repeated
_THREADS = 16

log = logging.getLogger(__name__)


class Generators:
    """The HTTP endpoints of generators; requests run in threads.

    Args:
        urls: as each generator logs it ("agents are served at ...").
        key: of the endpoints; "" if they have none.
    """

    def __init__(self, urls: Sequence[str], key: str, threads: int = _THREADS) -> None:
        self.urls = [url.rstrip("/") for url in urls]
        self.key = key
        self.heard_at = dict.fromkeys(self.urls, time.monotonic())
        self.heard = False
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="umbra-http")
        # Generators are reached directly: a proxy is for the rest of the world.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    async def ask(self, base: str, path: str, body: Any, method: str = "POST") -> Any:
        """Return the answer of the generator at `base`.

        Raises:
            UsageError: it refuses the key.
            RejectedError: it refuses the request.
            PeerLostError: it cannot be reached.
        """
        loop = asyncio.get_running_loop()
        answer = await loop.run_in_executor(self._threads, self._send, base + path, body, method)
        self.heard_at[base], self.heard = time.monotonic(), True
        if isinstance(answer, RejectedError | UsageError):
            raise answer
        return answer

    async def report(self, base: str, path: str, body: Any, method: str = "POST") -> None:
        """Send what may be sent twice, several times if need be; errors as of `ask`."""
        for pause in _RETRY_S:
            try:
                await self.ask(base, path, body, method)
                return
            except PeerLostError:
                await asyncio.sleep(pause)
        await self.ask(base, path, body, method)

    def close(self) -> None:
        """Wait for the requests under way."""
        self._threads.shutdown(cancel_futures=True)

    def _send(self, url: str, body: Any, method: str) -> Any:
        headers = {"content-type": "application/json"}
        if self.key:
            headers["authorization"] = f"Bearer {self.key}"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers, method=method)
        try:
            with self._opener.open(request, timeout=_ANSWER_S) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                said = error.read()
            if error.code == 401:
                return UsageError(
                    f"{url} refuses the key: give both sides the same UMBRA_AGENT_KEY or "
                    "generator.serve_key"
                )
            return _refusal(url, said, error.code)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise PeerLostError(f"{url}: {error}") from error


def _refusal(url: str, body: bytes, status: int) -> RejectedError:
    try:
        error = json.loads(body)["error"]
        return RejectedError(str(error["message"]), code=str(error["code"]))
    except (ValueError, KeyError, TypeError):
        return RejectedError(f"{url} answered with status {status}")


@dataclass(frozen=True, slots=True)
class _Held:
    """A session that an agent of ours works on."""

    generator: str
    path: str


class AgentRunner:
    """Plays the sessions of one environment. Used within one event loop.

    Args:
        config: the environment, and how many processes of it there may be.
        generators: offer sessions.
    """

    def __init__(self, config: EnvironmentConfig, generators: Generators) -> None:
        self.name = offered_name(config)
        self._generators = generators
        self._workers = agent_workers(config, self._left, self._began)
        self._held: dict[str, _Held] = {}  # by id of the session
        self._playing: set[str] = set()
        self._reports: set[asyncio.Task[None]] = set()
        self._places = asyncio.Semaphore(0)

    async def start(self) -> None:
        """Start the first process; raises UsageError or DeadlineError if it cannot be loaded."""
        await self._workers.start()
        self._places = asyncio.Semaphore(self._workers.room)

    async def lease_from(self, generator: str) -> None:
        """Lease sessions of a generator for ever, one for each free place."""
        wanted = {"wait_s": WAIT_S, "lease_s": LEASE_S, "environment": self.name}
        while True:
            await self._places.acquire()
            work, pause_s = None, PAUSE_S
            try:
                work = await self._generators.ask(generator, "/sessions", wanted)
            except RejectedError as refused:
                pause_s = 0.0 if refused.code == "no_work" else PAUSE_S
                log.debug("%s: %s", generator, refused)
            except PeerLostError as error:
                log.debug("%s", error)
            finally:
                if work is None:
                    self._places.release()
            if work is None:
                await asyncio.sleep(pause_s)
            else:
                held = self._held[work["id"]] = _Held(generator, f"/sessions/{work['id']}")
                url = held.generator + held.path
                start_agent(self._workers, work["id"], work["row"], url, self._generators.key)

    async def renew(self, lease_s: float = LEASE_S) -> None:
        """Renew all leases; 0 gives them back. Drop the sessions that are lost."""
        await asyncio.gather(*(self._renew(url, lease_s) for url in self._generators.urls))

    async def close(self) -> None:
        """End all agents; their sessions begin again elsewhere."""
        for report in self._reports:
            report.cancel()
        await self.renew(0.0)
        await self._workers.close()

    async def _renew(self, generator: str, lease_s: float) -> None:
        ids = [name for name, held in self._held.items() if held.generator == generator]
        if not ids:
            return
        try:
            asked = {"ids": ids, "lease_s": lease_s}
            lost = (await self._generators.ask(generator, "/sessions/renew", asked))["lost"]
        except (PeerLostError, RejectedError) as error:
            silent_s = time.monotonic() - self._generators.heard_at[generator]
            lost = ids if silent_s > LEASE_S else []
            log.warning("leases of %d sessions are not renewed: %s", len(ids), error)
        for name in lost:
            self._drop(name)

    def _began(self, name: str) -> None:
        if name in self._held and name in self._playing:  # what it did is not done twice
            self._end_play(name, None, PLAYED_TWICE)
        self._playing.add(name)

    def _left(self, name: str, value: Delivered | None, error: str) -> None:
        if name in self._held:
            self._end_play(name, value, error)

    def _end_play(self, name: str, value: Delivered | None, error: str) -> None:
        self._workers.forget(name)
        self._spawn(self._report(name, self._held[name], value, error))

    async def _report(self, name: str, held: _Held, value: Delivered | None, error: str) -> None:
        """Post the reward of a session, or why there is none."""
        report = self._generators.report
        try:
            if isinstance(value, StepResult) and value.done:
                result = {"reward": value.reward, "parts": value.reward_parts}
                try:
                    await report(
                        held.generator, f"{held.path}/reward", {**result, "reason": value.reason}
                    )
                    return
                except RejectedError as refused:
                    error = str(refused)
            reason = {"reason": error or NO_REWARD}
            await report(held.generator, held.path, reason, "DELETE")
        except RejectedError:
            pass  # it has its reward, or is over for another reason
        except PeerLostError as lost:
            log.warning("a session has ended, but its generator cannot be told: %s", lost)
        finally:
            self._drop(name)

    def _drop(self, name: str) -> None:
        if self._held.pop(name, None) is not None:
            self._playing.discard(name)
            self._workers.forget(name)
            self._places.release()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine, name="a session of an agent")
        self._reports.add(task)
        task.add_done_callback(self._reports.discard)
        task.add_done_callback(ends_with_it)


async def run_agents(
    environments: Iterable[EnvironmentConfig], generators: Generators, stop: asyncio.Event
) -> None:
    """Play sessions until `stop` is set, or no generator has answered for `GONE_S` seconds.

    An environment that cannot be loaded is left out, unless it is the only one.

    Raises:
        UsageError: no environment can be loaded, or a generator refuses the key.
    """
    runners: list[AgentRunner] = []
    faults: list[UsageError] = []
    tasks: list[asyncio.Task[Any]] = []
    try:
        for config in environments:
            runner = AgentRunner(config, generators)
            try:
                await runner.start()
                runners.append(runner)
            except UsageError as error:
                faults.append(error)
                log.warning("this runner is without %s: %s", runner.name, error)
        if not runners:
            raise faults[0]
        log.info("runs %s for %s", [one.name for one in runners], generators.urls)
        for runner in runners:
            tasks += [asyncio.create_task(runner.lease_from(url)) for url in generators.urls]
        tasks += [asyncio.create_task(_keep(runners, generators)), asyncio.create_task(stop.wait())]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(runner.close() for runner in runners))


async def _keep(runners: Sequence[AgentRunner], generators: Generators) -> None:
    """Renew leases until all generators are gone."""
    while True:
        await asyncio.sleep(LEASE_S / 3)
        await asyncio.gather(*(runner.renew() for runner in runners))
        silent_s = time.monotonic() - max(generators.heard_at.values())
        if silent_s > GONE_S and generators.heard:
            log.info("no generator has answered for %.0f s: the run is over", silent_s)
            return
        if silent_s > GONE_S:
            log.warning("no generator answers at %s", ", ".join(generators.urls))


@click.command("run-agents")
@click.option("--config", required=True, metavar="FILE", help="Run file (TOML).")
@click.option(
    "--generator",
    "urls",
    required=True,
    multiple=True,
    metavar="URL",
    help="Endpoint for agents, as a generator logs it; can be repeated.",
)
@click.option(
    "--workers", default=4, show_default=True, help="Processes for agents, per environment."
)
def command(config: str, urls: tuple[str, ...], workers: int) -> None:
    """Run a run's agents on this machine, for the sessions of its generators.

    It plays the environments with workers = 0. The key of the endpoints is in UMBRA_AGENT_KEY, or
    in the file that generator.serve_key names.
    """
    run = load_config(config)
    setup_logging(run.log, "run-agents")
    outside = [one for one in run.all_environments if one.asks and not one.workers]
    if not outside or workers < 1:
        raise UsageError(
            f"--workers {workers}: use 1 or more"
            if outside
            else f"{config} leaves no agent to runners: set workers = 0 in its [environment]"
        )
    playable = [msgspec.structs.replace(one, workers=workers) for one in outside]
    asyncio.run(_serve(playable, urls, read_key(run.generator.serve_key, os.environ)))


async def _serve(environments: list[EnvironmentConfig], urls: Sequence[str], key: str) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    generators = Generators(urls, key, _THREADS + len(urls) * len(environments))
    try:
        await run_agents(environments, generators, stop)
    finally:
        generators.close()
