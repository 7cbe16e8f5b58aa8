"""Python environments with other libraries in them, made once; and worlds that play theirs."""

import asyncio
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomli_w
from fakes.agents import KEY, AgentWorld
from fakes.engine import ScriptedEngine
from fakes.fixtures import Closes
from fakes.rollouts import STOP, says, settings
from fakes.slowness import limit

from umbra.proto.records import Sampling
from umbra.services.config import EnvironmentConfig
from umbra.services.environments.runner import Generators, run_agents
from umbra.services.http import KEY_VARIABLE
from umbra.services.modeling.chat import Chat
from umbra.services.modeling.pretrained import load_tokenizer
from umbra.services.process.loop_thread import LoopThread

REQUIREMENTS = {
    "verifiers": ("verifiers==0.4.0", "uv"),
    "openenv": ("openenv==0.10.0",),
    # Later versions of litellm import a package for tools that they don't ask for.
    "mini-swe-agent": ("mini-swe-agent==2.4.6", "litellm==1.81.10"),
    "aider": ("aider-chat==0.86.2",),
    "openai-agents": ("openai-agents==0.24.0",),
    "smolagents": ("smolagents[openai]==1.26.0",),
    "pydantic-ai": ("pydantic-ai-slim[openai]==2.68.0",),
    "langgraph": ("langgraph==1.2.22", "langchain-openai==1.7.3"),
}
NPM_PACKAGES = {
    "codex": "@openai/codex@0.169.0",
    "claude": "@anthropic-ai/claude-code@2.1.197",
}
_UNREACHABLE = (
    "(from versions: none)",
    "Connection",
    "Temporary failure in name resolution",
    "ENOTFOUND",
    "ECONNREFUSED",
    "EAI_AGAIN",
    "ETIMEDOUT",
)
ROOT = Path(__file__).parents[2]
LibraryPlay = Callable[..., AgentWorld]


def library_python(name: str) -> str:
    """The Python with the library `name` and Umbra; made when it is asked for first, and kept.

    It is in the folder that UMBRA_TEST_LIBRARIES names, else in the user's cache. The test is
    skipped if the index that pip asks can't be reached.
    """
    folder = _folder(name)
    python = folder / "bin" / "python"
    wanted = ("--editable", str(ROOT), *REQUIREMENTS[name])
    if not _there(folder, wanted):
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        options = shlex.split(os.environ.get("PIP_OPTIONS", ""))
        _install([str(python), "-m", "pip", "install", "-qq", *options, *wanted], folder, wanted)
    return str(python)


def npm_program(name: str) -> str:
    """The program `name` of a package for Node; as of `library_python`."""
    if shutil.which("npm") is None:
        pytest.skip("there is no npm on this machine")
    folder, wanted = _folder(name), (NPM_PACKAGES[name],)
    if not _there(folder, wanted):
        folder.mkdir(parents=True, exist_ok=True)
        _install(["npm", "install", "--prefix", str(folder), *wanted], folder, wanted)
    return str(folder / "node_modules" / ".bin" / name)


def _folder(name: str) -> Path:
    given = os.environ.get("UMBRA_TEST_LIBRARIES")
    return Path(given or Path.home() / ".cache" / "umbra-test-libraries") / name


def _there(folder: Path, wanted: Sequence[str]) -> bool:
    stamp = folder / ".installed"
    return stamp.exists() and stamp.read_text() == "\n".join(wanted)


def _install(command: list[str], folder: Path, wanted: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and any(word in done.stderr for word in _UNREACHABLE):
        pytest.skip(f"the package index can't be reached: {done.stderr.strip()[-200:]}")
    assert done.returncode == 0, done.stderr
    (folder / ".installed").write_text("\n".join(wanted))


class BackgroundRunner:
    """`umbra run-agents` with one process, in an event loop of its own thread."""

    def __init__(self, environments: EnvironmentConfig | list[EnvironmentConfig], url: str) -> None:
        given = environments if isinstance(environments, list) else [environments]
        one_each = [msgspec.structs.replace(one, workers=1) for one in given]
        self.ended = False
        self._stop = asyncio.Event()
        self._generators = Generators([url], KEY)
        self._thread = LoopThread("runner")
        self._ran = asyncio.run_coroutine_threadsafe(self._run(one_each), self._thread._loop)

    def close(self) -> None:
        if not self._thread.closed:
            self._thread.call(self._stop.set)
            self._ran.result(limit(60.0))
            self._thread.close()

    async def _run(self, environments: list[EnvironmentConfig]) -> None:
        await run_agents(environments, self._generators, self._stop)
        self.ended = True


class RunnerElsewhere:
    """`umbra run-agents` of another Python, in the working directory."""

    def __init__(self, python: str, environment: EnvironmentConfig, url: str) -> None:
        values = msgspec.to_builtins(environment)
        given = {key: value for key, value in values.items() if value not in ("", {})}
        run = {"model": {"path": "model"}, "generator": {"serve": "127.0.0.1:0"}}
        Path("run.toml").write_text(tomli_w.dumps({**run, "environment": given}))
        self._process = subprocess.Popen(
            [python, "-m", "umbra", "run-agents", "--config", "run.toml", "--generator", url],
            env={**os.environ, KEY_VARIABLE: KEY},
        )

    def close(self) -> None:
        self._process.terminate()
        assert self._process.wait(limit(60.0)) == 0


@pytest.fixture
def place() -> str:
    """Where `library_play` has its agents: "generator", "runner", or "nowhere" yet."""
    return "generator"


@pytest.fixture
def library_play(
    tmp_path: Path,
    tiny_model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    closes: Closes,
    own_modules: None,
) -> LibraryPlay:
    """Worlds whose model says given turns, in a working directory with one module of the user's."""
    monkeypatch.chdir(tmp_path)
    tokenizer = load_tokenizer(tiny_model_dir)

    def make(
        kind: str,
        source: str,
        *turns: str,
        max_context: int = 4096,
        given: int = 0,
        python: str = "",
        **options: Any,
    ) -> AgentWorld:
        (tmp_path / "theirs.py").write_text(source)
        beside = place == "generator" and not python
        limits = {"workers": int(beside), "timeout_s": 120.0, "setup_s": 300.0}
        values: dict[str, Any] = {**limits, "memory_mb": 0, **options}
        environment = EnvironmentConfig(kind=kind, **values)
        branches = environment.max_branches if environment.branches == "train" else 1
        how = {"sampling": Sampling(), "max_context": max_context, "branches": branches}
        chosen = settings(Chat(tokenizer, {STOP}), **how)
        engine = ScriptedEngine(says(tokenizer, *turns, given=given), max_context=max_context)
        key = "" if beside else KEY
        world = closes(AgentWorld(engine, chosen, environment, key=key))
        if python:
            closes(RunnerElsewhere(python, environment, world.url))
        elif place == "runner":
            closes(BackgroundRunner(environment, world.url))
        return world

    return make


def call(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'
