"""A game of several turns, with feedback."""

from __future__ import annotations

from umbra.services.environments.protocol import Message, Row, StepResult, prompt_messages


class Guess:
    """Guess the digit in the row's "answer": a miss is answered with > (go higher) or <.

    A hit is worth 1. Anything that is no digit is answered with ? and costs a try as well.
    """

    def __init__(self, tries: int = 4) -> None:
        self._tries = tries
        self._left = tries
        self._secret = 0

    def reset(self, row: Row) -> list[Message]:
        self._left, self._secret = self._tries, int(row["answer"])
        return prompt_messages(row)

    def step(self, response: str) -> StepResult:
        self._left -= 1
        text = response.strip()
        if text == str(self._secret):
            return StepResult(reward=1.0)
        if self._left <= 0:
            return StepResult(reason="turns")
        if not (len(text) == 1 and text.isascii() and text.isdigit()):
            hint = "?"
        else:
            hint = ">" if int(text) < self._secret else "<"
        return StepResult(done=False, messages=[{"role": "user", "content": hint}])
