"""pass@k and mean@k, against what they estimate."""

from itertools import combinations

import pytest

from umbra.services.reporting import eval_scores, pass_at_k


@pytest.mark.parametrize("k", [1, 2, 3, 5, 6])
def test_it_is_the_share_of_all_draws_of_k_answers_that_hold_a_solution(k: int) -> None:
    for solved in range(7):
        answers = [True] * solved + [False] * (6 - solved)
        draws = [any(draw) for draw in combinations(answers, k)]
        assert pass_at_k(6, solved, k) == pytest.approx(sum(draws) / len(draws))


@pytest.mark.parametrize(("answers", "solved", "k"), [(3, 1, 4), (3, 4, 1), (3, -1, 1), (3, 1, 0)])
def test_what_cannot_be_estimated(answers: int, solved: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k} of 3 answers"):
        pass_at_k(answers, solved, k)


def test_means_over_prompts() -> None:
    """A prompt with too few answers counts where it has enough."""
    rewards = {"a": [1.0, 0.0, 0.5, 0.0, 0.0, 0.0], "b": [1.0, 1.0]}
    assert eval_scores(rewards, 6) == pytest.approx(
        {
            "pass@1": (1 / 6 + 1) / 2,
            "pass@2": (1 - 10 / 15 + 1) / 2,
            "pass@4": 1 - 5 / 15,
            "pass@6": 1.0,
            "mean@6": 1.5 / 6,
        }
    )
    assert eval_scores({"a": [0.25]}, 1) == {"pass@1": 0.0, "mean@1": 0.25}
    assert eval_scores({"a": [], "b": []}, 4) == {}
