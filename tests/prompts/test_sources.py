"""Where prompts come from: the same ones in the same order, whatever happened in between."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from umbra.proto.errors import UsageError
from umbra.services.buffer.prompts import PromptFeed, open_prompts
from umbra.services.config import DataConfig

ROWS = """
def seven():
    return ({"prompt": f"row {number}"} for number in range(7))

def none():
    return []
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rows.py").write_text(ROWS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def write(path: Path, count: int, name: str = "row") -> str:
    path.write_text("".join(json.dumps({"prompt": f"{name} {i}"}) + "\n" for i in range(count)))
    return str(path)


def draw(feed: PromptFeed, count: int) -> list[str]:
    return [next(feed).row["prompt"] for _ in range(count)]


def mixed(tmp_path: Path) -> DataConfig:
    a, b = write(tmp_path / "a.jsonl", 3, "a"), write(tmp_path / "b.jsonl", 50, "b")
    return DataConfig(prompts={a: 3.0, b: 1.0})


def test_every_epoch_has_all_rows_in_another_order_and_the_same_for_the_same_seed(
    tmp_path: Path,
) -> None:
    data = DataConfig(prompts=write(tmp_path / "p.jsonl", 20))
    feed = open_prompts(data, seed=1)
    first, second = draw(feed, 20), draw(feed, 20)
    assert set(first) == set(second) and first != second
    assert draw(open_prompts(data, seed=1), 40) == first + second
    assert draw(open_prompts(data, seed=2), 20) != first


def test_without_shuffle_the_order_is_that_of_the_file(tmp_path: Path) -> None:
    data = DataConfig(prompts=write(tmp_path / "p.jsonl", 10), shuffle=False)
    assert draw(open_prompts(data, seed=0), 12) == [f"row {n % 10}" for n in range(12)]


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize("kind", ["one", "mixture", "function"])
def test_no_prompt_is_skipped_or_repeated_after_a_restart(kind: str, tmp_path: Path) -> None:
    data = {
        "one": DataConfig(prompts=write(tmp_path / "p.jsonl", 7)),
        "mixture": mixed(tmp_path),
        "function": DataConfig(prompts="my_rows:seven"),
    }[kind]
    whole = draw(open_prompts(data, seed=1), 60)
    for cut in (0, 1, 7, 20):
        feed = open_prompts(data, seed=1)
        draw(feed, cut)
        position: dict[str, Any] = json.loads(json.dumps(feed.position()))
        again = open_prompts(data, seed=1)
        again.seek(position)
        assert draw(again, 60 - cut) == whole[cut:]


def test_sources_are_drawn_by_weight_and_their_ids_differ(tmp_path: Path) -> None:
    feed = open_prompts(mixed(tmp_path), seed=0)
    prompts = [next(feed) for _ in range(2000)]
    shares = Counter(prompt.row["prompt"][0] for prompt in prompts)
    assert 1400 < shares["a"] < 1600
    assert len({p.prompt_id for p in prompts}) == len({p.row["prompt"] for p in prompts}) == 53


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("data", "said"),
    [
        (DataConfig(), "data.prompts is not set"),
        (DataConfig(prompts={"b": 0.0}), "weight of b"),
        (DataConfig(prompts="no_such_module:f"), "no_such_module:f gave no prompts"),
        (DataConfig(prompts="my_rows:none"), "my_rows:none has no rows"),
        (DataConfig(prompts="my_rows:missing"), "my_rows:missing gave no prompts: AttributeError"),
    ],
)
def test_mistakes_are_named(data: DataConfig, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        open_prompts(data, seed=0)


def test_a_position_in_other_prompts_is_refused(tmp_path: Path) -> None:
    feed = open_prompts(DataConfig(prompts=write(tmp_path / "p.jsonl", 3)), seed=0)
    other = open_prompts(DataConfig(prompts=write(tmp_path / "q.jsonl", 4)), seed=0)
    with pytest.raises(UsageError, match="use the same files"):
        other.seek(feed.position())
