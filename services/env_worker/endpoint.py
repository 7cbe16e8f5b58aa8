"""A generator's endpoint as an env-worker uses it: a session's begin, its reward, its failure."""

from __future__ import annotations

import asyncio
import http.client
import json
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from umbra.proto.errors import PeerLostError, RejectedError
from umbra.proto.records import SessionTask
from umbra.services.environments.protocol import Row, StepResult

ANSWER_S = 30.0
_THREADS = 16
_TRIES = 4  # of what the generator may have heard already, so that a repetition changes nothing
_PAUSE_S = 0.5  # before the second try; twice as long before each further one


class SessionClient:
    """Speaks HTTP, in threads: a session takes two requests besides those of its agent."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="umbra-endpoint")
        # Generators are reached directly: a proxy is for the rest of the world.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    async def begin(self, task: SessionTask) -> Row:
        """Take the session for an agent of ours; its row.

        Raises:
            RejectedError: it is over, or has an agent.
            PeerLostError: the generator cannot be reached.
        """
        return (await self._ask(task, "POST", "/begin", {}))["row"]

    async def reward(self, task: SessionTask, result: StepResult) -> None:
        """Post the reward, for as long as that takes; errors as of `begin`."""
        body = {"reward": result.reward, "parts": result.reward_parts, "reason": result.reason}
        await self._insist(task, "POST", "/reward", body)

    async def give_up(self, task: SessionTask, reason: str) -> None:
        """Say why there is no reward; errors as of `begin`."""
        await self._insist(task, "DELETE", "", {"reason": reason})

    def close(self) -> None:
        """Wait for what is under way."""
        self._threads.shutdown(cancel_futures=True)

    async def _insist(self, task: SessionTask, method: str, path: str, body: Any) -> None:
        for trial in range(_TRIES - 1):
            try:
                await self._ask(task, method, path, body)
                return
            except PeerLostError:
                await asyncio.sleep(_PAUSE_S * 2**trial)
        await self._ask(task, method, path, body)

    async def _ask(self, task: SessionTask, method: str, path: str, body: Any) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._send, task, method, path, body)

    def _send(self, task: SessionTask, method: str, path: str, body: Any) -> Any:
        headers = {"content-type": "application/json"}
        if task.key:
            headers["authorization"] = f"Bearer {task.key}"
        url = task.url + path
        request = urllib.request.Request(url, json.dumps(body).encode(), headers, method=method)
        try:
            with self._opener.open(request, timeout=ANSWER_S) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                said = error.read()
            if error.code >= 500:
                raise PeerLostError(f"{url}: {error.code}") from error
            raise _refusal(said, error.code) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise PeerLostError(f"{url}: {error}") from error


def _refusal(body: bytes, status: int) -> RejectedError:
    try:
        error = json.loads(body)["error"]
        return RejectedError(str(error["message"]), code=str(error["code"]))
    except (ValueError, KeyError, TypeError):
        return RejectedError(f"refused with {status}")
