"""The search of search.py as an agent of its own, written with Anthropic's client.

It knows nothing of Umbra: it asks a model for turns, looks words up, and says how good the answer
was. Only the address that it is given differs from asking a hosted model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from anthropic import AsyncAnthropic, DefaultAsyncHttpxClient

HTTP = DefaultAsyncHttpxClient()  # one for all conversations: making it takes longer than a turn
CORPUS: dict[str, str] = {}


def look_up(corpus: str, word: str) -> str:
    """Return the line of the corpus that begins with `word`."""
    if not CORPUS:
        lines = Path(corpus).read_text(encoding="utf-8").split()
        CORPUS.update(line.split(":") for line in lines)
    return f"{word}:{CORPUS[word]}" if word in CORPUS else "none"


async def solve(
    row: dict[str, Any], endpoint: dict[str, str], corpus: str, searches: int = 3
) -> float:
    """Have a question answered; 1 for the right answer."""
    client = AsyncAnthropic(
        base_url=endpoint["base_url"].removesuffix("/v1"),
        api_key=endpoint["api_key"],
        http_client=HTTP,
        max_retries=0,
    )
    messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
    for _ in range(searches + 1):
        reply = await client.messages.create(model="policy", max_tokens=8, messages=messages)
        if reply.stop_reason != "end_turn":
            return 0.0
        said = "".join(block.text for block in reply.content if block.type == "text").strip()
        if not said.startswith("?"):
            return float(said == row["answer"])
        messages += [
            {"role": "assistant", "content": reply.content},
            {"role": "user", "content": look_up(corpus, said[1:])},
        ]
    return 0.0
