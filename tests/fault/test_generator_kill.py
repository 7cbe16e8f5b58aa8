"""A generator killed in the middle of its samples: the loss, and how the run goes on."""

import json
import string
from collections import defaultdict
from collections.abc import Sequence
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
        if getattr(self, "name", None) is not None:
            with open("said.jsonl", "a") as file:
                generator = int(os.environ["UMBRA_PARENT_PID"])
                file.write(json.dumps([generator, self.name, response]) + chr(10))
        if self.said == {TURNS}:
            return StepResult(reward=float(len(response)))
        return StepResult(done=False, messages=[{{"role": "user", "content": "go"}}])
"""


def said(project: Path) -> dict[int, dict[str, list[str]]]:
    """By generator (which started the workers) and sample: what the environment was told."""
    turns: defaultdict[int, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    path = project / "said.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    for line in lines:
        if not line.endswith("\n"):
            break  # it is being written
        pid, name, text = json.loads(line)
        turns[pid][name].append(text)
    return {pid: dict(samples) for pid, samples in turns.items()}


def same(first: Sequence[str], second: Sequence[str]) -> int:
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def spoken(turns: list[str]) -> str:
    """All that was said, a character a token; a stop token ends each turn."""
    return "".join(turn + "\0" for turn in turns)


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

    def generator() -> dict[str, list[str]]:
        """Return the messages to the only generator; the check of the environment says one turn."""
        return next((s for s in said(project).values() if max(map(len, s.values())) > 1), {})

    process.until(lambda: sum(len(t) >= TURNS // 2 for t in generator().values()) >= 5, "half way")
    process.kill("generator")
    before = generator()
    summary = process.finish()
    assert summary["restarts"] == {"generator-0": 1}
    assert "generator-0 ended (killed by SIGKILL): restart 1 in 0.5 s" in process.lines
    assert summary["steps"] == 2
    assert summary["ledger"]["trained"] == 2 * 8
    *_, after = said(project).values()
    under_way = {name: turns for name, turns in before.items() if len(turns) < TURNS}
    resumed = {name: same(turns, after[name]) for name, turns in under_way.items() if name in after}
    assert len(resumed) >= 4
    assert max(resumed.values()) >= TURNS // 4
    for name in resumed:
        told, again = spoken(before[name]), spoken(after[name])
        # In tokens, not turns: a turn that was saved half is resumed there.
        lost = told[same(told, again) :]
        assert len(lost) <= FLUSH_TOKENS, (name, told, again)
