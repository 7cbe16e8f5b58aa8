"""A whole run with a reward over whole groups, whose scorer is killed while it computes one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes.slowness import seconds
from fault.test_run_kill import kill
from integration.test_up import UpProcess, up

__all__ = ["up"]  # a fixture

GROUP = 4
REWARDS = """
import pathlib, time

def measure(prompt, completion, row):
    return 100 * len(set(completion)) + len(completion)

def rank(prompts, completions, word, **kwargs):
    assert len(prompts) == len(completions) == len(word) and len(set(prompts)) == 1
    begun = pathlib.Path("begun")
    if any(completions) and not begun.exists():
        begun.touch()
        time.sleep(3600)  # until its scorer is killed
    own = [measure("", text, {}) for text in completions]
    return [sum(other < one for other in own) / len(own) for one in own]
"""


@pytest.mark.fault
@pytest.mark.timeout(300)
def test_groups_are_rewarded_at_once_though_their_scorer_is_killed(
    project: Path, up: Callable[..., UpProcess]
) -> None:
    (project / "group_rewards.py").write_text(REWARDS)
    (project / "heldout.jsonl").write_text((project / "prompts.jsonl").read_text())
    run = (project / "run.toml").read_text()
    rewards = 'reward = { "group_rewards:rank" = 1.0, "group_rewards:measure" = 0.0 }'
    run = run.replace('reward = "tiny_reward:score"', f'{rewards}\nreward_scope = "group"')
    (project / "run.toml").write_text(run)
    process = up(
        'buffer.stages=["reward"]',
        "environment.timeout_s=3000",
        "log.samples=16",
        "eval.every=2",
        "eval.prompts=heldout.jsonl",
        "eval.samples=8",
        f"eval.samples_per_prompt={GROUP}",
        flags=("--no-eval",),
    )
    summary = finish_though_a_scorer_is_killed(process, project / "begun")
    assert summary["ledger"]["trained"] == 64
    found = groups_in(process.run_dir)
    assert len(found) == 16
    for group in found.values():
        own = [parts["measure"] for _, parts in group]
        for reward, parts in group:
            expected = sum(other < parts["measure"] for other in own) / GROUP
            assert reward == parts["rank"] == pytest.approx(expected)
    assert any(reward for group in found.values() for reward, _ in group)
    assert [one["version"] for one in summary["evals"]] == [2, 4]
    for one in summary["evals"]:
        assert one["answered"] == one["samples"] == 8
        assert 0 <= one["accuracy"] < 0.5  # mean rank of a group of four is 3/8 at most


def finish_though_a_scorer_is_killed(process: UpProcess, begun: Path) -> dict[str, Any]:
    """The summary of a run that loses nothing though its scorer is killed once `begun` exists."""
    process.until(begun.exists, "a reward")
    kill(process, "scorer")
    summary = process.finish(seconds(200))
    assert process.popen.returncode == 0, process.lines
    assert summary["ledger"]["balance"] == 0
    assert "failed" not in summary["ledger"]["ended"]
    assert sum(summary["restarts"].values()) == 1, summary["restarts"]
    status = json.loads((process.run_dir / "buffer.json").read_text())
    assert status["counters"]["scoring_retries"]
    return summary


def groups_in(folder: Path) -> dict[str, list[tuple[float, dict[str, float]]]]:
    """Rewards and their parts of all samples that were trained on, by group."""
    found: dict[str, list[tuple[float, dict[str, float]]]] = {}
    for line in (folder / "samples.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["kind"] == "rollout":
            own = found.setdefault(row["group"], [])
            own.append((row["reward"], row["reward_parts"]))
    assert {len(own) for own in found.values()} == {GROUP}
    return found
