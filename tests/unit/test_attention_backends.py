"""All backends of attention compute the same, whatever lies in the rows."""

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.architectures import ARCHITECTURES, WINDOW
from fakes.packed_rows import LAYOUTS, fed, gradients, inputs, rows_of, samples
from torch import Tensor

from umbra.proto.errors import UsageError
from umbra.services.modeling import segment_attention
from umbra.services.modeling.attention import DENSE_WIDTH, Attention
from umbra.services.modeling.attention_backends import attend
from umbra.services.modeling.packing import pack
from umbra.services.modeling.row_mask import BLOCK, RowMask
from umbra.services.modeling.scorer import Scorer
from umbra.services.trainer.policy import load_policy

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("window", [None, 7, 100])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("cap", "sinks", "shape"),
    [
        (None, False, (4, 2, 16, 16)),
        (None, False, (2, 2, 24, 16)),  # latent attention: values are narrower
        (None, True, (4, 2, 16, 16)),
        (2.0, False, (4, 1, 16, 16)),
        (2.0, True, (6, 2, 16, 8)),
    ],
)
def test_segments_are_the_dense_mask(
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    window: int | None,
    cap: float | None,
    sinks: bool,
    shape: tuple[int, int, int, int],
) -> None:
    monkeypatch.setattr(segment_attention, "SCORES", 1 << 13)  # several tiles for each piece
    micro = rows_of(layout)
    of = inputs(micro, *shape)
    if sinks:
        of.append(torch.linspace(-1, 2, shape[0], dtype=torch.float64).requires_grad_())
    how: Any = {"scale": 0.3, "cap": cap, "sinks": of[3] if sinks else None}
    mask, seen = micro.mask.within(window), fed(micro)
    q, k, v = of[:3]
    dense = attend(q, k, v, mask.allowed().unsqueeze(1), **how)
    found = attend(q, k, v, mask, **how)
    torch.testing.assert_close(found[seen[:, None].expand(found.shape[:3])],
                               dense[seen[:, None].expand(found.shape[:3])])  # fmt: skip
    for ours, theirs in zip(gradients(found, of, seen), gradients(dense, of, seen), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize(("cap", "sinks"), [(None, False), (2.0, True)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_segments_are_as_exact_as_the_dense_mask_in_bfloat16(
    layout: str, window: int | None, cap: float | None, sinks: bool
) -> None:
    """Under autocast both round; segments are no farther from float64 than the dense mask is."""
    micro = rows_of(layout)
    mask, seen = micro.mask.within(window), fed(micro)
    where = seen[:, None].expand(-1, 4, -1)

    def found(kind: str, dtype: torch.dtype) -> list[Tensor]:
        of = [t.detach().to(dtype).requires_grad_() for t in inputs(micro, 4, 2, 16, 16)]
        sink = None
        if sinks:
            sink = torch.linspace(-1, 2, 4, dtype=dtype, requires_grad=True)
            of.append(sink)
        form = mask if kind == "segments" else mask.allowed().unsqueeze(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            q, k, v = (t.to(torch.bfloat16) if dtype == torch.float32 else t for t in of[:3])
            output = attend(q, k, v, form, scale=0.3, cap=cap, sinks=sink)
        assert output.dtype == (torch.bfloat16 if dtype == torch.float32 else dtype)
        return [t.double() for t in (output[where], *gradients(output, of, seen))]

    exact = found("dense", torch.float64)
    dense, ours = (found(kind, torch.float32) for kind in ("dense", "segments"))
    for one, other, true in zip(ours, dense, exact, strict=True):
        assert (one - true).norm() <= 1.5 * (other - true).norm() + 1e-4 * true.norm()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 7, 200])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("cap", "sinks"), [(None, False), (2.0, False), (None, True)])
@torch.no_grad()
def test_flex_is_the_dense_mask(
    layout: str, window: int | None, cap: float | None, sinks: bool
) -> None:
    micro = rows_of(layout)
    q, k, v = (t.detach().float() for t in inputs(micro, 4, 2, 16, 16))
    sink = torch.linspace(-1, 2, 4) if sinks else None
    mask = micro.mask.within(window)
    dense = attend(q, k, v, mask.allowed().unsqueeze(1), scale=0.3, cap=cap, sinks=sink)
    found = attend(q, k, v, mask.blocks(), scale=0.3, cap=cap, sinks=sink)
    torch.testing.assert_close(found, dense)


@pytest.mark.parametrize("window", [None, 7, 200])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_are_those_of_the_dense_mask(layout: str, window: int | None) -> None:
    """A block that is left out is not seen, and a full one is not looked at again."""
    mask = rows_of(layout).mask.within(window)
    rows, _, width, _ = mask.shape
    dense = mask.allowed()
    blocks = mask.blocks()
    full = torch.zeros_like(dense)
    some = torch.zeros_like(dense)
    for target, count, index in (
        (some, blocks.kv_num_blocks, blocks.kv_indices),
        (full, blocks.full_kv_num_blocks, blocks.full_kv_indices),
    ):
        assert count is not None and index is not None
        for row in range(rows):
            for at in range(-(-width // BLOCK)):
                for which in index[row, 0, at, : int(count[row, 0, at])].tolist():
                    target[row, at * BLOCK : (at + 1) * BLOCK, which * BLOCK : (which + 1) * BLOCK] = True  # noqa: E501  # fmt: skip
    assert not (full & ~dense).any(), "full blocks are full"
    assert not (full & some).any()
    assert torch.equal((full | some) & dense, dense), "nothing is missing"
    grid = torch.arange(width)
    rule = blocks.mask_mod(
        torch.arange(rows)[:, None, None], torch.tensor(0), grid[None, :, None], grid[None, None]
    )
    assert torch.equal(rule.expand_as(dense), dense)


@pytest.mark.parametrize("layout", ["one sequence in each row", "packed"])
def test_sequences_of_different_lengths_are_the_dense_mask(layout: str) -> None:
    mask = rows_of(layout).mask
    rows, _, width, _ = mask.shape
    sequences = mask.sequences()
    dense = torch.zeros(rows * width, rows * width, dtype=torch.bool)
    starts = sequences.starts.tolist()
    for a, b in pairwise(starts):
        dense[a:b, a:b] = torch.ones(b - a, b - a, dtype=torch.bool).tril()
    assert starts[0] == 0 and starts[-1] == rows * width
    assert max(b - a for a, b in pairwise(starts)) == sequences.longest
    seen = fed(rows_of(layout)).flatten()
    for row in range(rows):
        here = slice(row * width, (row + 1) * width)
        assert torch.equal(dense[here, here][seen[here]], mask.allowed()[row][seen[here]])


# -- whole models --------------------------------------------------------------------------------

MODELS = ["qwen2.5-window", "mistral-window", "gemma2", "gpt-oss", "deepseek-v3", "cohere2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("architectures")


def scorer_of(folder: Path, name: str, backend: str) -> Scorer:
    """Of a tiny model, by a backend that may be refused on this device."""
    path = folder / name
    policy, _ = load_policy(path if path.exists() else ARCHITECTURES[name].write(path))
    attention = Attention.prepare(policy, "auto", CPU)
    return Scorer(policy, attention=replace(attention, backend=backend)).eval()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_flex_gives_the_logprobs_of_the_dense_mask(folder: Path, name: str) -> None:
    micro = rows_of("shared prompts")
    assert micro.input_ids.shape[1] > WINDOW
    ones = torch.ones(len(micro.source))
    dense, _ = scorer_of(folder, name, "sdpa")(micro, ones)
    found, _ = scorer_of(folder, name, "flex")(micro, ones)
    torch.testing.assert_close(found, dense, atol=2e-5, rtol=0)


def test_auto_takes_no_mask_of_all_pairs_of_a_long_row(folder: Path) -> None:
    scorer = scorer_of(folder, "mistral-window", "auto")
    for size, kind in ((DENSE_WIDTH // 2, Tensor), (DENSE_WIDTH, RowMask)):
        tokens = samples([(4, size, 1), (4, size // 2, 1)])
        (micro,) = pack(tokens, pack_tokens=2 * size, micro_tokens=1 << 20)
        assert isinstance(scorer._attention.express(micro.mask), kind)


@pytest.mark.parametrize(
    ("name", "choice", "sentence"),
    [
        ("gemma2", "flex", 'trainer.attention is "flex", which needs a CUDA GPU: use "auto"'),
        ("qwen3", "varlen", 'trainer.attention is "varlen", which needs a CUDA GPU: use "auto"'),
    ],
)
def test_a_backend_that_needs_a_gpu_is_refused_without_one(
    folder: Path, name: str, choice: Any, sentence: str
) -> None:
    with pytest.raises(UsageError) as caught:
        Attention.prepare(scorer_of(folder, name, "auto").model, choice, CPU)
    assert str(caught.value) == sentence


@pytest.mark.parametrize("name", ["gemma2", "gpt-oss"])
def test_varlen_is_refused_where_it_would_leave_something_out(folder: Path, name: str) -> None:
    model = scorer_of(folder, name, "auto").model
    with pytest.raises(UsageError, match=r"which has no soft caps or sinks, and a \w+ has"):
        Attention.prepare(model, "varlen", torch.device("cuda"))


def test_varlen_is_refused_in_float32() -> None:
    micro = rows_of("packed")
    q, k, v = (t.float() for t in inputs(micro, 2, 2, 16, 16))
    with pytest.raises(UsageError, match=r'"varlen" computes in 16 bits: set trainer\.precision'):
        attend(q, k, v, micro.mask.sequences())


def test_varlen_is_refused_for_shared_prompts(folder: Path) -> None:
    attention = scorer_of(folder, "qwen3", "varlen")._attention
    with pytest.raises(UsageError, match=r"set trainer\.share_prompts = false"):
        attention.express(rows_of("shared prompts").mask)
    assert attention.express(rows_of("packed").mask) is not None


MEMORY = """
import resource, sys, torch
from umbra.services.modeling.attention_backends import attend
from umbra.services.modeling.row_mask import RowSegment, RowMask
torch.set_num_threads(1)
width, window, cap = int(sys.argv[1]), *(eval(argument) for argument in sys.argv[2:4])
def step(width):
    half = width // 2
    pieces = (RowSegment(0, 0, half), RowSegment(0, half, width - half, 0, half))
    positions = torch.arange(width)[None]
    q, k, v = (torch.randn(1, 2, width, 8, requires_grad=True) for _ in range(3))
    mask = RowMask(positions, pieces).within(window)
    attend(q, k, v, mask, cap=cap).sum().backward()
step(64)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
step(width)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.parametrize(("window", "cap"), [(None, None), (1000, None), (1000, 30.0)])
def test_a_long_row_needs_no_memory_for_pairs(window: int | None, cap: float | None) -> None:
    """A mask of all pairs of 8,000 positions would have 64 MB, scores 256 MB for each head."""
    found = subprocess.run(
        [sys.executable, "-c", MEMORY, "8000", repr(window), repr(cap)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert int(found.stdout) < 120
