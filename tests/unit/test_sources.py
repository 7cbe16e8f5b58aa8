"""Where prompts come from: the same ones in the same order, whatever happened in between."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from umbra.proto.errors import UsageError
from umbra.services.buffer.data.prompts import GroupEnd
from umbra.services.buffer.data.sources import PromptFeed, open_prompts
from umbra.services.config import DataConfig


def write(path: Path, count: int, name: str = "row") -> str:
    path.write_text("".join(json.dumps({"prompt": f"{name} {i}"}) + "\n" for i in range(count)))
    return str(path)


def draw(feed: PromptFeed, count: int) -> list[str]:
    return [next(feed).row["prompt"] for _ in range(count)]


def end(prompt_id: str, reason: Any, *rewards: float) -> GroupEnd:
    return GroupEnd(prompt_id, reason, list(rewards))


def mixed(tmp_path: Path) -> DataConfig:
    a, b = write(tmp_path / "a.jsonl", 3, "a"), write(tmp_path / "b.jsonl", 50, "b")
    return DataConfig(sources={a: 3.0, b: 1.0})


def test_every_epoch_has_all_rows_in_another_order_and_the_same_for_the_same_seed(
    tmp_path: Path,
) -> None:
    data = DataConfig(prompts=write(tmp_path / "p.jsonl", 20))
    feed = open_prompts(data, seed=1)
    first, second = draw(feed, 20), draw(feed, 20)
    assert set(first) == set(second) and first != second
    assert draw(open_prompts(data, seed=1), 40) == first + second
    assert draw(open_prompts(data, seed=2), 20) != first


@pytest.mark.parametrize("kind", ["one", "mixture", "curriculum"])
def test_no_prompt_is_skipped_or_repeated_after_a_restart(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = DataConfig(prompts=write(tmp_path / "p.jsonl", 7))
    if kind == "mixture":
        data = mixed(tmp_path)
    elif kind == "curriculum":
        hook = "def easy(rows, epoch, stats): return range(min(len(rows), epoch + 1))\n"
        (tmp_path / "my_curriculum.py").write_text(hook)
        monkeypatch.chdir(tmp_path)
        data = DataConfig(prompts=data.prompts, curriculum="my_curriculum:easy")
    whole = draw(open_prompts(data, seed=1), 60)
    for cut in (0, 1, 7, 20):
        feed = open_prompts(data, seed=1)
        draw(feed, cut)
        position: dict[str, Any] = json.loads(json.dumps(feed.position()))
        again = open_prompts(data, seed=1)
        again.seek(position, feed.changes())
        assert draw(again, 60 - cut) == whole[cut:]


def test_sources_are_drawn_by_weight_and_their_ids_differ(tmp_path: Path) -> None:
    feed = open_prompts(mixed(tmp_path), seed=0)
    prompts = [next(feed) for _ in range(2000)]
    shares = Counter(prompt.row["prompt"][0] for prompt in prompts)
    assert 1400 < shares["a"] < 1600
    assert len({p.prompt_id for p in prompts}) == len({p.row["prompt"] for p in prompts}) == 53


def test_a_prompt_that_keeps_failing_is_drawn_no_more(tmp_path: Path) -> None:
    feed = open_prompts(DataConfig(prompts=write(tmp_path / "p.jsonl", 3), shuffle=False), seed=0,
                        attempts=2)  # fmt: skip
    feed.ended(end("2", "failed"))
    assert "row 1" in draw(feed, 3)
    feed.ended(end("1", "complete"))
    feed.ended(end("2", "filtered"))
    assert draw(feed, 4) == ["row 0", "row 2", "row 0", "row 2"]
    again = open_prompts(
        DataConfig(prompts=str(tmp_path / "p.jsonl"), shuffle=False), seed=0, attempts=2
    )
    again.seek(feed.position(), feed.changes())
    assert again.withdrawn == 1
    for number in ("1", "3"):
        feed.ended(end(number, "failed"))
        feed.ended(end(number, "failed"))
    assert len(set(draw(feed, 3))) == 3  # all were withdrawn: they start over


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (DataConfig(), "data.prompts is not set"),
        (DataConfig(prompts="a", sources={"b": 1.0}), "remove one of them"),
        (DataConfig(sources={"b": 0.0}), "weight of b"),
        (DataConfig(prompts="x", curriculum="no_such_module:f"), "data.curriculum"),
    ],
)
def test_mistakes_are_named(data: DataConfig, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        open_prompts(data, seed=0)


def test_a_position_in_other_prompts_is_refused(tmp_path: Path) -> None:
    feed = open_prompts(DataConfig(prompts=write(tmp_path / "p.jsonl", 3)), seed=0)
    other = open_prompts(DataConfig(prompts=write(tmp_path / "q.jsonl", 4)), seed=0)
    with pytest.raises(UsageError, match="use the same files"):
        other.seek(feed.position(), {})


# -- curricula -------------------------------------------------------------------------------------

HARDEST_FIRST = """
seen = []

