"""Products that the model is to work out with a calculator, in two turns: calculator.toml.

    python examples/smollm/calculator.py smollm

writes prompts and held-out prompts, each with examples of calls. SmolLM2's chat template knows no
tools, so a system message describes the calculator, and calls are read from the text.
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
EXAMPLES = ((23, 54), (71, 18), (46, 90))  # of calls, in every prompt
TRIED = 0.05  # for a first turn that begins with a call, whatever comes of it
CALLED = 0.15  # for a call that the calculator could work out
RIGHT = 0.8  # for the right answer


def multiply(a: int, b: int) -> str:
    """Multiply two numbers."""
    return str(int(a) * int(b))


class Calculator(ToolUse):
    """One product: 0.05 for beginning with a call, 0.15 if one can be worked out, 0.8 if right."""

    def __init__(self) -> None:
        super().__init__(tools=(multiply,), calls=3)
        self._first, self._called = True, False

    async def step(self, response: str) -> StepResult:
        result = await super().step(response)
        parts = result.reward_parts
        worked = parts.get("tool_calls", 0.0) > parts.get("malformed_calls", 0.0)
        tried = TRIED if self._first and response.startswith("<tool_call>") else 0.0
        earned = tried + (CALLED if worked and not self._called else 0.0)
        self._first, self._called = False, self._called or worked
        return replace(result, reward=RIGHT * result.reward + earned)


def question(a: int, b: int) -> dict[str, Any]:
    return {"role": "user", "content": f"What is {a} * {b}?"}


def row(a: int, b: int) -> dict[str, Any]:
    """Return the prompt: examples, as the template will write the calls, and the question."""
    messages: list[dict[str, Any]] = []
    for one, other in EXAMPLES:
        product = str(one * other)
        call = tool_call("multiply", {"a": one, "b": other}, "call_0")
        messages += [
            question(one, other),
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": product},
            {"role": "assistant", "content": product},
        ]
    return {"prompt": [*as_text(messages), question(a, b)], "answer": str(a * b)}


def write(out: Path) -> None:
    """Write products.jsonl and heldout-products.jsonl; no row is in both."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100) if (a, b) not in EXAMPLES]
    random.Random("calculator").shuffle(pairs)
    out.mkdir(parents=True, exist_ok=True)
    for name, some in (("heldout-products", pairs[:HELD_OUT]), ("products", pairs[HELD_OUT:])):
        text = "".join(json.dumps(row(*pair)) + "\n" for pair in some)
        (out / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
