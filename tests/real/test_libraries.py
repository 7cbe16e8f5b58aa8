"""The packages that environments come from, each as the index has it, in an environment of its own.

None of them is changed; their environments are in `fakes.library_environments`, and runners in
those Python environments play them.
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

pytestmark = [pytest.mark.real, pytest.mark.timeout(1200)]


def written(tmp_path: Path) -> list[dict[str, object]]:
    (tmp_path / "theirs.py").write_text(VERIFIERS)
    task = [library_python("verifiers"), "-m", "umbra", "make-task", "verifiers:theirs"]
    words = ["--out", "data", "--prompts", "100", "--heldout", "1", "--environment", "mine"]
    said = subprocess.check_output([*task, *words], cwd=tmp_path, text=True)
    assert said == "data: 7 rows in prompts.jsonl, 1 rows in heldout.jsonl\n"
    lines = (tmp_path / "data" / "prompts.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert all(row["environment"] == "mine" for row in rows)
    return rows


def test_a_taskset_for_verifiers(tmp_path: Path, library_play: LibraryPlay) -> None:
    (row,) = [row for row in written(tmp_path) if row["prompt"] == "say 3"]
    python = library_python("verifiers")
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
    turns = [call("act", '{"number": 7}'), call("act", '{"word": 7}'), call("act", '{"number": 3}')]
    world = library_play("openenv", "", *turns, id=game, python=library_python("openenv"))
    world.add(sample({"prompt": "guess", "reset": {"secret": 3}}))
    trajectory = world.trajectory()
    assert trajectory.reward == pytest.approx(0.9)
    assert (trajectory.turns, trajectory.finish_reason) == (3, "stop")


def test_words_as_actions_of_openenv(library_play: LibraryPlay, game: str) -> None:
    options = {"text": "number", "observation": "hint"}
    where = {"id": game, "python": library_python("openenv")}
    world = library_play("openenv", "", "7", "some", "3", options=options, **where)
    world.add(*(sample({"prompt": "guess"}, sample_id=f"s{n}") for n in range(8)))
    trajectories = [world.trajectory() for _ in range(8)]
    assert [t.reward for t in trajectories] == pytest.approx([0.9] * 8)
    assert {t.turns for t in trajectories} == {3}
