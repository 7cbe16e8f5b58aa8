"""When a published figure has got worse: its side, its own noise, what was accepted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("benchmarks_importable")


def content(hardware: str = "a machine", **figures: float) -> dict[str, Any]:
    """A file of results; `fast` is a goal, others are figures."""
    goals = [
        {"name": name, "value": value, "op": ">=", "goal": 1.0, "met": value >= 1.0}
        for name, value in figures.items()
        if name.startswith("fast")
    ]
    own = {name: value for name, value in figures.items() if not name.startswith("fast")}
    return {"hardware": hardware, "figures": own, "goals": goals}


def noted(*files: dict[str, Any], name: str = "one") -> list[dict[str, Any]]:
    """Entries of as many commits."""
    import track

    return [track.entry_of({name: file}, f"c{n}", "today") for n, file in enumerate(files)]


def worse(entries: list[dict[str, Any]], now: dict[str, Any], name: str = "one") -> list[str]:
    import track

    return [change.name for change in track.compare(entries, {name: now}, {}) if change.worse]


def test_a_goal_is_worse_on_its_wrong_side_and_beyond_its_noise() -> None:
    before = noted(content(fast=2.0))
    assert worse(before, content(fast=1.8)) == []
    assert worse(before, content(fast=1.6)) == ["one.fast"]
    assert worse(before, content(fast=9.0)) == []


def test_figures_have_the_side_that_the_table_says() -> None:
    before = noted(content(append_log_CPU_us=10.0, lmdb_CPU_us=10.0), name="store")
    now = content(append_log_CPU_us=20.0, lmdb_CPU_us=20.0)
    assert worse(before, now, "store") == ["store.append_log_CPU_us"]
    assert worse(before, content(append_log_CPU_us=5.0), "store") == []


def test_noise_is_that_of_earlier_measurements() -> None:
    import track

    calm = [content(fast=value) for value in (2.0, 2.01, 1.99, 2.0)]
    assert worse(noted(*calm), content(fast=1.8)) == ["one.fast"]
    wild = [content(fast=value) for value in (2.0, 3.0, 2.0, 3.0)]
    assert worse(noted(*wild), content(fast=1.3)) == []
    assert track.noise_of("one.fast", [2.0] * 9) == track.FLOOR


def test_a_value_is_compared_with_the_median_of_the_last_ones() -> None:
    entries = noted(*[content(fast=value) for value in (9.0, 2.0, 2.1, 9.0, 2.0)])
    import track

    change = next(iter(track.compare(entries, {"one": content(fast=1.9)}, {})))
    assert change.before == 2.1


def test_what_was_noted_already_is_not_compared_with_itself() -> None:
    assert worse(noted(content(fast=2.0), content(fast=1.0)), content(fast=1.0)) == ["one.fast"]
    assert worse(noted(content(fast=1.0)), content(fast=1.0)) == []


def test_another_machine_is_another_series() -> None:
    assert worse(noted(content("large", fast=9.0)), content("small", fast=1.0)) == []


def test_of_a_count_that_was_zero_a_missed_goal_is_worse() -> None:
    def lost(count: float) -> dict[str, Any]:
        goal = {"name": "lost", "value": count, "op": "<=", "goal": 0, "met": count <= 0}
        return {"hardware": "a machine", "figures": {}, "goals": [goal]}

    assert worse(noted(lost(0)), lost(0)) == []
    assert worse(noted(lost(0)), lost(1)) == ["one.lost"]


def test_what_is_accepted_is_where_the_series_begins_anew() -> None:
    import track

    entries = noted(content(fast=2.0), content(fast=1.0))
    entries[1]["accepted"] = {"one.fast": "a check was added"}
    assert worse(entries, content(fast=0.98)) == []
    same = entries[:1]
    assert track.new_in(same, noted(content(fast=2.0))[0], []) == {}
    assert list(track.new_in(same, noted(content(fast=2.0))[0], ["one.fast"])) == ["one"]


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of results and a file of its own; nothing is counted."""
    import track

    monkeypatch.setattr(track, "RESULTS", tmp_path)
    monkeypatch.setattr(track, "FILE", tmp_path / "track" / "track.json")
    (tmp_path / "track").mkdir()
    monkeypatch.setattr(track.counted, "missing", lambda: "valgrind is not installed")
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, *flags: str) -> int:
    import track

    monkeypatch.setattr("sys.argv", ["track.py", *flags])
    return track.main()


def test_a_release_is_held_up_until_it_is_accepted(
    release: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import track

    file = release / "one.json"
    file.write_text(json.dumps(content(fast=2.0)))
    assert run(monkeypatch, "--keep") == 0
    assert "not counted: valgrind is not installed" in capsys.readouterr().out
    file.write_text(json.dumps(content(fast=1.0)))
    assert run(monkeypatch, "--keep") == 1
    assert "WORSE" in capsys.readouterr().out
    assert len(track.read()) == 1
    assert run(monkeypatch, "--keep", "--accept", "one.fast=a check was added") == 0
    assert track.read()[-1]["accepted"] == {"one.fast": "a check was added"}
    assert run(monkeypatch) == 0


@pytest.mark.parametrize("flag", ["one.fast", "one.slow=why"])
def test_only_what_got_worse_is_accepted_and_with_a_reason(
    release: Path, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    (release / "one.json").write_text(json.dumps(content(fast=2.0)))
    with pytest.raises(SystemExit):
        run(monkeypatch, "--accept", flag)


def test_the_file_of_this_repository_can_be_compared_with() -> None:
    import track

    entries, files = track.read(), track.results_here()
    assert {name for entry in entries for name in entry["measured"]} - {"counted"} <= files.keys()
    assert all(
        track.noise_of(one.name, [one.before]) > 0 for one in track.compare(entries, files, {})
    )


@pytest.mark.parametrize("name", ["message", "store", "step"])
def test_what_is_counted_can_be_done(name: str) -> None:
    import counted

    counted.WORKS[name][0]()(1)


@pytest.mark.real
def test_counts_are_the_same_each_time() -> None:
    import counted

    if counted.missing():
        pytest.skip(counted.missing())
    first, second = (counted.instructions(["message"])["message"] for _ in range(2))
    assert first > 0 and second == pytest.approx(first, rel=0.01)
