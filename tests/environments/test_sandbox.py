"""Sandboxes, with a command in the place of docker; the real one is in tests/real."""

import asyncio
import importlib
import os
from pathlib import Path
from typing import Any

import pytest
from fakes.slowness import is_alive, limit, seconds, until
from msgspec.structs import replace

from umbra.proto.errors import UsageError
from umbra.services.config import EnvironmentConfig
from umbra.services.environments.loading import load_environment
from umbra.services.environments.protocol import Opening, ParsedTurn, StepResult
from umbra.services.environments.sandbox import (
    OUTPUT_BYTES,
    CommandOutcome,
    Container,
    ContainerLimits,
    run_process,
)
from umbra.services.environments.worker import EnvironmentHost

DOCKER = """#!/bin/sh
here=$(dirname "$0")
echo "$*" >> "$here/log"
case $1 in
    run) [ ! -e "$here/broken" ] || { echo "no such image"; exit 125; };;
    exec) shift 3; exec "$@";;
esac
"""


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a docker that runs commands right here, and writes down how it was called."""
    command = tmp_path / "docker"
    command.write_text(DOCKER)
    command.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def calls(docker: Path) -> list[list[str]]:
    return [line.split() for line in (docker / "log").read_text().splitlines()]


def tools(*names: str, **options: Any) -> EnvironmentConfig:
    told = {"tools": list(names)}
    return EnvironmentConfig(kind="tools", options=told, sandbox="docker", sandbox_options=options)


def called(name: str, **arguments: str) -> ParsedTurn:
    function = {"name": name, "arguments": arguments}
    return ParsedTurn(text="called", tool_calls=[{"type": "function", "function": function}])


async def converse(config: EnvironmentConfig, *responses: ParsedTurn | str) -> list[Any]:
    host = EnvironmentHost(load_environment(config), "tools")
    answers: list[Any] = [await host.play("s", {"prompt": "go", "answer": "3"}, [])]
    answers += [await host.play("s", {}, [response]) for response in responses]
    await host.forget("s")
    await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
    return answers


def test_code_runs_in_a_container_of_its_sample(docker: Path) -> None:
    opening, first, second, last = asyncio.run(
        converse(
            tools("python", "shell", "calculator", memory_mb=64, image="an-image"),
            called("python", code="print(1 + 1)"),
            called("shell", command="echo hello; exit 3"),
            "3",
        )
    )
    assert isinstance(opening, Opening)
    assert [tool["function"]["name"] for tool in opening.tools] == ["python", "shell", "calculator"]
    assert opening.tools[0]["function"]["parameters"]["required"] == ["code"]
    assert [m["content"] for m in first.messages] == ["2"]
    assert [m["content"] for m in second.messages] == ["hello\n(exit code 3)"]
    assert isinstance(last, StepResult) and last.reward == 1.0
    run, python, shell, rm = calls(docker)
    name = run[run.index("--name") + 1]
    assert python == ["exec", "--interactive", name, "python3", "-"]
    assert shell[:5] == ["exec", "--interactive", name, "sh", "-c"]
    assert rm == ["rm", "--force", "--volumes", name]
    given = " ".join(run)
    for part in (
        "--network none", "--memory 64m", "--memory-swap 64m", "--pids-limit 128", "--read-only",
        "--cap-drop ALL", "--security-opt no-new-privileges", "--user 65534:65534", "an-image",
    ):  # fmt: skip
        assert part in given, part
    assert not {"--volume", "-v", "--mount", "--privileged", "-e"} & set(run)


def test_commands_do_not_get_our_secrets(docker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setenv("UMBRA_AGENT_KEY", "secret")
    outcome = asyncio.run(Container(ContainerLimits()).run(["env"]))
    assert "PATH=" in outcome.output and "secret" not in outcome.output


def test_a_command_that_takes_too_long_costs_its_container(docker: Path) -> None:
    command_s = seconds(0.5)  # in which the command has to be begun
    slow = called("shell", command="sleep 600")
    (told,) = asyncio.run(converse(tools("shell", command_s=command_s), slow))[1:]
    late = f"error: shell: the command took longer than {command_s:g} s"
    assert late in told.messages[0]["content"]
    assert [call[0] for call in calls(docker)] == ["run", "exec", "rm"]
    leaves = run_process(
        ["sh", "-c", "sleep 600 >&- 2>&- & echo $!"], b"", 60.0, environ=os.environ
    )
    pid = int(asyncio.run(leaves).output)
    until(lambda: not is_alive(pid), "what a command leaves behind")


def test_what_is_printed_without_end_is_cut_off(docker: Path) -> None:
    container = Container(ContainerLimits(command_s=limit(60.0)))
    many = 4 * OUTPUT_BYTES
    outcome = asyncio.run(container.run(["head", "-c", str(many), "/dev/zero"]))
    assert outcome == CommandOutcome(0, "\0" * OUTPUT_BYTES + f"\n({3 * OUTPUT_BYTES} more bytes)")


def test_a_sandbox_that_does_not_start_is_told(docker: Path) -> None:
    (docker / "broken").touch()
    (told,) = asyncio.run(converse(tools("python"), called("python", code="1")))[1:]
    assert told.messages[0]["content"] == "error: python: no sandbox: docker: no such image"
    assert [call[0] for call in calls(docker)] == ["run", "rm"]


OWN = """
from umbra.services.environments.protocol import StepResult
from umbra.services.environments.sandbox import CommandOutcome

