"""A search agent: who is the mayor of the town in which a person lives? Two look-ups tell.

The corpus has a line for each person (`mo:ka`, mo lives in ka) and for each town (`ka:zu`, the
mayor of ka is zu). The model is asked with a name, looks words up by `?word`, and says its answer.

    python examples/search/search.py OUT

writes the corpus, prompts, held-out prompts, and worked examples of a teacher that makes mistakes.
"""

from __future__ import annotations

import json
import random
import string
import sys
from pathlib import Path
from typing import Any

from umbra.services.environments.protocol import StepResult

PEOPLE, TOWNS = 400, 60
CAREFUL = 0.75  # share of the teacher's steps that are right
DEMOS = 25_600


class Search:
    """One question.

    Args:
        corpus: file with lines `word:word`.
        searches: look-ups that the model may make.
    """

    def __init__(self, corpus: str, searches: int = 3) -> None:
        lines = Path(corpus).read_text(encoding="utf-8").split()
        self._found = dict(line.split(":") for line in lines)
        self._left = searches

    def reset(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        self._answer = row["answer"]
        return [{"role": "user", "content": row["prompt"]}]

    async def step(self, response: str) -> StepResult:
        said = response.strip()
        if not said.startswith("?"):
            return StepResult(reward=float(said == self._answer))
        if self._left == 0:
            return StepResult(reason="searches")
        self._left -= 1
        word = said[1:]
        found = f"{word}:{self._found[word]}" if word in self._found else "none"
        message = {"role": "user", "content": found}
        return StepResult(done=False, messages=[message], reward_parts={"searches": 1.0})


def make_corpus(source: random.Random) -> tuple[dict[str, str], dict[str, str]]:
    """Return the town of each person, and the mayor of each town."""
    letters = string.ascii_lowercase
    words = source.sample([a + b for a in letters for b in letters], PEOPLE + 2 * TOWNS)
    people, towns, mayors = words[:PEOPLE], words[PEOPLE:-TOWNS], words[-TOWNS:]
    return {one: source.choice(towns) for one in people}, dict(zip(towns, mayors, strict=True))


def demonstration(
    lives: dict[str, str], mayors: dict[str, str], source: random.Random
) -> dict[str, Any]:
    """Return a conversation of the teacher, who now and then mistakes a word or stops too early."""
    known = {**lives, **mayors}
    person = source.choice(list(lives))
    turns, word = [person], person
    while len(turns) < 6:
        careful = source.random() < CAREFUL
        if word not in known or (not careful and source.random() < 0.5):
            break
        word = word if careful else source.choice(list(known))
        turns += [f"?{word}", f"{word}:{known[word]}"]
        word = known[word]
    turns.append(word)
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": t} for i, t in enumerate(turns)]}


def write(out: Path) -> None:
    """Everything that the example needs, the same each time."""
    source = random.Random("search")
    lives, mayors = make_corpus(source)
    people = list(lives)
    rows = [{"prompt": one, "answer": mayors[lives[one]]} for one in people]
    out.mkdir(parents=True, exist_ok=True)
    facts = [f"{word}:{told}\n" for word, told in {**lives, **mayors}.items()]
    (out / "corpus.txt").write_text("".join(facts), encoding="utf-8")
    held = PEOPLE // 8
    demos = [demonstration(dict(list(lives.items())[held:]), mayors, source) for _ in range(DEMOS)]
    for name, lines in (
        ("prompts.jsonl", rows[held:]),
        ("heldout.jsonl", rows[:held]),
        ("demos.jsonl", demos),
    ):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (out / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
