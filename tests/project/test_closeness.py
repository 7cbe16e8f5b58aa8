"""The tolerance of tests holds for any order of a sum, and for nothing that is more than that."""

import pytest
import torch
from fakes.closeness import assert_same_sums, rounding, same_sum


@pytest.mark.parametrize("count", [10, 1000, 20_000])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_sums_in_another_order(count: int, size: float) -> None:
    generator = torch.Generator().manual_seed(count)
    numbers = size * torch.randn(count, generator=generator)
    shuffled = numbers[torch.randperm(count, generator=generator)]
    sums = [torch.cumsum(row, 0)[-1:] for row in (numbers, shuffled)]
    partial = float(numbers.cumsum(0).abs().max())
    assert_same_sums(*sums, terms=count, scale=partial)
    assert float(sums[0]) == same_sum(float(sums[1]), terms=count, scale=partial)
    with pytest.raises(AssertionError, match="where rounding explains"):
        assert_same_sums(
            sums[0] + 3 * partial * rounding(count), sums[1], terms=count, scale=partial
        )


def test_a_tensor_is_as_large_as_its_largest_element() -> None:
    expected = torch.tensor([1000.0, 0.0])
    assert_same_sums(torch.tensor([1000.0, 1e-4]), expected, terms=100)
    with pytest.raises(AssertionError, match=r"w: off by 0\.1, where rounding explains"):
        assert_same_sums(torch.tensor([1000.0, 0.1]), expected, terms=100, what="w")
