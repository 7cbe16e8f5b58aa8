"""A reward: how much of a completion is written in vowels, plus a bonus for the word wanted."""

from typing import Any

VOWELS = frozenset("aeiouAEIOU")


def score(prompt: Any, completion: str, row: dict[str, Any]) -> float:
    """Return the reward of one completion.

    Args:
        prompt: the row's "prompt", as it stands in the file.
        completion: what the model answered; may be empty.
        row: the whole line of the prompts file.
    """
    if not completion:
        return 0.0
    vowels = sum(letter in VOWELS for letter in completion) / len(completion)
    return vowels + (row["word"] in completion)
