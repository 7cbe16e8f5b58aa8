"""Python environments with other libraries in them, made once; and worlds that play theirs."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.agents import AgentWorld
from fakes.engine import ScriptedEngine
from fakes.rollouts import STOP, says, settings

from umbra.proto.records import Sampling
from umbra.services.modeling.chat import Chat
from umbra.services.modeling.models import load_tokenizer
from umbra.services.runtime.config import EnvironmentConfig

REQUIREMENTS = {
    "verifiers-v0": ("verifiers==0.3.1", "mcp<2"),
    "verifiers-v1": ("verifiers==0.4.0", "uv"),
    "openenv": ("openenv==0.10.0",),
}
_UNREACHABLE = ("(from versions: none)", "Connection", "Temporary failure in name resolution")
LibraryPlay = Callable[..., AgentWorld]


def library_python(name: str) -> str:
    """The Python with the library `name`; made when it is asked for first, and kept.

    It is in the folder that UMBRA_TEST_LIBRARIES names, else in the user's cache. The test is
    skipped if the index that pip asks can't be reached.
    """
    given = os.environ.get("UMBRA_TEST_LIBRARIES")
    folder = Path(given or Path.home() / ".cache" / "umbra-test-libraries") / name
    python, stamp = folder / "bin" / "python", folder / ".installed"
    wanted = "\n".join(REQUIREMENTS[name])
    if not stamp.exists() or stamp.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        options = shlex.split(os.environ.get("PIP_OPTIONS", ""))
        done = subprocess.run(
            [str(python), "-m", "pip", "install", "-qq", *options, *REQUIREMENTS[name]],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode and any(word in done.stderr for word in _UNREACHABLE):
            pytest.skip(f"the package index can't be reached: {done.stderr.strip()[-200:]}")
        assert done.returncode == 0, done.stderr
        stamp.write_text(wanted)
    return str(python)


@pytest.fixture
def library_play(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LibraryPlay]:
    """Worlds whose model says given turns, in a working directory with one module of the user's."""
    monkeypatch.chdir(tmp_path)
    tokenizer = load_tokenizer(tiny_model_dir)
    made: list[AgentWorld] = []

    def make(kind: str, source: str, *turns: str, **options: Any) -> AgentWorld:
        (tmp_path / "theirs.py").write_text(source)
        chosen = settings(
            Chat(tokenizer, {STOP}), sampling=Sampling(), max_context=4096, agents=True
        )
        values = {"workers": 1, "timeout_s": 120.0, "setup_s": 300.0, "memory_mb": 0, **options}
        environment = EnvironmentConfig(kind=kind, **values)
        engine = ScriptedEngine(says(tokenizer, *turns), max_context=4096)
        made.append(AgentWorld(engine, chosen, environment))
        return made[-1]

    yield make
    for each in made:
        each.close()


def call(name: str, arguments: str) -> str:
    """A tool call as the tiny model's environment reads it."""
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'
