"""Tasks of the package `reasoning-gym`: generated puzzles with verifiers of their own."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from umbra.proto.errors import UsageError
from umbra.services.environments.protocol import Row, SampleError, StepResult
from umbra.services.environments.single_turn import SingleTurn


class ReasoningGym(SingleTurn):
    """Scores answers by the verifier of the dataset that made the row (`gym_rows`)."""

    concurrent = True  # scoring is quick: one at a time, a process would mostly wait for the next

    def __init__(self) -> None:
        super().__init__()
        _library()  # so that it is missed at once

    def step(self, response: str) -> StepResult:
        entry = self.row.get("entry")
        if not isinstance(entry, dict):
            raise SampleError(
                'environment "reasoning-gym" needs rows made by `umbra make-task gym:NAME`'
            )
        score = _verifier(entry["metadata"]["source_dataset"])
        return StepResult(reward=float(score(response.strip(), entry)))


def gym_rows(
    name: str, count: int, seed: int, options: Mapping[str, Any] | None = None
) -> list[Row]:
    """`count` rows of the dataset `name`, each with the entry that its verifier needs.

    Args:
        name: of the dataset.
        count: how many.
        seed: of the draws.
        options: parameters of the dataset, such as `max_word_len`.

    Raises:
        UsageError: the package is missing, or has no such dataset or parameter.
    """
    library = _library()
    if name not in library.factory.DATASETS:
        close = difflib.get_close_matches(name, library.factory.DATASETS, n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UsageError(f"reasoning-gym has no dataset {name!r}{hint}")
    try:
        dataset = library.create_dataset(name, size=count, seed=seed, **(options or {}))
    except (AssertionError, TypeError, ValueError) as error:
        raise UsageError(f"reasoning-gym cannot make dataset {name!r}: {error}") from error
    return [
        {"prompt": entry["question"], "answer": entry["answer"], "entry": entry}
        for entry in dataset
    ]


@cache
def _verifier(dataset: str) -> Callable[[str, Row], float]:
    """That of a dataset, kept: the library makes the dataset anew for it, with all its words."""
    return _library().get_score_answer_fn(dataset)


def _library() -> Any:
    try:
        import reasoning_gym
    except ModuleNotFoundError:
        raise UsageError(
            'environment.kind = "reasoning-gym" needs it: pip install "umbra-rl[tasks]"'
        ) from None
    return reasoning_gym
