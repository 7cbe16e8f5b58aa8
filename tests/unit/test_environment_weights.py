"""Weights of environments that follow what is learned from them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from fakes.broker_world import world

from umbra.proto.errors import UsageError
from umbra.services.buffer.data.environment_weights import LEAST, EnvironmentStats
from umbra.services.buffer.data.prompts import GroupEnd
from umbra.services.buffer.data.sources import PromptFeed, open_prompts
from umbra.services.config import (
    BufferConfig,
    DataConfig,
    NamedEnvironment,
    RunConfig,
)
from umbra.services.config.feasibility import check_feasible

NAMES = ("solved", "hopeless", "teaches")
DOC = Path(__file__).resolve().parents[2] / "docs" / "environments.md"
RULES = """
def only_first(stats):
    return {name: float(number == 0) for number, name in enumerate(stats)}

def forgets(stats):
    return {"solved": 1.0}

def negative(stats):
    return dict.fromkeys(stats, -1.0)

def nothing(stats):
    return dict.fromkeys(stats, 0.0)

def raises(stats):
    return stats["other"]
"""


@pytest.fixture
def rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of rules, importable by its name; with the one of the documentation."""
    (tmp_path / "my_rules.py").write_text(RULES + in_docs("def by_progress"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield "my_rules"
    sys.modules.pop("my_rules", None)


def in_docs(begin: str) -> str:
    """The block of code in the documentation that begins so."""
    (block,) = [b for b in DOC.read_text().split("```python\n") if b.startswith(begin)]
    return block.partition("```")[0]


def environments(tmp_path: Path) -> list[NamedEnvironment]:
    made: list[NamedEnvironment] = []
    for name in NAMES:
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(f'{{"prompt": "{n}"}}\n' for n in range(5)))
        made.append(NamedEnvironment(name=name, prompts=str(path)))
    return made


def feed(tmp_path: Path, rule: str = "learnable") -> PromptFeed:
    data = DataConfig(environment_weights=rule)
    return open_prompts(data, seed=3, environments=environments(tmp_path))


def rewards(prompt_id: str, number: int) -> GroupEnd:
    """What comes of the group: all right, all wrong, or one of both."""
    name = prompt_id.partition("/")[0]
    earned = {"solved": [1.0, 1.0], "hopeless": [0.0, 0.0], "teaches": [float(number % 2), 0.5]}
    return GroupEnd(prompt_id, "complete", earned[name])


def drawn(prompts: PromptFeed, count: int, *, begin: int = 0) -> list[str]:
    """The next prompts, each of which has its end before the next one is drawn."""
    found: list[str] = []
    for number in range(begin, begin + count):
        found.append(next(prompts).prompt_id)
        prompts.ended(rewards(found[-1], number))
    return found


def test_what_teaches_is_drawn_more_and_the_rest_goes_on_being_seen(tmp_path: Path) -> None:
    prompts = feed(tmp_path)
    assert prompts.shares() == pytest.approx(dict.fromkeys(NAMES, 1 / 3)), "nothing is known yet"
    drawn(prompts, 400)
    shares = prompts.shares()
    assert shares["teaches"] == pytest.approx(1 / (1 + 2 * LEAST), abs=0.01)
    assert shares["solved"] == pytest.approx(LEAST / (1 + 2 * LEAST), abs=0.01)
    late = Counter(prompt.partition("/")[0] for prompt in drawn(prompts, 300))
    assert late["teaches"] > 200 and late["solved"] > 5 and late["hopeless"] > 5
    for number in range(64):  # what was hopeless begins to be solved now and then
        prompts.ended(GroupEnd("hopeless/1", "complete", [float(number % 2), 0.5]))
    assert prompts.shares()["hopeless"] > 3 * prompts.shares()["solved"]


def test_weights_of_the_run_file_are_factors(tmp_path: Path) -> None:
    several = [
        NamedEnvironment(name=one.name, prompts=one.prompts, weight=weight)
        for one, weight in zip(environments(tmp_path), (1.0, 2.0, 5.0), strict=True)
    ]
    data = DataConfig(environment_weights="learnable")
    prompts = open_prompts(data, seed=3, environments=several)
    assert list(prompts.shares().values()) == pytest.approx([0.125, 0.25, 0.625])
    fixed = open_prompts(DataConfig(), seed=3, environments=several)
    drawn(fixed, 50)
    assert list(fixed.shares().values()) == pytest.approx([0.125, 0.25, 0.625])
    assert fixed.changes() == {}, "nothing is kept that nobody needs"


def test_the_same_events_give_the_same_draws_also_over_restarts(tmp_path: Path) -> None:
    """1. A buffer draws, and groups end. 2. It is killed; another one has what was kept. Result:
    it goes on as if nothing had happened, whenever that was.
    """
    whole = drawn(feed(tmp_path), 120)
    assert whole == drawn(feed(tmp_path), 120)
    for cut in (1, 17, 80):
        prompts, kept = feed(tmp_path), {}
        for number in range(cut):
            assert drawn(prompts, 1, begin=number) == whole[number : number + 1]
            kept.update(prompts.changes())
        again = feed(tmp_path)
        again.seek(prompts.position(), msgspec.msgpack.decode(msgspec.msgpack.encode(kept)))
        assert again.shares() == prompts.shares()
        assert drawn(again, 120 - cut, begin=cut) == whole[cut:]


def test_groups_that_failed_tell_nothing(tmp_path: Path) -> None:
    prompts = feed(tmp_path)
    for _ in range(20):
        prompts.ended(GroupEnd("solved/1", "failed", [1.0]))
    assert prompts.shares() == pytest.approx(dict.fromkeys(NAMES, 1 / 3))
    for _ in range(20):  # buffer.dynamic_sampling
        prompts.ended(GroupEnd("solved/1", "filtered", [1.0, 1.0]))
    assert prompts.shares()["solved"] < 0.2


def test_progress_is_the_difference_of_two_means() -> None:
    stats = EnvironmentStats()
    for number in range(100):
        stats.add(GroupEnd("a/1", "complete", [number / 100, number / 100]))
    assert stats.groups == 100 and stats.reward - stats.earlier > 0.1
    for _ in range(300):
        stats.add(GroupEnd("a/1", "complete", [1.0, 1.0]))
    assert abs(stats.reward - stats.earlier) < 0.01


def test_a_rule_of_the_user_gives_the_factors(tmp_path: Path, rules: str) -> None:
    first = feed(tmp_path, f"{rules}:only_first")
    assert {prompt.partition("/")[0] for prompt in drawn(first, 50)} == {"solved"}
    progress = feed(tmp_path, f"{rules}:by_progress")
    for number in range(100):
        progress.ended(GroupEnd("solved/1", "complete", [1.0, 1.0]))
        progress.ended(GroupEnd("hopeless/1", "complete", [0.0, 0.0]))
        progress.ended(GroupEnd("teaches/1", "complete", [number / 100, number / 100]))
    assert progress.shares()["teaches"] > 0.7


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ("forgets", "a number of 0 or more for each of solved, hopeless, teaches"),
        ("negative", "a number of 0 or more"),
        ("nothing", "not all 0"),
        ("raises", "data.environment_weights failed: KeyError"),
        ("missing", 'write it as "module:function"'),
    ],
)
def test_a_bad_rule_is_named(tmp_path: Path, rules: str, rule: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        next(feed(tmp_path, f"{rules}:{rule}"))


@pytest.mark.parametrize(
    ("several", "size", "says"),
    [
        ((), 4, "environment_weights = learnable has no effect without"),
        ((NamedEnvironment(name="a"),), 1, "compares the rewards of a group"),
    ],
)
def test_where_there_is_nothing_to_weigh_it_is_refused(
    several: tuple[NamedEnvironment, ...], size: int, says: str
) -> None:
    config = RunConfig(
        environments=several,
        data=DataConfig(environment_weights="learnable"),
        buffer=BufferConfig(group_size=size),
    )
    with pytest.raises(UsageError, match=says):
        check_feasible(config)


def test_a_broker_that_starts_again_has_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. Groups are generated, and their rewards known. 2. The buffer is killed. Result: the
    batch's row of metrics has the shares, and they are the same afterwards.
    """
    monkeypatch.setattr("fakes.broker_world.EndlessPrompts", lambda _: feed(tmp_path))
    made = world(durable=True, run_ahead=3, max_staleness=3)
    made.produce("a", 0)
    before = made.broker.run.prompts.shares()
    assert max(before.values()) - min(before.values()) > 0.01
    made.batch(1)
    (row,) = [one for one in made.rows if one.kind == "batch"]
    assert {name: row.fields[f"environment/{name}/share"] for name in NAMES} == before
    made.restart_broker()
    assert made.broker.run.prompts.shares() == before
