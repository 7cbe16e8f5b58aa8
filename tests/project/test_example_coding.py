"""The coding task of examples/coding: its tests, its sandbox, its data, and what it learns."""

import asyncio
import json
import os
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fakes.slowness import seconds

from umbra.services.environments.protocol import StepResult
from umbra.services.environments.sandbox import CommandOutcome, Sandbox

FOLDER = Path(__file__).parents[2] / "examples" / "coding"
CODING: dict[str, Any] = runpy.run_path(str(FOLDER / "coding.py"))
LOCAL: dict[str, Any] = runpy.run_path(str(FOLDER / "local_process.py"))


def local(**limits: Any) -> Sandbox:
    return LOCAL["LocalProcess"](**{"command_s": seconds(60.0), **limits})


def judged(body: str, said: str, sandbox: Sandbox | None = None) -> StepResult:
    """Return the environment's result for an answer to the function `body`."""
    world = CODING["Coding"](sandbox or local())
    row = CODING["row_of"](body)
    assert world.reset(row) == [{"role": "user", "content": row["prompt"]}]

    async def once() -> StepResult:
        found = await world.step(said)
        await world.close()
        return found

    return asyncio.run(once())


@pytest.mark.parametrize(
    ("said", "reward", "runs"),
    [
        ("def f(x):return max(2*x,9)", 1.0, 1.0),
        ("def f(x): return 9 if x < 5 else x + x", 1.0, 1.0),
        ("def f(x):return 9", 0.5, 1.0),
        ("def f(x):return 2*y", 0.0, 1.0),
        ("def f(x):return 2*(x", 0.0, 0.0),
        ("def f(x):exit(0)", 0.0, 1.0),
        ("", 0.0, 1.0),
    ],
)
def test_the_reward_is_the_share_of_tests_passed(said: str, reward: float, runs: float) -> None:
    found = judged("max(2*x,9)", said)
    assert found.done
    assert found.reward == reward
    assert found.reward_parts == {"runs": runs, "solved": float(reward == 1)}


class Listening:
    def __init__(self) -> None:
        self.given = ""
        self.closed = 0

    async def run(self, command: Sequence[str], stdin: str = "") -> CommandOutcome:
        self.given += " ".join([*command, stdin])
        return CommandOutcome(0, "")

    async def close(self) -> None:
        self.closed += 1


def test_the_sandbox_is_not_told_what_is_right() -> None:
    sandbox = Listening()
    assert judged("9*x*x+9", "def f(x):return x", sandbox).reward == 0
    assert "[1, 2, 3, 4, 5, 6, 7, 8]" in sandbox.given
    assert not [value for value in range(1, 9) if str(9 * value * value + 9) in sandbox.given]
    assert sandbox.closed == 1


def test_what_does_not_end_passes_no_test() -> None:
    asleep = judged("2*x+9", "import time\ntime.sleep(600)", local(command_s=0.3))
    assert (asleep.reward, asleep.reward_parts["runs"]) == (0, 0)


def test_a_process_with_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setattr(LOCAL["tempfile"], "tempdir", str(tmp_path))
    hungry = "try:\n    bytearray(512 << 20)\nexcept MemoryError:\n    print('none')"
    large = "open('large', 'wb').write(bytes(2 << 20)); open('large', 'ab').write(b'more')"

    async def use() -> list[CommandOutcome]:
        one, other = local(), local()
        outcomes = [
            await one.run(["sh", "-c", "env; echo it > here"]),
            await one.run(["cat", "here"]),
            await other.run(["cat", "here"]),
            await one.run(["python3", "-I", "-S", "-"], hungry),
            await one.run(["python3", "-I", "-S", "-"], large),
        ]
        assert len(os.listdir(tmp_path)) == 2
        for each in (one, other):
            await each.close()
            await each.close()
        return outcomes

    variables, kept, others, memory, files = asyncio.run(use())
    assert "PATH=" in variables.output and "secret" not in variables.output
    assert kept == CommandOutcome(0, "it\n")
    assert others.code == 1
    assert memory == CommandOutcome(0, "none\n")
    assert files.code != 0
    assert not list(tmp_path.iterdir())


def test_held_out_functions_are_nowhere_else_and_the_teacher_is_poor(tmp_path: Path) -> None:
    CODING["write"].__globals__["DEMOS"] = 400
    CODING["write"](tmp_path)
    files = {
        name: list(map(json.loads, (tmp_path / f"{name}.jsonl").read_text().splitlines()))
        for name in ("prompts", "heldout", "demos")
    }
    tests = {row["prompt"]: row["tests"] for row in [*files["prompts"], *files["heldout"]]}
    held = {row["prompt"] for row in files["heldout"]}
    told = [[message["content"] for message in demo["messages"]] for demo in files["demos"]]
    assert len(held) == len(files["heldout"]) > 100
    assert not held & {row["prompt"] for row in files["prompts"]}
    assert not held & {prompt for prompt, _ in told}
    right = 0
    for prompt, written in told:
        scope: dict[str, Any] = {}
        exec(written, scope)
        right += all(scope["f"](x) == value for x, value in tests[prompt])
    assert 0.2 < right / len(told) < 0.6


@pytest.mark.parametrize("agent", ["codex", "claude_code", "mini_swe_agent", "aider"])
def test_agents_of_the_command_line_are_judged_by_what_they_leave(
    agent: str, tmp_path: Path
) -> None:
    """With a program in the agent's place; tests/real has the agents themselves."""
    program, seen = tmp_path / "program", tmp_path / "seen"
    program.write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$@" > {seen}\ncat "$CODEX_HOME/config.toml" >> {seen}\n'
        "echo hello > made.txt\nexit 3\n"
    )
    program.chmod(0o700)
    play = runpy.run_path(str(FOLDER / "command_line_agents.py"))[agent]
    endpoint = {"base_url": "http://127.0.0.1:9/sessions/s/v1", "api_key": "none"}
    rows = [
        {"prompt": "Write hello.", "check": f"grep -qx {word} made.txt"} for word in ("hello", "hi")
    ]
    assert [play(row, endpoint, program=str(program)) for row in rows] == [1.0, 0.0]
    assert "Write hello." in seen.read_text().splitlines()
    assert (endpoint["base_url"] in seen.read_text()) == (agent == "codex")
