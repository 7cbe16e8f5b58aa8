"""A generator killed in the middle of its samples: the loss, and how the run goes on."""

import json
import os
import string
from pathlib import Path

from fakes.whole_runs import Up

FLUSH_TOKENS = 32
TURNS = 40
# A slow environment that writes down, per generator, what the model said to it.
TALK = f"""
import json, os, time

class Talk:
    def __init__(self):
        self.said = 0

    def reset(self, row):
        self.said, self.name = 0, row["prompt"]
        return [{{"role": "user", "content": row["prompt"]}}]

    def step(self, response):
        from umbra.services.environments.protocol import StepResult
        time.sleep(0.02)
        self.said += 1
        with open("said.jsonl", "a") as file:
            generator = os.environ["UMBRA_PARENT_PID"]
            file.write(json.dumps([generator, self.name, response]) + chr(10))
        if self.said == {TURNS}:
            return StepResult(reward=float(len(response)))
        return StepResult(done=False, messages=[{{"role": "user", "content": "go"}}])
"""


def said(project: Path) -> list[dict[str, str]]:
    """By generator (which started the workers) and sample: what the environment was told.

    A character is a token; a stop token ends each turn.
    """
    found: dict[str, dict[str, str]] = {}
    path = project / "said.jsonl"
    for line in path.read_text().splitlines(keepends=True) if path.exists() else []:
        if not line.endswith("\n"):
            break  # it is being written
        generator, name, text = json.loads(line)
        samples = found.setdefault(generator, {})
        samples[name] = samples.get(name, "") + text + "\0"
    return list(found.values())


def turns(told: str) -> int:
    return told.count("\0")


def test_little_is_lost_of_samples_under_way(project: Path, up: Up) -> None:
    """1. Long samples are half done. 2. Their generator is killed. 3. A new one goes on with them.

    Result: what the environment was told twice is no more than is flushed at once.
    """
    (project / "talk.py").write_text(TALK)
    rows = [{"prompt": f"sample {i}"} for i in range(200)]
    (project / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    process = up(
        "environment.kind=talk:Talk",
        "environment.reward=",
        "sampling.max_tokens=100",
        # A fifth of all tokens: turns of five tokens on average.
        f"sampling.stop_tokens={json.dumps(list(string.ascii_lowercase[:20]))}",
        "buffer.group_size=1",
        "buffer.batch_groups=8",
        "data.shuffle=false",
        "run.steps=2",
        "generator.max_context=1024",
        f"generator.partial_flush_tokens={FLUSH_TOKENS}",
    )
    process.broker()

    def generator() -> dict[str, str]:
        """Return the messages to the only generator; the check of the environment says one turn."""
        return next((s for s in said(project) if max(map(turns, s.values())) > 1), {})

    process.until(lambda: sum(turns(t) >= TURNS // 2 for t in generator().values()) >= 5, "half")
    process.kill("generator")
    before = generator()
    summary = process.finish()
    assert summary["restarts"] == {"generator-0": 1}
    assert "generator-0 ended (killed by SIGKILL): restart 1 in 0.5 s" in process.lines
    assert summary["steps"] == 2
    assert summary["ledger"]["trained"] == 2 * 8
    *_, after = said(project)
    resumed = {
        told: os.path.commonprefix([told, after[name]])  # noqa: RUF071
        for name, told in before.items()
        if turns(told) < TURNS and name in after
    }
    assert len(resumed) >= 4
    assert max(map(turns, resumed.values())) >= TURNS // 4
    for told, again in resumed.items():
        # In tokens, not turns: a turn that was saved half is resumed there.
        assert len(told) - len(again) <= FLUSH_TOKENS, (told, again)
