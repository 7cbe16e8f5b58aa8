"""What several answers to each prompt tell: pass@k and mean@k."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import comb

SOLVED = 1.0  # reward from which on an answer solves its prompt


def pass_at_k(answers: int, solved: int, k: int) -> float:
    """The chance that one of `k` answers solves the prompt, from `answers`, `solved` of which do.

    1 - C(n - c, k) / C(n, k): unbiased, unlike 1 - (1 - c / n)^k. Chen et al. 2021, arXiv
    2107.03374, eq. 1.

    Raises:
        ValueError: there are fewer than `k` answers, or more solved than there are.
    """
    if not 0 <= solved <= answers or not 1 <= k <= answers:
        raise ValueError(f"pass@{k} of {answers} answers, {solved} solved")
    return 1 - comb(answers - solved, k) / comb(answers, k)


def telling(scores: Mapping[str, float]) -> dict[str, float]:
    """The scores to show beside accuracy; none with one answer per prompt, where all are equal."""
    return dict(scores) if len(scores) > 2 else {}


def eval_scores(rewards: Mapping[str, Sequence[float]], most: int) -> dict[str, float]:
    """`pass@k` for k = 1, 2, 4, ... and `most`, and `mean@most`; means over prompts.

    `mean@k` is the mean reward of k answers (avg@k elsewhere). Prompts with fewer than k answers
    are left out, and what no prompt has enough answers for.

    Args:
        rewards: of the answers to each prompt, by its id; those that failed count as 0.
        most: answers that each prompt should have.
    """
    scores: dict[str, float] = {}
    for k in sorted({1 << power for power in range(most.bit_length())} | {most}):
        chances = [
            pass_at_k(len(own), sum(reward >= SOLVED for reward in own), k)
            for own in rewards.values()
            if len(own) >= k
        ]
        if chances:
            scores[f"pass@{k}"] = sum(chances) / len(chances)
    means = [sum(own) / len(own) for own in rewards.values() if len(own) >= most]
    if means:
        scores[f"mean@{most}"] = sum(means) / len(means)
    return scores
