"""Coding agents of the command line and libraries for agents, each as its index has it.

None of them is changed. The former are started as examples/coding/command_line_agents.py starts
them, the latter by a function as their pages show it.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from fakes.agents import AgentWorld
from fakes.library_worlds import LibraryPlay, call, library_python, npm_program
from fakes.trajectories import sample

EXAMPLE = Path(__file__).parents[2] / "examples" / "coding" / "command_line_agents.py"
TASK = {"prompt": "Write hello into made.txt.", "check": "grep -qx hello made.txt"}
MAKE = "echo hello > made.txt"
CONTEXT = 1 << 20  # a token a character, and they say much before they begin
START_S = 300.0  # on a quiet machine; some import a great deal

pytestmark = [pytest.mark.real, pytest.mark.timeout(1200)]


def tool(name: str, **arguments: str) -> str:
    return call(name, json.dumps(arguments))


def check_done(world: AgentWorld, branches: int = 0) -> None:
    """The task is done with one call, in one line of tokens and so many `branches`."""
    world.add(sample(TASK))
    trajectory = world.trajectory(START_S)
    assert (trajectory.reward, trajectory.turns, trajectory.finish_reason) == (1.0, 2, "stop")
    assert len(trajectory.branches) == branches


def check_program(
    library_play: LibraryPlay, agent: str, program: Path | str, *turns: str, **options: Any
) -> None:
    """An agent of the example does the task."""
    source, name = EXAMPLE.read_text(encoding="utf-8"), f"theirs:{agent}"
    own = {"agent": name, "options": {"program": str(program)}, "max_context": CONTEXT, **options}
    check_done(library_play("agent", source, *turns, **own))


@pytest.mark.parametrize(
    ("agent", "program", "name", "arguments"),
    [
        ("codex", "codex", "exec_command", {"cmd": MAKE}),
        ("claude_code", "claude", "Bash", {"command": MAKE, "description": "Write it"}),
    ],
)
def test_agents_for_node(
    library_play: LibraryPlay, agent: str, program: str, name: str, arguments: dict[str, str]
) -> None:
    turns = tool(name, **arguments), "It is done."
    check_program(library_play, agent, npm_program(program), *turns)


def test_mini_swe_agent(library_play: LibraryPlay) -> None:
    program = Path(library_python("mini-swe-agent")).with_name("mini")
    end = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    turns = "I write it. " + tool("bash", command=MAKE), tool("bash", command=end)
    check_program(library_play, "mini_swe_agent", program, *turns)


def test_aider(library_play: LibraryPlay) -> None:
    """Three turns of an assistant stand in its prompt, and one more when it shows a file."""
    program = Path(library_python("aider")).with_name("aider")
    turns = "```\nhello\n```", "made.txt\n```\nhello\n```\n"  # it asks for the file's name
    check_program(library_play, "aider", program, *turns, given=3, timeout_s=600.0)


COMMON = '''\
MADE = []


def write(text: str) -> str:
    """Write a text.

    Args:
        text: is written.
    """
    MADE.append(text)
    return "written"


def judge(said):
    return float(MADE == ["hello"] and said == "It is done.")


'''
OPENAI_AGENTS = """
from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)


async def solve(row, endpoint):
    model = OpenAIResponsesModel("policy", AsyncOpenAI(**endpoint))
    tools = [function_tool(write)]
    agent = Agent(name="writer", instructions="Be brief.", tools=tools, model=model)
    return judge((await Runner.run(agent, row["prompt"])).final_output)
"""
PYDANTIC_AI = """
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


async def solve(row, endpoint):
    model = OpenAIChatModel("policy", provider=OpenAIProvider(**endpoint))
    agent = Agent(model, instructions="Be brief.", tools=[write])
    return judge((await agent.run(row["prompt"])).output)
"""
LANGGRAPH = """
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


async def solve(row, endpoint):
    agent = create_react_agent(ChatOpenAI(model="policy", **endpoint), [write], prompt="Be brief.")
    state = await agent.ainvoke({"messages": [("user", row["prompt"])]})
    return judge(state["messages"][-1].content)
"""
SMOLAGENTS = """
from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool

AGENTS = {"tools": ToolCallingAgent, "code": CodeAgent}


def solve(row, endpoint, agent, roles=None):
    model = OpenAIModel("policy", api_base=endpoint["base_url"], api_key=endpoint["api_key"],
                        custom_role_conversions=roles)
    return judge(AGENTS[agent](tools=[tool(write)], model=model).run(row["prompt"]))
"""


@pytest.mark.parametrize(
    ("library", "source"),
    [("openai-agents", OPENAI_AGENTS), ("pydantic-ai", PYDANTIC_AI), ("langgraph", LANGGRAPH)],
)
@pytest.mark.parametrize("plain", [False, True], ids=["coroutine", "run_sync"])
def test_libraries_for_agents(
    library_play: LibraryPlay, library: str, source: str, plain: bool
) -> None:
    """As a coroutine, and as a plain function by the library's own way to run without one."""
    if plain:
        source = source.replace("async def solve", "def solve").replace(".run(", ".run_sync(")
        source = source.replace("await agent.ainvoke", "agent.invoke").replace("await ", "")
    python = library_python(library)
    turns = (tool("write", text="hello"), "It is done.")
    check_done(library_play("agent", COMMON + source, *turns, agent="theirs:solve", python=python))


BY_CALLS = (tool("write", text="hello"), tool("final_answer", answer="It is done."))
BY_CODE = (
    "I write it.\n<code>\nwrite('hello')\n</code>",
    "<code>\nfinal_answer('It is done.')\n</code>",
)
AS_USER = {"tool-call": "user", "tool-response": "user"}


@pytest.mark.parametrize(
    ("agent", "turns", "options"), [("tools", BY_CALLS, {}), ("code", BY_CODE, {"roles": AS_USER})]
)
def test_smolagents(
    library_play: LibraryPlay, agent: str, turns: tuple[str, ...], options: dict[str, object]
) -> None:
    """It writes what was called into the model's turns, so each is a branch, unless its option
    for roles keeps that apart.
    """
    world = library_play(
        "agent",
        COMMON + SMOLAGENTS,
        *turns,
        agent="theirs:solve",
        python=library_python("smolagents"),
        options={"agent": agent, **options},
        max_context=CONTEXT,
        branches="refuse" if options else "train",
    )
    check_done(world, branches=0 if options else 1)
