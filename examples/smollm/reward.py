"""The reward of two-digit arithmetic: what the last number of an answer is worth."""

import re
from typing import Any

NUMBER = re.compile(r"-?\d+")


def score(prompt: Any, completion: str, row: dict[str, Any]) -> float:
    """Return 1 for the right number; 5 / (10 + d) for one that is off by d; 0 without a number.

    So 84 instead of 85 is worth 0.45, 75 is worth 0.25, and 185 is worth 0.05.
    """
    said = NUMBER.findall(completion)
    if not said:
        return 0.0
    off = abs(int(said[-1]) - int(row["answer"]))
    return 5 / (10 + off) if off else 1.0
