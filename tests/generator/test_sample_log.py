"""Samples to read, now and then, and the slowest ones."""

import itertools
from pathlib import Path
from typing import Any

import msgspec
from fakes.trajectories import trajectory

from umbra.proto.records import Branch, Trajectory
from umbra.services.generator.activity import EVERY_S, FURTHER, TEXT_CHARS, SampleLog
from umbra.services.modeling.chat import Chat
from umbra.services.modeling.models import load_tokenizer
from umbra.services.process.metrics import STEADY, MetricsFile

LATER = 4e9  # than any generator of a test begins


def timed(name: str, prompt: list[int], response: list[int], seconds: float) -> Trajectory:
    made = trajectory(prompt, response, version=3, sample_id=name, prompt_id="7", reward=0.5)
    return msgspec.structs.replace(made, started_at=LATER, finished_at=LATER + seconds)


def test_one_sample_with_text_and_the_slowest_without(tiny_model_dir: Path) -> None:
    tokenizer = load_tokenizer(tiny_model_dir)
    metrics, now = MetricsFile(None, "generator-0"), [50.0]
    rows: list[tuple[str, dict[str, Any]]] = []
    metrics.on_row = lambda kind, fields: rows.append((kind, fields))
    sample_log = SampleLog(metrics, Chat(tokenizer, {0}), clock=lambda: now[0])

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    sample_log.finished([])
    assert rows == []
    slow = timed("slow", ids("1 2"), ids("3"), seconds=9.0)
    sample_log.finished([slow, timed("fast", ids("31"), ids("13"), seconds=1.0)])
    (one, shown), (two, slowest) = rows
    assert (one, two) == ("sample", "slow_sample")
    assert (shown["sample"], shown["prompt"], shown["response"]) == ("fast", "31", "13")
    assert (shown["reward"], shown["tokens"], shown["versions"]) == (0.5, 2, [3, 3])
    assert (slowest["sample"], slowest["seconds"]) == ("slow", 9.0)
    assert "response" not in slowest
    assert (shown["branches"], shown["further"]) == (1, [])

    sample_log.finished([slow])
    assert len(rows) == 2  # not more often than every few seconds
    now[0] += EVERY_S
    sample_log.finished([timed("long", ids("1"), ids("2") * (2 * TEXT_CHARS), seconds=2.0)])
    assert len(rows) == 4
    assert len(rows[2][1]["response"]) == TEXT_CHARS + 1
    assert rows[3][1]["sample"] == "slow"


def test_branches_of_a_sample_are_shown(tiny_model_dir: Path) -> None:
    tokenizer = load_tokenizer(tiny_model_dir)
    rows: list[dict[str, Any]] = []
    metrics = MetricsFile(None, "generator-0")
    metrics.on_row = lambda _, fields: rows.append(fields)
    sample_log = SampleLog(
        metrics, Chat(tokenizer, {0}), clock=itertools.count(0.0, EVERY_S).__next__
    )

    def line(prompt: str, response: str) -> Trajectory:
        first, second = (
            tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, response)
        )
        return timed("s", first, second, seconds=1.0)

    further = line("4", "567")
    branch = Branch(**{name: getattr(further, name) for name in Branch.__struct_fields__})
    sample_log.finished([msgspec.structs.replace(line("1", "2"), branches=[branch] * 5)])
    shown = rows[0]
    assert (shown["prompt"], shown["response"]) == ("1", "2")
    assert shown["further"] == [{"prompt": "4", "response": "567"}] * FURTHER
    assert (shown["branches"], shown["tokens"]) == (6, 1 + 5 * 3)


def test_hours_in_which_the_run_was_dead_do_not_count(tiny_model_dir: Path) -> None:
    rows: list[dict[str, Any]] = []
    metrics = MetricsFile(None, "generator-0")
    metrics.on_row = lambda _, fields: rows.append(fields)
    begun = STEADY()
    sample_log = SampleLog(metrics, Chat(load_tokenizer(tiny_model_dir), {0}))
    before = timed("resumed", [0], [1], seconds=0.0)
    sample_log.finished(
        [msgspec.structs.replace(before, started_at=begun - 7200.0, finished_at=begun + 5.0)]
    )
    assert 4.0 < rows[1]["seconds"] <= 5.0
