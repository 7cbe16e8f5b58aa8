"""Environments of one turn: the row's prompt, the model's answer, a reward."""

from __future__ import annotations

import logging
import math
import re

from umbra.proto.errors import UsageError
from umbra.services.environments.protocol import (
    Message,
    Row,
    SampleError,
    StepResult,
    expected_answer,
    prompt_messages,
)
from umbra.services.environments.response import content_of

_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


class SingleTurn:
    """Base: the row's prompt is put to the model, and its answer ends the sample."""

    def __init__(self) -> None:
        self.row: Row = {}

    def reset(self, row: Row) -> list[Message]:
        self.row = row
        return prompt_messages(row)


class Unrewarded(SingleTurn):
    """Ends with the model's answer, without a reward: a scoring stage gives it later."""

    def step(self, response: str) -> StepResult:
        del response
        return StepResult()


class ExactMatch(SingleTurn):
    """Reward 1 if the response, stripped, is the row's "answer"; its reasoning does not count."""

    def step(self, response: str) -> StepResult:
        said = content_of(response).strip()
        return StepResult(reward=float(said == expected_answer(self.row, "exact")))


class NumericMatch(SingleTurn):
    """Reward 1 if the last number of the response is the row's "answer".

    Args:
        tolerance: difference that still counts as equal, relative to the answer.
    """

    def __init__(self, tolerance: float = 1e-6) -> None:
        super().__init__()
        if not tolerance >= 0:
            raise TypeError(f"tolerance must be 0 or more, not {tolerance}")
        self._tolerance = tolerance

    def step(self, response: str) -> StepResult:
        wanted = last_number(expected_answer(self.row, "numeric"))
        if wanted is None:
            raise SampleError(
                f'environment "numeric" needs a number as "answer", not {self.row["answer"]!r}'
            )
        given = last_number(content_of(response))
        return StepResult(reward=float(same_number(given, wanted, self._tolerance)))


class MathVerify(SingleTurn):
    """Reward 1 if `math-verify` finds the response equal to the row's "answer" (LaTeX or plain)."""

    def __init__(self) -> None:
        super().__init__()
        try:
            import math_verify
        except ModuleNotFoundError:
            raise UsageError(
                'environment.kind = "math" needs math-verify: pip install "umbra-rl[tasks]"'
            ) from None
        # It warns in every call that its own time limits are off: the pool's limit holds instead.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        self._library = math_verify

    def step(self, response: str) -> StepResult:
        library = self._library
        wanted = library.parse(expected_answer(self.row, "math"), parsing_timeout=0)
        given = library.parse(content_of(response), parsing_timeout=0)
        return StepResult(reward=float(library.verify(wanted, given, timeout_seconds=0)))


def last_number(text: str) -> float | None:
    """The last number in `text`; commas between digits are skipped."""
    found = _NUMBER.findall(text)
    try:
        return float(found[-1].replace(",", "")) if found else None
    except ValueError:
        return None


def same_number(given: float | None, wanted: float, tolerance: float) -> bool:
    """Whether `given` is `wanted`, but for `tolerance` relative to it."""
    return given is not None and math.isclose(given, wanted, rel_tol=tolerance, abs_tol=1e-12)
