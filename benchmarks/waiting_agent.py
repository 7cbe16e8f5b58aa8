"""The agent of `agent_sessions.py`: turns of the model, and tools that take their time between."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any
from urllib.parse import urlsplit

LEAST_S, MOST_S = 0.1, 60.0  # that a tool takes, before it is scaled


async def solve(row: dict[str, Any], endpoint: dict[str, str], turns: int, factor: float) -> float:
    """Say something `turns` times; tools take LEAST_S to MOST_S seconds, times `factor`."""
    source = random.Random(row["number"])
    messages: list[dict[str, Any]] = [{"role": "user", "content": row["prompt"]}]
    for turn in range(turns):
        said = await complete(endpoint, messages)
        await asyncio.sleep(factor * LEAST_S * (MOST_S / LEAST_S) ** source.random())
        messages += [said, {"role": "user", "content": str(turn)}]
    return float(len(messages))


async def complete(endpoint: dict[str, str], messages: list[dict[str, Any]]) -> dict[str, Any]:
    """A turn of the model. Thousands of clients of the usual kind would need more CPU than this."""
    url = urlsplit(endpoint["base_url"])
    body = json.dumps({"messages": messages}).encode()
    head = (
        f"POST {url.path}/chat/completions HTTP/1.1\r\nhost: {url.netloc}\r\n"
        f"authorization: Bearer {endpoint['api_key']}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    try:
        writer.write(head.encode() + body)
        answer = await reader.read()
    finally:
        writer.close()
    status, _, content = answer.partition(b"\r\n\r\n")
    if b" 200 " not in status.partition(b"\r\n")[0]:
        raise RuntimeError((status[:80] + content[:400]).decode(errors="replace"))
    return json.loads(content)["choices"][0]["message"]
