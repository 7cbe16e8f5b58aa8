"""`umbra run-agents`: runs agents for the sessions of generators, on any machine.

A runner is no member of the run. It leases sessions over HTTP (`generator.serve`), plays them in
processes of its own, and posts rewards. If it is killed, they begin again when their leases expire.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

from umbra.proto.errors import PeerLostError, RejectedError, UsageError
from umbra.services.config import EnvironmentConfig
from umbra.services.environments.agent_program import request
from umbra.services.environments.protocol import EpisodeOutcome, Lost, StepResult
from umbra.services.environments.worker_pool import NO_REWARD, WorkerPool, offered_name
from umbra.services.process.loop_thread import ends_with_it

LEASE_S = 10.0  # at most
WAIT_S = 2.0  # for a generator to find a session
PAUSE_S = 1.0  # before a generator without sessions for us, or without an answer, is asked again
GONE_S = 120.0  # without an answer of any generator, after which the run is taken to be over
_ANSWER_S = 30.0
_RETRY_S = (0.5, 1.0, 2.0)  # pauses between the tries of a report, which may be repeated

log = logging.getLogger(__name__)


class Generators:
    """The HTTP endpoints of generators, as these log them; `key` may be ""."""

    def __init__(self, urls: Sequence[str], key: str) -> None:
        self.urls = [url.rstrip("/") for url in urls]
        self.key = key
        self._heard_at: dict[str, float] = {}

    async def ask(self, url: str, body: Any, method: str = "POST", *, repeat: bool = False) -> Any:
        """Return the answer; a request that may be sent twice is sent again after `_RETRY_S`.

        Raises UsageError if the generator refuses the key, RejectedError if it refuses the request,
        PeerLostError if it cannot be reached.
        """
        pauses = list(_RETRY_S) if repeat else []
        how: dict[str, Any] = {"method": method, "limit_s": _ANSWER_S}
        while True:
            try:
                status, answer = await request(url, self.key, body, **how)
                break
            except OSError as error:
                if not pauses:
                    raise PeerLostError(f"{url}: {error}") from error
                await asyncio.sleep(pauses.pop(0))
        self._heard_at[url.partition("/sessions")[0]] = time.monotonic()
        if status == 401:
            raise UsageError(f"{url} refuses the key: give both sides the same UMBRA_AGENT_KEY")
        if status >= 400:
            error = answer["error"]
            raise RejectedError(str(error["message"]), code=str(error["code"]))
        return answer

    def silent_s(self, *urls: str) -> float:
        """Return the seconds since one of these answered; infinite if none ever has."""
        return time.monotonic() - max(self._heard_at.get(url, -math.inf) for url in urls)


class AgentRunner:
    """A player of one environment's sessions, each in a task of its own."""

    def __init__(self, config: EnvironmentConfig, generators: Generators) -> None:
        self.name = offered_name(config)
        # If this runner dies, its leases have to end before the generator fails the samples of
        # silent agents.
        self.lease_s = min(LEASE_S, config.timeout_s / 2)
        self._generators = generators
        self.workers = WorkerPool(config, self._note_end, agents=True)
        self._ends: dict[str, asyncio.Future[EpisodeOutcome]] = {}

    async def start(self) -> None:
        await self.workers.start()
        self._places = asyncio.Semaphore(self.workers.room)

    async def serve(self, generator: str) -> None:
        """Lease and play sessions of a generator for ever; cancelled, give back those begun."""
        query = {"wait_s": WAIT_S, "lease_s": self.lease_s, "environment": self.name}
        playing: set[asyncio.Task[None]] = set()
        try:
            while True:
                await self._places.acquire()
                try:
                    work = await self._generators.ask(f"{generator}/sessions", query)
                except (RejectedError, PeerLostError) as error:
                    self._places.release()
                    log.debug("%s: %s", generator, error)
                    waited = isinstance(error, RejectedError) and error.code == "no_work"
                    await asyncio.sleep(0.0 if waited else PAUSE_S)
                    continue
                task = asyncio.create_task(self._play(generator, work), name="an agent's session")
                playing.add(task)
                task.add_done_callback(playing.discard)
                task.add_done_callback(ends_with_it)
        finally:
            for task in playing:
                task.cancel()
            await asyncio.gather(*playing, return_exceptions=True)

    async def _play(self, generator: str, work: Any) -> None:
        """Have an agent play a session, renew its lease meanwhile, and report how it ended."""
        name = work["id"]
        url = f"{generator}/sessions/{name}"
        end = self._ends[name] = asyncio.get_running_loop().create_future()
        try:
            self.workers.play_agent(name, work["row"], url, self._generators.key)
            while not (await asyncio.wait({end}, timeout=self.lease_s / 3))[0]:
                if not await self._renew(generator, name, self.lease_s):
                    return
            outcome = end.result()
            if isinstance(outcome.value, Lost):
                await self._renew(generator, name, 0.0)
            else:
                await self._report(url, outcome)
        except asyncio.CancelledError:
            await self._renew(generator, name, 0.0)
            raise
        finally:
            del self._ends[name]
            self.workers.forget(name)
            self._places.release()

    async def _renew(self, generator: str, name: str, lease_s: float) -> bool:
        """Renew a lease, or give the session back with 0 s; return False if it is lost."""
        query = {"ids": [name], "lease_s": lease_s}
        try:
            answer = await self._generators.ask(f"{generator}/sessions/renew", query)
        except (PeerLostError, RejectedError) as error:
            log.warning("the lease of a session is not renewed: %s", error)
            return self._generators.silent_s(generator) <= self.lease_s
        return name not in answer["lost"]

    def _note_end(self, outcome: EpisodeOutcome) -> None:
        if (end := self._ends.get(outcome.key)) is not None and not end.done():
            end.set_result(outcome)

    async def _report(self, url: str, outcome: EpisodeOutcome) -> None:
        """Post a session's reward, or the reason for its failure."""
        ask, value, reason = self._generators.ask, outcome.value, outcome.error or NO_REWARD
        try:
            if isinstance(value, StepResult) and value.done:
                result = {"reward": value.reward, "parts": value.reward_parts}
                try:
                    await ask(f"{url}/reward", {**result, "reason": value.reason}, repeat=True)
                    return
                except RejectedError as refused:
                    reason = str(refused)
            await ask(url, {"reason": reason}, "DELETE", repeat=True)
        except RejectedError:
            pass  # it has its reward, or is over for another reason
        except PeerLostError as lost:
            log.warning("the end of a session could not be reported: %s", lost)


async def run_agents(
    environments: Iterable[EnvironmentConfig], generators: Generators, stop: asyncio.Event
) -> None:
    """Play sessions until `stop` is set, or no generator has answered for `GONE_S` seconds.

    An environment that cannot be loaded is left out, unless it is the only one. Raises UsageError
    if none can be loaded, or a generator refuses the key.
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
                log.warning("this runner does not run %s: %s", runner.name, error)
        if fault is not None and not runners:
            raise fault
        log.info("running %s for generators at %s", [r.name for r in runners], generators.urls)
        work = [runner.serve(url) for runner in runners for url in generators.urls]
        tasks = [*map(asyncio.ensure_future, [*work, _until_gone(generators), stop.wait()])]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(runner.workers.close() for runner in runners))


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
