"""Where prompts come from: the same ones in the same order, whatever happened in between."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from umbra.proto.errors import UsageError
from umbra.services.buffer.sources import PromptFeed, open_prompts
from umbra.services.runtime.config import Data


def write(path: Path, count: int, name: str = "row") -> str:
    path.write_text("".join(json.dumps({"prompt": f"{name} {i}"}) + "\n" for i in range(count)))
    return str(path)


def draw(feed: PromptFeed, count: int) -> list[str]:
    return [next(feed).row["prompt"] for _ in range(count)]


def mixed(tmp_path: Path) -> Data:
    a, b = write(tmp_path / "a.jsonl", 3, "a"), write(tmp_path / "b.jsonl", 50, "b")
    return Data(sources={a: 3.0, b: 1.0})


def test_every_epoch_has_all_rows_in_another_order_and_the_same_for_the_same_seed(
    tmp_path: Path,
) -> None:
    data = Data(prompts=write(tmp_path / "p.jsonl", 20))
    feed = open_prompts(data, seed=1)
    first, second = draw(feed, 20), draw(feed, 20)
    assert set(first) == set(second) and first != second
    assert draw(open_prompts(data, seed=1), 40) == first + second
    assert draw(open_prompts(data, seed=2), 20) != first


@pytest.mark.parametrize("kind", ["one", "mixture", "curriculum"])
def test_no_prompt_is_skipped_or_repeated_after_a_restart(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = Data(prompts=write(tmp_path / "p.jsonl", 7))
    if kind == "mixture":
        data = mixed(tmp_path)
    elif kind == "curriculum":
        hook = "def easy(rows, epoch): return range(min(len(rows), epoch + 1))\n"
        (tmp_path / "my_curriculum.py").write_text(hook)
        monkeypatch.chdir(tmp_path)
        data = Data(prompts=data.prompts, curriculum="my_curriculum:easy")
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


def test_a_prompt_that_keeps_failing_is_drawn_no_more(tmp_path: Path) -> None:
    feed = open_prompts(Data(prompts=write(tmp_path / "p.jsonl", 3), shuffle=False), seed=0,
                        attempts=2)  # fmt: skip
    feed.ended_badly("2")
    assert "row 1" in draw(feed, 3)
    feed.ended_badly("2")
    assert draw(feed, 4) == ["row 0", "row 2", "row 0", "row 2"]
    again = open_prompts(Data(prompts=str(tmp_path / "p.jsonl"), shuffle=False), seed=0, attempts=2)
    again.seek(feed.position())
    assert again.withdrawn == 1
    for number in ("1", "3"):
        feed.ended_badly(number)
        feed.ended_badly(number)
    assert len(set(draw(feed, 3))) == 3  # all were withdrawn: they start over


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (Data(), "data.prompts is not set"),
        (Data(prompts="a", sources={"b": 1.0}), "remove one of them"),
        (Data(sources={"b": 0.0}), "weight of b"),
        (Data(prompts="no.parquet"), "umbra-rl|no such file"),
        (Data(prompts="datasets:nothing-like-it"), "umbra-rl|cannot be loaded"),
        (Data(prompts="x", curriculum="no_such_module:f"), "data.curriculum"),
    ],
)
def test_mistakes_are_named(data: Data, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        open_prompts(data, seed=0)


def test_a_position_in_other_prompts_is_refused(tmp_path: Path) -> None:
    feed = open_prompts(Data(prompts=write(tmp_path / "p.jsonl", 3)), seed=0)
    other = open_prompts(Data(prompts=write(tmp_path / "q.jsonl", 4)), seed=0)
    with pytest.raises(UsageError, match="use the same files"):
        other.seek(feed.position())
