"""Backends of attention compute the same, whatever lies in the rows; a wrong one is found out."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fakes.architectures import ARCHITECTURES, WINDOW
from fakes.packed_rows import LAYOUTS, inputs, rows_of
from torch import Tensor

from umbra.services.modeling import attention as module
from umbra.services.modeling import attention_backends
from umbra.services.modeling.attention import Attention, KernelShape, differences, flex_fault
from umbra.services.modeling.attention_backends import attend
from umbra.services.modeling.micro_batch import BLOCK, RowBlocks, RowMask
from umbra.services.modeling.scorer import Scorer

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SIZES = ((4, 2, 16, 16), (2, 2, 24, 16))
SHAPES = [*(KernelShape(*each) for each in SIZES), KernelShape(4, 2, 16, 16, cap=2.0, sinks=True)]


@pytest.fixture(autouse=True)
def _alone() -> None:
    flex_fault.cache_clear()


@pytest.mark.parametrize("window", [None, 7, 4096])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_right_is_within_rounding(
    shape: KernelShape, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RowMask, "blocks", dense)
    exact = differences(shape, window, CPU, torch.float64)
    assert len(exact) == (5 if shape.sinks else 4)
    assert max(exact.values()) < 1e-12
    assert flex_fault(shape, window, CPU, torch.bfloat16) is None


def dense(mask: RowMask) -> Any:
    """A dense mask in the place of blocks: flex_attention has no backward pass on CPUs."""
    found = mask.allowed().unsqueeze(1)
    found.other = True  # pyright: ignore[reportAttributeAccessIssue]
    return found


def broken(v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    raise NotImplementedError("no kernel\nfor this")


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (lambda v, mask: (v, mask | mask.roll(-1, -1).tril(-1)), "its outputs differ by"),
        (lambda v, mask: (v.detach() + 0 * v, mask), "its gradients of values differ by"),
        (broken, "NotImplementedError: no kernel"),
    ],
)
def test_what_is_wrong_is_named(
    monkeypatch: pytest.MonkeyPatch,
    harm: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    told: str,
) -> None:
    def wrong(q: Tensor, k: Tensor, v: Tensor, mask: Any, **how: Any) -> Tensor:
        v, mask = harm(v, mask) if hasattr(mask, "other") else (v, mask)
        return attend(q, k, v, mask, **how)

    monkeypatch.setattr(RowMask, "blocks", dense)
    monkeypatch.setattr(module, "attend", wrong)
    found = flex_fault(SHAPES[0], 7, CPU, torch.float32)
    assert found is not None and found.startswith(told)
    assert "\n" not in found


@pytest.mark.parametrize(
    ("name", "fault", "backend", "plain"),
    [
        ("mistral-window", "it is off", "sdpa", True),
        ("mistral-window", None, "auto", True),
        ("gemma2", None, "auto", False),
        ("gpt-oss", None, "auto", False),
    ],
)
def test_a_gpu_on_which_flex_is_wrong_does_without(
    name: str, fault: str | None, backend: str, plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ARCHITECTURES[name].model()
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(module, "flex_fault", lambda *what: asked.append(what) or fault)
    attention = Attention.prepare(model, CUDA)
    shape, _, *where = asked[0]
    config = model.config
    assert where == [CUDA, torch.bfloat16]
    assert shape.width == config.head_dim
    assert shape.heads * config.num_key_value_heads == shape.groups * config.num_attention_heads
    assert (attention.backend, attention.plain) == (backend, plain)
    asked.clear()
    assert Attention.prepare(model, CPU).backend == "sdpa" and not asked, "not on CPUs"


def test_auto_takes_flex_for_rows_that_need_a_mask() -> None:
    packed, alone = (rows_of(layout).mask for layout in ("packed", "one sequence in each row"))
    assert isinstance(Attention(backend="auto").express(packed), RowBlocks)
    assert isinstance(Attention(backend="sdpa").express(packed), Tensor)
    assert Attention(backend="auto").express(alone) is None
    assert isinstance(Attention(backend="auto", plain=False).express(alone), RowBlocks)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("layout", "window", "cap", "sinks"),
    [
        *((layout, window, None, False) for layout in LAYOUTS for window in (None, 7, 200)),
        ("shared prompts", 7, 2.0, False),
        ("shared prompts", 7, None, True),
    ],
)
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
    rows, width = mask.positions.shape
    dense, blocks = mask.allowed(), mask.blocks()

    def spread(count: Tensor | None, index: Tensor | None) -> Tensor:
        """Return which pairs of tokens are in one of the first `count` blocks of `index`."""
        assert count is not None and index is not None
        used = torch.arange(index.shape[-1]) < count[..., None]
        grid = torch.zeros(index.shape, dtype=torch.int32)
        grid = grid.scatter_add(-1, index.long(), used.int())[:, 0].bool()
        return grid.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)[:, :width, :width]

    some = spread(blocks.kv_num_blocks, blocks.kv_indices)
    full = spread(blocks.full_kv_num_blocks, blocks.full_kv_indices)
    assert not (full & ~dense).any(), "full blocks are full"
    assert not (full & some).any()
    assert torch.equal((full | some) & dense, dense), "nothing is missing"
    grid = torch.arange(width)
    rule = blocks.mask_mod(
        torch.arange(rows)[:, None, None], torch.tensor(0), grid[None, :, None], grid[None, None]
    )
    assert torch.equal(rule.expand_as(dense), dense)


MODELS = ["qwen2.5-window", "mistral-window", "gemma2", "gpt-oss", "deepseek-v3", "cohere2"]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_flex_gives_the_logprobs_of_the_dense_mask(name: str) -> None:
    micro, model = rows_of("shared prompts"), ARCHITECTURES[name].model()
    assert micro.input_ids.shape[1] > WINDOW
    windows = Attention.prepare(model, CPU).windows
    dense, found = (
        Scorer(model, attention=Attention(windows, backend))(micro, torch.ones(len(micro.source)))[
            0
        ]
        for backend in ("sdpa", "flex")
    )
    torch.testing.assert_close(found, dense, atol=2e-5, rtol=0)


# -- how often flex_attention is compiled: each time takes ten seconds of a GPU, where
# `gpu_session.sh` counts them.


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Dynamo decides about recompilations; its graphs are run as they are, on the CPU."""
    compiled: Counter[str] = Counter()
    real = torch.compile

    def counting(function: Any, **how: Any) -> Any:
        def backend(graph: Any, _: Any) -> Any:
            compiled[function.__name__] += 1
            return graph.forward

        return real(function, backend=backend, **how)

    monkeypatch.setattr(torch, "compile", counting)
    monkeypatch.setattr(attention_backends, "_flex_on", lambda _: attention_backends._flex_kernel)
    attention_backends._compiled.cache_clear()
    yield compiled
    attention_backends._compiled.cache_clear()
    torch.compiler.reset()


def test_past_the_limit_it_fails_and_never_computes_all_scores(compiled: Counter[str]) -> None:
    few = torch._dynamo.config.patch(recompile_limit=1)
    with few, torch.no_grad(), pytest.raises(Exception, match="fullgraph=True") as raised:
        for layout in LAYOUTS:
            micro = rows_of(layout)
            q, k, v = (each.detach() for each in inputs(micro, 2, 1, 16, 16))
            attend(q, k, v, micro.mask.blocks())
    assert type(raised.value).__name__ == "FailOnRecompileLimitHit"
    assert set(compiled.values()) == {1}
