"""Products that the model is to work out with a calculator, in two turns: calculator.toml.

    python examples/smollm/calculator.py smollm

writes prompts and held-out prompts, each with one example of a call. SmolLM2's chat template knows
no tools, so a system message tells of the calculator, and calls are read from the text.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from umbra.services.environments.protocol import StepResult, tool_call
from umbra.services.environments.tools import ToolUse
from umbra.services.modeling.chat_template import as_text

HELD_OUT = 256
CALLED = 0.2  # for a call that the calculator could work out
RIGHT = 0.8  # for the right answer


def multiply(a: int, b: int) -> str:
    """Multiply two numbers."""
    return str(int(a) * int(b))


class Calculator(ToolUse):
    """One product. A call that can be worked out is worth 0.2, once; the right answer 0.8."""

    def __init__(self) -> None:
        super().__init__(tools=(multiply,), calls=3)
        self._called = False

    async def step(self, response: str) -> StepResult:
        result = await super().step(response)
        parts = result.reward_parts
        worked = parts.get("tool_calls", 0.0) > parts.get("malformed_calls", 0.0)
        earned = CALLED if worked and not self._called else 0.0
        self._called |= worked
        return replace(result, reward=RIGHT * result.reward + earned)


def question(a: int, b: int) -> dict[str, Any]:
    return {"role": "user", "content": f"What is {a} * {b}?"}


def row(a: int, b: int) -> dict[str, Any]:
    """Return the prompt: an example, as the template will write the calls, and the question."""
    call = tool_call("multiply", {"a": 23, "b": 54}, "call_0")
    example = [
        question(23, 54),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "1242"},
        {"role": "assistant", "content": "1242"},
    ]
    return {"prompt": [*as_text(example), question(a, b)], "answer": str(a * b)}


def write(out: Path) -> None:
    """Write products.jsonl and heldout-products.jsonl; no row is in both."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random("calculator").shuffle(pairs)
    out.mkdir(parents=True, exist_ok=True)
    for name, some in (("heldout-products", pairs[:HELD_OUT]), ("products", pairs[HELD_OUT:])):
        text = "".join(json.dumps(row(*pair)) + "\n" for pair in some)
        (out / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
