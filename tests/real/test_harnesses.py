"""Coding agents of the command line and a library for agents, each as its index has it.

None of them is changed. They are started as examples/coding/command_line_agents.py starts them.
"""

import json
from pathlib import Path

import pytest
from fakes.agents import AgentWorld
from fakes.library_worlds import LibraryPlay, call, library_python, npm_program
from fakes.trajectories import sample

EXAMPLE = Path(__file__).parents[2] / "examples" / "coding" / "command_line_agents.py"
TASK = {"prompt": "Write hello into made.txt.", "check": "grep -qx hello made.txt"}
MAKE = "echo hello > made.txt"
CONTEXT = 1 << 20  # a token a character, and they say much before they begin

pytestmark = [pytest.mark.real, pytest.mark.timeout(1200)]


def tool(name: str, **arguments: str) -> str:
    return call(name, json.dumps(arguments))


def check_done(world: AgentWorld) -> None:
    """The task is done with one call, in one line of tokens."""
    world.add(sample(TASK))
    trajectory = world.trajectory()
    assert (trajectory.reward, trajectory.turns, trajectory.finish_reason) == (1.0, 2, "stop")
    assert not trajectory.branches


@pytest.mark.parametrize(
    ("agent", "program", "turns"),
    [
        ("codex", "codex", (tool("exec_command", cmd=MAKE), "It is done.")),
        (
            "claude_code",
            "claude",
            (tool("Bash", command=MAKE, description="Write it"), "It is done."),
        ),
    ],
)
def test_agents_for_node(
    library_play: LibraryPlay, agent: str, program: str, turns: tuple[str, ...]
) -> None:
    options = {"program": npm_program(program)}
    source, name = EXAMPLE.read_text(encoding="utf-8"), f"theirs:{agent}"
    world = library_play("agent", source, *turns, agent=name, options=options, max_context=CONTEXT)
    check_done(world)


def test_mini_swe_agent(library_play: LibraryPlay) -> None:
    program = Path(library_python("mini-swe-agent")).with_name("mini")
    end = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    world = library_play(
        "agent",
        EXAMPLE.read_text(encoding="utf-8"),
        "I write it. " + tool("bash", command=MAKE),
        tool("bash", command=end),
        agent="theirs:mini_swe_agent",
        options={"program": str(program)},
        max_context=CONTEXT,
    )
    check_done(world)


OPENAI_AGENTS = '''\
from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)
MADE = []


@function_tool
def write(text: str) -> str:
    """Write a text."""
    MADE.append(text)
    return "written"


async def solve(row, endpoint):
    model = OpenAIResponsesModel("policy", AsyncOpenAI(**endpoint))
    agent = Agent(name="writer", instructions="Be brief.", tools=[write], model=model)
    said = (await Runner.run(agent, row["prompt"])).final_output
    return float(MADE == ["hello"] and said == "It is done.")
'''


def test_openais_library_for_agents(library_play: LibraryPlay) -> None:
    python = library_python("openai-agents")
    turns = (tool("write", text="hello"), "It is done.")
    check_done(library_play("agent", OPENAI_AGENTS, *turns, agent="theirs:solve", python=python))
