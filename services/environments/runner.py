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
import math
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import click
import msgspec

from umbra.proto.errors import PeerLostError, RejectedError, UsageError
from umbra.services.config import EnvironmentConfig
from umbra.services.config.loader import load_config
from umbra.services.environments.environment_host import Delivered
from umbra.services.environments.protocol import Lost, StepResult
from umbra.services.environments.worker_pool import (
    NO_REWARD,
    agent_workers,
    offered_name,
    start_agent,
)
from umbra.services.http import KEY_VARIABLE
from umbra.services.process.logs import setup_logging
from umbra.services.process.loop_thread import ends_with_it

LEASE_S = 10.0  # at most
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
        threads: requests at once.
    """

    def __init__(self, urls: Sequence[str], key: str, threads: int = _THREADS) -> None:
        self.urls = [url.rstrip("/") for url in urls]
        self.key = key
        self.heard_at: dict[str, float] = {}
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
        status, answer = await loop.run_in_executor(
            self._threads, self._send, base + path, body, method
        )
        self.heard_at[base] = time.monotonic()
        if status == 401:
            raise UsageError(f"{base} refuses the key: give both sides the same UMBRA_AGENT_KEY")
        if status >= 400:
            error = answer["error"]
            raise RejectedError(str(error["message"]), code=str(error["code"]))
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

    def silent_s(self, *urls: str) -> float:
        """Return the seconds since one of these answered; infinite if none ever has."""
        newest = max((self.heard_at.get(url, -math.inf) for url in urls), default=-math.inf)
        return time.monotonic() - newest

    def close(self) -> None:
        """Wait for the requests under way."""
        self._threads.shutdown(cancel_futures=True)

    def _send(self, url: str, body: Any, method: str) -> tuple[int, Any]:
        headers = {"content-type": "application/json", "authorization": f"Bearer {self.key}"}
        request = urllib.request.Request(url, json.dumps(body).encode(), headers, method=method)
        try:
            with self._opener.open(request, timeout=_ANSWER_S) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise PeerLostError(f"{url}: {error}") from error


class AgentRunner:
    """Plays the sessions of one environment. Used within one event loop.

    Args:
        config: the environment, and how many processes of it there may be.
        generators: offer sessions.
    """

    def __init__(self, config: EnvironmentConfig, generators: Generators) -> None:
        self.name = offered_name(config)
        # Of a runner that dies the leases have to end before the generator counts its agents as
        # silent, which fails their samples.
        self.lease_s = min(LEASE_S, config.timeout_s / 2)
        self._generators = generators
        self._workers = agent_workers(config, self._left, lambda name: None)
        self._held: dict[str, str] = {}  # the generator of each session
        self._reports: set[asyncio.Task[None]] = set()
        self._places = asyncio.Semaphore(0)

    async def start(self) -> None:
        """Start the first process; raises UsageError or DeadlineError if it cannot be loaded."""
        await self._workers.start()
        self._places = asyncio.Semaphore(self._workers.room)

    async def lease_from(self, generator: str) -> None:
        """Lease sessions of a generator for ever, one for each free place."""
        wanted = {"wait_s": WAIT_S, "lease_s": self.lease_s, "environment": self.name}
        while True:
            await self._places.acquire()
            pause_s = PAUSE_S
            try:
                work = await self._generators.ask(generator, "/sessions", wanted)
            except (RejectedError, PeerLostError) as error:
                self._places.release()
                if isinstance(error, RejectedError) and error.code == "no_work":
                    pause_s = 0.0  # it has waited
                log.debug("%s: %s", generator, error)
                await asyncio.sleep(pause_s)
                continue
            name = work["id"]
            self._held[name] = generator
            url = f"{generator}/sessions/{name}"
            start_agent(self._workers, name, work["row"], url, self._generators.key)

    async def keep(self) -> None:
        """Renew all leases, for ever."""
        while True:
            await asyncio.sleep(self.lease_s / 3)
            for generator in set(self._held.values()):
                await self._renew(generator, self._of(generator), self.lease_s)

    def _of(self, generator: str) -> list[str]:
        return [name for name, url in self._held.items() if url == generator]

    async def _renew(self, generator: str, names: list[str], lease_s: float) -> None:
        """Renew leases, and drop the sessions that are lost."""
        asked = {"ids": names, "lease_s": lease_s}
        try:
            answer = await self._generators.ask(generator, "/sessions/renew", asked)
            lost = answer["lost"]
        except (PeerLostError, RejectedError) as error:
            lost = names if self._generators.silent_s(generator) > self.lease_s else []
            log.warning("leases of %d sessions are not renewed: %s", len(names), error)
        for name in lost:
            self._drop(name)

    async def _give_back(self, generator: str, names: list[str]) -> None:
        """Let these sessions begin again elsewhere."""
        await self._renew(generator, names, 0.0)
        for name in names:
            self._drop(name)

    async def close(self) -> None:
        """End all agents; their sessions begin again elsewhere."""
        for report in self._reports:
            report.cancel()
        for generator in set(self._held.values()):
            await self._give_back(generator, self._of(generator))
        await self._workers.close()

    def _left(self, name: str, value: Delivered | Lost | None, error: str) -> None:
        """The agent of a session has returned, or is lost with its process."""
        if name not in self._held:
            return
        self._workers.forget(name)
        if isinstance(value, Lost):
            ending = self._give_back(self._held[name], [name])
        else:
            ending = self._report(name, value, error)
        task = asyncio.get_running_loop().create_task(ending, name="a session of an agent")
        self._reports.add(task)
        task.add_done_callback(self._reports.discard)
        task.add_done_callback(ends_with_it)

    async def _report(self, name: str, value: Delivered | None, error: str) -> None:
        """Post the reward of a session, or why there is none."""
        generator, path, report = self._held[name], f"/sessions/{name}", self._generators.report
        try:
            if isinstance(value, StepResult) and value.done:
                result = {"reward": value.reward, "parts": value.reward_parts}
                try:
                    await report(generator, f"{path}/reward", {**result, "reason": value.reason})
                    return
                except RejectedError as refused:
                    error = str(refused)
            await report(generator, path, {"reason": error or NO_REWARD}, "DELETE")
        except RejectedError:
            pass  # it has its reward, or is over for another reason
        except PeerLostError as lost:
            log.warning("a session has ended, but its generator cannot be told: %s", lost)
        finally:
            self._drop(name)

    def _drop(self, name: str) -> None:
        if self._held.pop(name, None) is not None:
            self._workers.forget(name)
            self._places.release()


async def run_agents(
    environments: Iterable[EnvironmentConfig], generators: Generators, stop: asyncio.Event
) -> None:
    """Play sessions until `stop` is set, or no generator has answered for `GONE_S` seconds.

    An environment that cannot be loaded is left out, unless it is the only one.

    Raises:
        UsageError: no environment can be loaded, or a generator refuses the key.
    """
    runners: list[AgentRunner] = []
    tasks: list[asyncio.Task[Any]] = []
    fault: UsageError | None = None
    try:
        for config in environments:
            runner = AgentRunner(config, generators)
            try:
                await runner.start()
                runners.append(runner)
            except UsageError as error:
                fault = error
                log.warning("this runner is without %s: %s", runner.name, error)
        if fault is not None and not runners:
            raise fault
        log.info("runs %s for %s", [one.name for one in runners], generators.urls)
        work = [runner.lease_from(url) for runner in runners for url in generators.urls]
        work += [runner.keep() for runner in runners]
        tasks = [*map(asyncio.ensure_future, [*work, _until_gone(generators), stop.wait()])]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(runner.close() for runner in runners))


async def _until_gone(generators: Generators) -> None:
    """Return when no generator has answered for `GONE_S` seconds."""
    while True:
        await asyncio.sleep(LEASE_S / 3)
        silent_s = generators.silent_s(*generators.urls)
        if GONE_S < silent_s < math.inf:
            log.info("no generator has answered for %.0f s: the run is over", silent_s)
            return
        if silent_s == math.inf:
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

    It plays the environments with workers = 0. The key of the endpoints is in UMBRA_AGENT_KEY.
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
    asyncio.run(_serve(playable, urls, os.environ.get(KEY_VARIABLE, "")))


async def _serve(environments: list[EnvironmentConfig], urls: Sequence[str], key: str) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    generators = Generators(urls, key, _THREADS + len(urls) * len(environments))
    try:
        await run_agents(environments, generators, stop)
    finally:
        generators.close()
