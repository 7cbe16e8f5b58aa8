"""The reward of the long answers: the share of vowels, which differs between answers."""

from typing import Any


def score(prompt: Any, completion: str, row: dict[str, Any]) -> float:
    """Return the share of characters that are vowels; 0 for an empty answer."""
    return sum(map(completion.lower().count, "aeiou")) / max(1, len(completion))
