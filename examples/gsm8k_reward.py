"""The last number of an answer, compared with the one after #### in GSM8K's."""

import re
from typing import Any

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def score(prompt: Any, completion: str, row: dict[str, Any]) -> float:
    """Return 1 if the last number after the reasoning is right, else 0."""
    said = NUMBER.findall(completion.rpartition("</think>")[2])
    (right,) = NUMBER.findall(str(row["answer"]).rpartition("####")[2])
    return float(bool(said) and _value(said[-1]) == _value(right))


def _value(number: str) -> float:
    return float(number.replace(",", ""))
