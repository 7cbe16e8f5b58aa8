"""Samples to read, now and then, and the slowest ones."""

from pathlib import Path
from typing import Any

from umbra.proto.records import Trajectory, VersionSpan, pack_float32, pack_int32
from umbra.services.generator.sample_log import EVERY_S, TEXT_CHARS, SampleLog
from umbra.services.modeling.chat import Chat
from umbra.services.modeling.models import load_tokenizer
from umbra.services.runtime.process.metrics import MetricsFile


def trajectory(name: str, prompt: list[int], response: list[int], seconds: float) -> Trajectory:
    count = len(response)
    return Trajectory(
        sample_id=name,
        group_id="g",
        prompt_id="7",
        attempt=1,
        prompt_ids=pack_int32(prompt),
        response_ids=pack_int32(response),
        loss_mask=b"\1" * count,
        logprobs=pack_float32([0.0] * count),
        spans=[VersionSpan(version=3, start=0, end=count)],
        finish_reason="stop",
        reward=0.5,
        started_at=100.0,
        finished_at=100.0 + seconds,
    )


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
    slow = trajectory("slow", ids("1 2"), ids("3"), seconds=9.0)
    sample_log.finished([slow, trajectory("fast", ids("31"), ids("13"), seconds=1.0)])
    (one, shown), (two, slowest) = rows
    assert (one, two) == ("sample", "slow_sample")
    assert (shown["sample"], shown["prompt"], shown["response"]) == ("fast", "31", "13")
    assert (shown["reward"], shown["tokens"], shown["versions"]) == (0.5, 2, [3, 3])
    assert (slowest["sample"], slowest["seconds"]) == ("slow", 9.0)
    assert "response" not in slowest

    sample_log.finished([slow])
    assert len(rows) == 2  # not more often than every few seconds
    now[0] += EVERY_S
    sample_log.finished([trajectory("long", ids("1"), ids("2") * (2 * TEXT_CHARS), seconds=2.0)])
    assert len(rows) == 4
    assert len(rows[2][1]["response"]) == TEXT_CHARS + 1
    assert rows[3][1]["sample"] == "slow"