def hardest_first(rows, epoch, stats):
    seen.append([(one.groups, one.filtered, one.failed, one.mean_reward) for one in stats])
    return sorted(range(len(rows)), key=lambda i: stats[i].mean_reward)[: len(rows) - epoch]

def raises(rows, epoch, stats):
    return rows[9]

def two_arguments(rows, epoch):
    return [0]

def nonsense(rows, epoch, stats):
    return [0, 7]
"""


@pytest.fixture
def hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of curricula, importable by its name."""
    (tmp_path / "my_hooks.py").write_text(HARDEST_FIRST)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield "my_hooks"
    sys.modules.pop("my_hooks", None)


def epoch_of_results(feed: PromptFeed) -> None:
    """All rows are drawn once; "row 0" is easy, "row 1" level, "row 2" fails."""
    ids = [next(feed).prompt_id for _ in range(3)]
    assert sorted(ids) == ["1", "2", "3"]
    feed.ended(end("1", "complete", 1.0, 1.0, 0.0, 1.0))
    feed.ended(end("2", "filtered", 0.5, 0.5))
    feed.ended(end("3", "failed"))


def test_a_curriculum_sees_what_came_of_every_prompt(tmp_path: Path, hooks: str) -> None:
    data = DataConfig(prompts=write(tmp_path / "p.jsonl", 3), curriculum=f"{hooks}:hardest_first")
    feed = open_prompts(data, seed=0)
    epoch_of_results(feed)
    assert draw(feed, 2) == ["row 2", "row 1"]
    assert sys.modules[hooks].seen == [  # type: ignore[attr-defined]
        [(0, 0, 0, 0.0)] * 3,
        [(1, 0, 0, 0.75), (1, 1, 0, 0.5), (1, 0, 1, 0.0)],
    ]


@pytest.mark.parametrize("more", [0, 1, 2])
def test_the_order_of_an_epoch_outlives_the_buffer(tmp_path: Path, hooks: str, more: int) -> None:
    """Results that come after the order was made change the next epoch, not this one."""
    data = DataConfig(prompts=write(tmp_path / "p.jsonl", 3), curriculum=f"{hooks}:hardest_first")
    feed, kept = open_prompts(data, seed=0), {}
    epoch_of_results(feed)
    kept.update(feed.changes())
    seen = draw(feed, more)
    feed.ended(end("3", "complete", 9.0))
    kept.update(feed.changes())
    position = feed.position()
    again = open_prompts(data, seed=0)
    again.seek(position, msgspec.msgpack.decode(msgspec.msgpack.encode(kept)))
    asked = len(sys.modules[hooks].seen)  # type: ignore[attr-defined]
    assert draw(again, 3 - more) == draw(feed, 3 - more)
    expected = ["row 2", "row 1"] if more else ["row 1", "row 0"]
    assert [*seen, *draw(again, 0)][:1] == (expected[:1] if more else [])
    epochs = sys.modules[hooks].seen[asked:]  # type: ignore[attr-defined]
    assert epochs[0] == epochs[-1] and epochs[0][2] == (2, 0, 1, 9.0)


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        ("raises", "failed for epoch 0: IndexError"),
        ("two_arguments", "failed for epoch 0: TypeError"),
        ("nonsense", "indices from 0 to 2"),
        ("nothing", "write it as"),
    ],
)
def test_a_bad_curriculum_is_named(tmp_path: Path, hooks: str, hook: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        next(open_prompts(DataConfig(prompts=write(tmp_path / "p.jsonl", 3),
                               curriculum=f"{hooks}:{hook}"), seed=0))  # fmt: skip
