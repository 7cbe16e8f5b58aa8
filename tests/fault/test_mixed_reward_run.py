"""A whole run with three environments, two of which reward groups, each by functions and in a
Python of its own; a scorer is killed while it computes a reward.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from fakes.whole_runs import Up

GROUP, STEPS = 4, 6
BATCH = 4 * GROUP
REWARDS = """
import pathlib, sys, time

def measure(prompt, completion, row):
    return 100 * len(set(completion)) + len(completion)

def ranked(prompts, completions, environment, log_metric, **columns):
    assert set(environment) == {"ranked"} and len(set(prompts)) == 1
    begun = pathlib.Path("begun")
    if any(completions) and not begun.exists():
        begun.touch()
        time.sleep(3600)  # until its scorer is killed
    log_metric("own_python", float(sys.flags.no_site))
    own = [measure("", text, {}) for text in completions]
    return [sum(other < one for other in own) / len(own) for one in own]

def alike(completions, environment, log_metric, **columns):
    assert set(environment) == {"alike"}
    log_metric("own_python", float(sys.flags.no_site))
    own = [measure("", text, {}) for text in completions]
    return [own.count(one) for one in own]

def alone(completions, environment, **columns):
    assert environment == ["alone"]
    return [measure("", completions[0], {}) / 100]
"""
ENVIRONMENT = """
[[environments]]
name = "{name}"
kind = "reward"
reward = {{ "mixed_rewards:{name}" = {weight}, "mixed_rewards:measure" = 0.0 }}
prompts = "prompts.jsonl"
workers = 1
timeout_s = 3000
{more}
"""
GROUPS = 'reward_scope = "group"'
WEIGHTS = {"ranked": 1.0, "alike": 2.0, "alone": 0.5}


@pytest.mark.timeout(300)
def test_each_group_is_rewarded_as_its_environment_says_though_a_scorer_is_killed(
    project: Path, bare_python: str, up: Up
) -> None:
    (project / "mixed_rewards.py").write_text(REWARDS)
    more = {"ranked": GROUPS, "alike": f'{GROUPS}\npython = "{bare_python}"', "alone": ""}
    run = (project / "run.toml").read_text()
    run = run.replace('[environment]\nkind = "reward"\nreward = "tiny_reward:score"\n', "")
    run = run.replace('[data]\nprompts = "prompts.jsonl"\n', "")
    for name, weight in WEIGHTS.items():
        run += ENVIRONMENT.format(name=name, weight=weight, more=more[name])
    (project / "run.toml").write_text(run)
    heldout = [{"prompt": "say a", "environment": name} for name in ("ranked", "alone")]
    (project / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in heldout))
    process = up(
        f"run.steps={STEPS}",
        'buffer.stages=["reward"]',
        f"log.samples={BATCH}",
        "eval.every=3",
        "eval.prompts=heldout.jsonl",
        f"eval.samples={2 * GROUP}",
        f"eval.samples_per_prompt={GROUP}",
        flags=("--no-eval",),
        quiet_s=200.0,
    )
    process.until((project / "begun").exists, "a reward")
    process.kill("scorer")
    summary = process.finish()
    assert "failed" not in summary["ledger"]["ended"]
    assert sum(summary["restarts"].values()) == 1, summary["restarts"]
    status = json.loads((process.run_dir / "buffer.json").read_text())
    assert status["counters"]["scoring_retries"]
    assert summary["ledger"]["trained"] == STEPS * BATCH
    assert [(one["answered"], one["samples"]) for one in summary["evals"]] == [(8, 8)] * 2

    lines = (process.run_dir / "samples.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    rollouts = [row for row in rows if row["kind"] == "rollout"]
    assert len(rollouts) == STEPS * BATCH
    groups: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rollouts:
        groups[row["group"]].append(row)
    assert {environment_of(row) for row in rollouts} == set(WEIGHTS)
    for group in groups.values():
        assert len(group) == GROUP
        rewards_are_right(group)
    for step in process.steps():
        own = [row for row in rollouts if row["step"] == step["step"]]
        for name in WEIGHTS:
            rewards = [row["reward"] for row in own if environment_of(row) == name]
            assert step[f"environment/{name}/samples"] == len(rewards)
            if rewards:
                mean = sum(rewards) / len(rewards)
                assert step[f"environment/{name}/reward"] == pytest.approx(mean, abs=1e-5)


def environment_of(rollout: dict[str, Any]) -> str:
    return rollout["prompt_id"].partition("/")[0]


def rewards_are_right(group: list[dict[str, Any]]) -> None:
    """Each sample has what the function of its environment says of these very samples."""
    (name,) = {environment_of(row) for row in group}
    own = [row["reward_parts"]["measure"] for row in group]
    for row, measure in zip(group, own, strict=True):
        expected = {
            "ranked": sum(other < measure for other in own) / len(own),
            "alike": own.count(measure),
            "alone": measure / 100,
        }[name]
        parts = {name: expected, "measure": measure}
        if name != "alone":
            parts["own_python"] = float(name == "alike")
        assert row["reward_parts"] == pytest.approx(parts)
        assert row["reward"] == pytest.approx(WEIGHTS[name] * expected)
