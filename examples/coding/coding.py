"""A coding task: a function is described by a few of its values, and the model writes it in Python.

    f(0)=5 f(10)=325 f(100)=30205      is answered with      def f(x):return 3*x*x+2*x+5

What the model wrote is run in a sandbox on numbers that it was not shown. The reward is the share
of them for which the values are right. Those are compared here: the sandbox never sees them.

    python examples/coding/coding.py OUT

writes prompts, held-out prompts, and worked examples of a teacher that makes mistakes.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from umbra.services.environments.protocol import StepResult
from umbra.services.environments.sandbox import Sandbox, SandboxError

SHOWN = (0, 10, 100)
HIDDEN = range(1, 9)
CAREFUL = 0.35  # share of the teacher's functions that are right
DEMOS = 25_600
HELD = 8  # one function in so many is in no prompt and no worked example

# What follows what the model wrote: an error in one call does not end the others.
TESTS = """
for x in {inputs}:
    try:
        print(f(x))
    except Exception as error:
        print(type(error).__name__)
"""


class Coding:
    """One function to write.

    Args:
        sandbox: where it runs.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._tests: list[list[int]] = []

    def reset(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        self._tests = row["tests"]
        return [{"role": "user", "content": row["prompt"]}]

    async def step(self, response: str) -> StepResult:
        """Run what the model wrote. Code that does not end, or takes too much, passes no test."""
        program = response + TESTS.format(inputs=[given for given, _ in self._tests])
        try:
            outcome = await self._sandbox.run(["python3", "-I", "-S", "-"], program)
        except SandboxError:
            return StepResult(reward_parts={"runs": 0.0, "solved": 0.0})
        said = outcome.output.split("\n")[: len(self._tests)]
        wanted = [str(value) for _, value in self._tests]
        passed = sum(one == other for one, other in zip(said, wanted, strict=False)) / len(wanted)
        parts = {"runs": float(outcome.code == 0), "solved": float(passed == 1)}
        return StepResult(reward=passed, reward_parts=parts)

    async def close(self) -> None:
        await self._sandbox.close()


def functions() -> list[str]:
    """Return the bodies of all functions that are asked for."""
    digits = range(1, 10)
    lines = [f"{a}*x+{b}" for a in digits for b in digits]
    bends = [f"max({a}*x,{b})" for a in digits for b in digits]
    curves = [f"{a}*x*x+{b}" for a in digits for b in digits]
    return lines + bends + curves + [f"{a}*x*x+{line}" for a in digits for line in lines]


def value_of(body: str) -> Callable[[int], int]:
    """The function that `functions()` names so: no code of a model's."""
    return eval(f"lambda x: {body}", {"max": max})


def row_of(body: str) -> dict[str, Any]:
    """Return the question, and the tests of the answer."""
    value = value_of(body)
    shown = " ".join(f"f({x})={value(x)}" for x in SHOWN)
    return {"prompt": shown, "tests": [[x, value(x)] for x in HIDDEN]}


def demonstration(bodies: list[str], source: random.Random) -> dict[str, Any]:
    """Return a function of the teacher, who often mistakes a digit or a sign."""
    body = written = source.choice(bodies)
    if source.random() > CAREFUL:
        place = source.choice([n for n, sign in enumerate(body) if sign in "123456789+*"])
        others = "123456789" if body[place].isdigit() else "+-*"
        written = body[:place] + source.choice(others) + body[place + 1 :]
    told = [("user", row_of(body)["prompt"]), ("assistant", f"def f(x):return {written}")]
    return {"messages": [{"role": role, "content": content} for role, content in told]}


def write(out: Path) -> None:
    """Everything that the example needs, the same each time."""
    source = random.Random("coding")
    bodies = functions()
    source.shuffle(bodies)
    held = len(bodies) // HELD
    out.mkdir(parents=True, exist_ok=True)
    for name, lines in (
        ("prompts.jsonl", [row_of(body) for body in bodies[held:]]),
        ("heldout.jsonl", [row_of(body) for body in bodies[:held]]),
        ("demos.jsonl", [demonstration(bodies[held:], source) for _ in range(DEMOS)]),
    ):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (out / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
