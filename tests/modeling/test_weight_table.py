"""A version's bytes become tensors and fill a model: all of it, to the last element, or nothing."""

from typing import Any

import msgspec
import pytest
import torch
from fakes.versions import in_memory
from torch import nn

from umbra.proto.errors import PeerLostError, UsageError
from umbra.proto.records import TensorEntry
from umbra.services.modeling.weights import WeightTable, tensors_in


class Tied(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(11, 7)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.Parameter(torch.rand(7))
        self.register_buffer("table", torch.rand(3))


def version(model: nn.Module, *left_out: str) -> dict[str, torch.Tensor]:
    return {n: t.clone() for n, t in model.state_dict().items() if n not in left_out}


# Who copies: the C library, or torch's threads.
@pytest.mark.parametrize("threads", [1, 2])
def test_a_place_that_is_no_plain_memory_is_filled_all_the_same(threads: int) -> None:
    torch.set_num_threads(threads)
    model = Tied(2)
    model.norm = nn.Parameter(torch.rand(14)[::2])
    model.head = nn.Linear(7, 11, bias=False).to(torch.bfloat16)
    source = {**version(Tied(1)), "head.weight": torch.rand(11, 7)}
    manifest, data = in_memory(source)
    WeightTable(model).load(manifest, data)
    assert torch.equal(model.norm, source["norm"])
    assert torch.equal(model.head.weight, source["head.weight"].bfloat16())


@pytest.mark.parametrize("left_out", [(), ("head.weight",), ("embed.weight", "table")])
def test_a_version_fills_the_model(left_out: tuple[str, ...]) -> None:
    source, model = Tied(1), Tied(2)
    kept = model.state_dict()["table"].clone()
    manifest, data = in_memory(version(source, *left_out), 128)
    WeightTable(model).load(manifest, data)
    with pytest.raises(PeerLostError, match=f"of the {len(data)} bytes of a version"):
        WeightTable(Tied(2)).load(manifest, data[:-1])
    expected = version(source) | ({"table": kept} if "table" in left_out else {})
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    assert model.head.weight is model.embed.weight


def test_what_does_not_fit_is_named_and_changes_nothing() -> None:
    for change, said in (
        ({"embed.weight": None, "head.weight": None}, "(missing: embed.weight)"),
        (
            {"norm": None, "new": torch.zeros(2), "table": torch.zeros(2)},
            "(missing: norm; unknown: new; shape: table [2] instead of [3])",
        ),
        (dict.fromkeys("abcde", torch.zeros(1)), "(unknown: a, b, c and 2 more)"),
    ):
        model = Tied(2)
        before = version(model)
        given_ = {n: t for n, t in {**version(Tied(1)), **change}.items() if t is not None}
        manifest, data = in_memory(given_)
        with pytest.raises(UsageError) as caught:
            WeightTable(model).load(manifest, data)
        assert said in str(caught.value)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_names_that_a_version_leaves_out_share_a_place_with_one_it_has() -> None:
    left_out, embed, head = WeightTable(Tied()).left_out, "embed.weight", "head.weight"
    assert left_out({embed, "norm"}) == {embed: [head]}
    assert left_out({head}) == {head: [embed]}
    assert left_out({embed, head}) == left_out({"norm"}) == {}


def test_a_dtype_that_is_not_known_is_named() -> None:
    manifest, data = in_memory({"w": torch.zeros(2)})
    strange: Any = "F8_E4M3"
    entry = TensorEntry(name="w", dtype=strange, shape=[2], offset=0, nbytes=2)
    manifest = msgspec.structs.replace(manifest, tensors=[entry])
    with pytest.raises(UsageError, match="tensor w has dtype F8_E4M3; known: F32, BF16, F16"):
        list(tensors_in(manifest, data))
