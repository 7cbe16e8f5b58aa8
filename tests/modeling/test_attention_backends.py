"""All backends of attention compute the same, whatever lies in the rows."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fakes.architectures import ARCHITECTURES, WINDOW
from fakes.packed_rows import LAYOUTS, inputs, rows_of

from umbra.services.modeling.attention import Attention
from umbra.services.modeling.attention_backends import attend
from umbra.services.modeling.micro_batch import BLOCK
from umbra.services.modeling.scorer import Scorer
from umbra.services.trainer.policy import load_policy

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


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


MODELS = ["qwen2.5-window", "mistral-window", "gemma2", "gpt-oss", "deepseek-v3", "cohere2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("architectures")


def scorer_of(folder: Path, name: str, backend: str) -> Scorer:
    """Of a tiny model, by a backend that may be refused on this device."""
    path = folder / name
    policy, _ = load_policy(path if path.exists() else ARCHITECTURES[name].write(path))
    attention = Attention.prepare(policy, CPU)
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