CLOSED = []

class Box:
    def __init__(self, colour="red"):
        self.colour = colour
    async def run(self, command, stdin=""):
        return CommandOutcome(0, f"{self.colour} {stdin}")
    async def close(self):
        CLOSED.append(self.colour)

class Coding:
    def __init__(self, sandbox):
        self.sandbox = sandbox
    def reset(self, row):
        return [{"role": "user", "content": "go"}]
    async def step(self, response):
        outcome = await self.sandbox.run(["python3", "-"], response)
        return StepResult(reward=float(len(outcome.output)))
    async def close(self):
        await self.sandbox.close()

class Theirs:
    def reset(self, **row):
        return None
    def get_reward(self):
        return 1.0

async def agent(row, endpoint, sandbox):
    return float(len((await sandbox.run(["x"])).output))
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_modules: None) -> Any:
    (tmp_path / "own_box.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return importlib.import_module("own_box")


@pytest.mark.parametrize(
    ("what", "said", "output"),
    [
        (
            {"kind": "tools", "options": {"tools": ["python"]}},
            called("python", code="1"),
            "blue 1",
        ),
        ({"kind": "own_box:Coding"}, "12345", "blue 12345"),
        (
            {"kind": "agent", "agent": "own_box:agent"},
            '{"base_url": "http://h", "api_key": "k"}',
            "blue ",
        ),
    ],
)
def test_tools_environments_and_agents_get_a_sandbox_of_the_users_own(
    own: Any, what: dict[str, Any], said: Any, output: str
) -> None:
    config = EnvironmentConfig(sandbox="own_box:Box", sandbox_options={"colour": "blue"}, **what)
    (answer,) = asyncio.run(converse(config, said))[1:]
    told = answer.messages[0]["content"] if answer.messages else answer.reward
    assert told == (output if answer.messages else len(output))
    assert own.CLOSED == ["blue"]


@pytest.mark.usefixtures("docker", "own")
def test_settings_that_cannot_be() -> None:
    for changes, says in (
        ({"sandbox": "dokcer"}, "use docker, or a class"),
        ({"sandbox": ""}, "'python' runs what a model writes: set environment.sandbox"),
        ({"sandbox_options": {"memory": 1}}, r"unknown field `memory`; they are image, memory_mb"),
        ({"sandbox": "pathlib:Path"}, "has no method run and no close"),
        ({"kind": "exact", "options": {}}, "environment.sandbox = docker has no effect"),
        ({"kind": "trl", "id": "own_box:Theirs", "options": {}}, "kind 'trl' runs no code"),
    ):
        with pytest.raises(UsageError, match=says):
            load_environment(replace(tools("python"), **changes))


def test_a_runtime_that_is_not_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        UsageError, match=r"environment\.sandbox = docker: there is no such command"
    ):
        load_environment(tools("python"))
