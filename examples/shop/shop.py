"""A shop with two tools: the model looks prices up and fills a basket, and the basket counts.

    python examples/shop/shop.py shop

writes prompts and held-out prompts. The state is the environment's: a call changes the basket, and
the reward looks at it, whatever the model says of it in the end.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from umbra import Opening, StepResult

ITEMS = "tea rice salt milk bread soap honey beans flour sugar pepper butter yeast oil jam figs"
ROWS, HELD_OUT, CHOICES = 1024, 128, 3


class Shop:
    """One customer, who wants the cheapest of some items: 1 if that alone is in the basket.

    Args:
        turns: of the model, the one in which it says that it is done included.
    """

    def __init__(self, turns: int = 6) -> None:
        self._left = turns

    def reset(self, row: dict[str, Any]) -> Opening:
        self._prices: dict[str, int] = row["prices"]
        self._basket: list[str] = []
        return Opening([{"role": "user", "content": row["prompt"]}], [self.price, self.add])

    def price(self, item: str) -> str:
        """Tell what an item costs."""
        return str(self._prices[item])

    def add(self, item: str) -> str:
        """Put an item into the basket."""
        self._basket += [item] if item in self._prices else []
        return f"in the basket: {', '.join(self._basket)}"

    def step(self, response: Any) -> StepResult:
        """Answer the calls of a turn; a turn without one ends the visit."""
        calls = response.tool_calls
        self._left -= 1
        if not calls and not response.problem:
            cheapest = min(self._prices, key=self._prices.__getitem__)
            return StepResult(reward=float(self._basket == [cheapest]))
        if self._left == 0:
            return StepResult(reason="turns")
        if response.problem:  # what looks like a call and is none is words, which are answered
            said = [{"role": "user", "content": f"error: {response.problem}"}]
            return StepResult(done=False, messages=said, reward_parts={"malformed": 1.0})
        answers = [self._answer(call["function"]) for call in calls]
        return StepResult(
            done=False,
            messages=[{"role": "tool", "content": answer} for answer in answers],
            tool_calls=[{**call, "id": f"call_{n}"} for n, call in enumerate(calls)],
            reward_parts={"calls": float(len(calls))},
        )

    def _answer(self, function: dict[str, Any]) -> str:
        try:
            tool = {"price": self.price, "add": self.add}[function["name"]]
            return tool(**function["arguments"])
        except (KeyError, TypeError) as error:  # the model gets the error, and may try again
            return f"error: {error}"


def write(out: Path) -> None:
    """Write prompts.jsonl and heldout.jsonl, the same each time; no row is in both."""
    source = random.Random("shop")
    rows: list[str] = []
    while len(rows) < ROWS + HELD_OUT:
        items = source.sample(ITEMS.split(), CHOICES)
        prices = dict(zip(items, source.sample(range(1, 100), CHOICES), strict=True))
        prompt = f"Put the cheapest of {', '.join(items)} into the basket, then say done."
        row = json.dumps({"prompt": prompt, "prices": prices}) + "\n"
        rows += [row] if row not in rows else []
    out.mkdir(parents=True, exist_ok=True)
    (out / "heldout.jsonl").write_text("".join(rows[:HELD_OUT]), encoding="utf-8")
    (out / "prompts.jsonl").write_text("".join(rows[HELD_OUT:]), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
