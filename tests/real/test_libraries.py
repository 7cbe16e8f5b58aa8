"""The packages that environments come from, each as the index has it, in an environment of its own.

None of them is changed; their environments are in `fakes.library_environments`. Each is
played beside the generator, and by a runner.
"""

import json
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.library_environments import OPENENV, VERIFIERS
from fakes.library_worlds import LibraryPlay, call, library_python
from fakes.trajectories import sample

from umbra.services.generator.tasks import write_task

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(1200),
    pytest.mark.parametrize("place", ["generator", "runner"]),
]


def written(tmp_path: Path) -> list[dict[str, object]]:
    (tmp_path / "theirs.py").write_text(VERIFIERS)
    python = library_python("verifiers")
    counts = write_task(
        "verifiers:theirs",
        tmp_path / "data",
        seed=0,
        prompts=100,
        heldout=1,
        demos=0,
        python=python,
        environment="mine",
    )
    assert counts == {"prompts.jsonl": 7, "heldout.jsonl": 1}
    lines = (tmp_path / "data" / "prompts.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert all(row["environment"] == "mine" for row in rows)
    return rows


def test_a_taskset_for_verifiers(tmp_path: Path, library_play: LibraryPlay) -> None:
    python = library_python("verifiers")
    rows = written(tmp_path)
    (row,) = [row for row in rows if row["prompt"] == "say 3"]
    world = library_play("verifiers", VERIFIERS, "3", id="theirs", python=python)
    world.add(sample(row))
    trajectory = world.trajectory()
    assert (trajectory.reward, trajectory.turns) == (1.0, 1)
    assert trajectory.reward_parts == {"right": 1.0, "length": 1.0}


@pytest.fixture
def game(tmp_path: Path) -> Iterator[str]:
    """The URL of a server of OpenEnv."""
    (tmp_path / "game.py").write_text(OPENENV)
    program = [library_python("openenv"), "-m", "uvicorn", "game:app"]
    with socket.create_server(("127.0.0.1", 0)) as bound:
        fd = bound.fileno()
        server = subprocess.Popen([*program, "--fd", f"{fd}"], cwd=tmp_path, pass_fds=[fd])
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        server.kill()
        server.wait()


def test_a_server_of_openenv(library_play: LibraryPlay, game: str) -> None:
    python = library_python("openenv")
    turns = [call("act", '{"number": 7}'), call("act", '{"word": 7}'), call("act", '{"number": 3}')]
    world = library_play("openenv", "", *turns, id=game, python=python)
    world.add(sample({"prompt": "guess", "reset": {"secret": 3}}))
    trajectory = world.trajectory()
    assert trajectory.reward == pytest.approx(0.9)
    assert (trajectory.turns, trajectory.finish_reason) == (3, "stop")


def test_words_as_actions_of_openenv(library_play: LibraryPlay, game: str) -> None:
    python = library_python("openenv")
    options = {"text": "number", "observation": "hint"}
    world = library_play("openenv", "", "7", "some", "3", id=game, python=python, options=options)
    world.add(*(sample({"prompt": "guess"}, sample_id=f"s{n}") for n in range(8)))
    trajectories = [world.trajectory() for _ in range(8)]
    assert [t.reward for t in trajectories] == pytest.approx([0.9] * 8)
    assert {t.turns for t in trajectories} == {3}
