"""What is to be sent fits into messages: in order, nothing lost, none above its bounds."""

from __future__ import annotations

import msgspec
import pytest
from fakes.trajectories import trajectory
from hypothesis import given
from hypothesis import strategies as st

from umbra.proto.codec import FILL_BYTES, portions
from umbra.proto.records import array_bytes, pack_float32


@given(sizes=st.lists(st.integers(0, 12)), most=st.integers(1, 4), fill=st.integers(1, 20))
def test_all_in_order_and_no_portion_that_could_be_fuller(
    sizes: list[int], most: int, fill: int
) -> None:
    made = list(portions(sizes, int, most, fill))
    assert [size for portion in made for size in portion] == sizes
    for portion, following in zip(made, [*made, None][1:], strict=True):
        assert 1 <= len(portion) <= most
        assert sum(portion) <= fill or len(portion) == 1
        if following is not None:
            assert len(portion) == most or sum(portion) + following[0] > fill


@pytest.mark.parametrize(("size", "lengths"), [(0, [512, 512, 1]), (FILL_BYTES, [1] * 1025)])
def test_a_portion_is_a_message_that_the_buffer_takes(size: int, lengths: list[int]) -> None:
    assert [len(portion) for portion in portions(range(1025), lambda _: size)] == lengths


def test_the_bytes_of_a_trajectory_are_those_of_its_arrays() -> None:
    made = trajectory([1, 2], [3, 4, 5])
    assert array_bytes(made) == 8 + 12 + 3 + 12
    two = pack_float32([0.0, 0.0, 0.0])
    made = msgspec.structs.replace(made, ref_logprobs=two, proximal_logprobs=two)
    assert array_bytes(made) == 8 + 12 + 3 + 12 + 24
    assert array_bytes(None) == 0
