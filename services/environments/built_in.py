"""Ready-made environments: one turn that is compared with the row's answer, and a game."""

from __future__ import annotations

import importlib
import logging
import math
import re

from umbra.proto.errors import UsageError
from umbra.services.environments.protocol import (
    Message,
    Row,
    SampleError,
    StepResult,
    content_of,
    expected_answer,
    prompt_messages,
)

_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


class SingleTurn:
    """Base: the row's prompt is put to the model, and its answer ends the sample."""

    row: Row

    def reset(self, row: Row) -> list[Message]:
        self.row = row
        return prompt_messages(row)


class Unrewarded(SingleTurn):
    """An environment that ends with the model's answer; a scoring stage gives the reward later."""

    def step(self, response: str) -> StepResult:
        del response
        return StepResult()


class ExactMatch(SingleTurn):
    """Reward 1 if the response, stripped, is the row's "answer"; its reasoning does not count."""

    def step(self, response: str) -> StepResult:
        answer = content_of(response).strip()
        return StepResult(reward=float(answer == expected_answer(self.row, "exact")))


class NumericMatch(SingleTurn):
    """Reward 1 if the last number is the row's "answer", but for a relative `tolerance`."""

    def __init__(self, tolerance: float = 1e-6) -> None:
        if not tolerance >= 0:
            raise TypeError(f"tolerance must be 0 or more, not {tolerance}")
        self._tolerance = tolerance

    def step(self, response: str) -> StepResult:
        expected = last_number(expected_answer(self.row, "numeric"))
        if expected is None:
            raise SampleError(
                f'environment "numeric" needs a number as "answer", not {self.row["answer"]!r}'
            )
        value = last_number(content_of(response))
        return StepResult(reward=float(same_number(value, expected, self._tolerance)))


class MathVerify(SingleTurn):
    """Reward 1 if `math-verify` finds the response equal to the row's "answer" (LaTeX or plain)."""

    def __init__(self) -> None:
        try:
            self._library = importlib.import_module("math_verify")
        except ModuleNotFoundError:
            raise UsageError(
                'environment.kind = "math" needs math-verify: pip install "umbra-rl[tasks]"'
            ) from None
        # It warns in every call that its own time limits are off: the pool's limit holds instead.
        logging.getLogger("math_verify").setLevel(logging.ERROR)

    def step(self, response: str) -> StepResult:
        library = self._library
        expected = library.parse(expected_answer(self.row, "math"), parsing_timeout=0)
        answer = library.parse(content_of(response), parsing_timeout=0)
        return StepResult(reward=float(library.verify(expected, answer, timeout_seconds=0)))


class Guess:
    """Guess the digit in the row's "answer": a miss is answered with > (go higher), < or ?."""

    def __init__(self, tries: int = 4) -> None:
        self._tries = tries

    def reset(self, row: Row) -> list[Message]:
        self._remaining, self._secret = self._tries, int(row["answer"])
        return prompt_messages(row)

    def step(self, response: str) -> StepResult:
        self._remaining -= 1
        text = response.strip()
        if text == str(self._secret):
            return StepResult(reward=1.0)
        if self._remaining <= 0:
            return StepResult(reason="turns")
        hint = "?"
        if len(text) == 1 and text in "0123456789":
            hint = ">" if int(text) < self._secret else "<"
        return StepResult(done=False, messages=[{"role": "user", "content": hint}])


def last_number(text: str) -> float | None:
    """Return the last number in `text`; commas between digits are skipped."""
    numbers = _NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


def same_number(value: float | None, expected: float, tolerance: float) -> bool:
    """Return whether `value` is `expected`, but for `tolerance` relative to it."""
    return value is not None and math.isclose(value, expected, rel_tol=tolerance, abs_tol=1e-12)
