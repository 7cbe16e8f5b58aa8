"""What cannot work is refused before anything starts, in one sentence that names the culprit."""

import json
import os
import socket
import subprocess
from pathlib import Path

import pytest
from fakes.commands import UMBRA, call

from umbra.deploy.files.run_folder import RunFolder
from umbra.deploy.prepare.load import load_run
from umbra.services.config.loader import to_json


def umbra(cwd: Path | None, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run an `umbra` command to its end."""
    return call([*UMBRA, *arguments], cwd=cwd)


def expect_usage_error(project: Path, *overrides: str, code: int = 2) -> str:
    """Run `umbra up` and return the one sentence with which it refuses."""
    settings = [part for override in overrides for part in ("--set", override)]
    done = umbra(project, "up", "run.toml", *settings)
    assert done.returncode == code, done
    (line,) = done.stderr.splitlines()
    assert line.startswith("umbra: error: ")
    return line.removeprefix("umbra: error: ")


@pytest.fixture
def bare_model(project: Path, tiny_model: Path) -> Path:
    """A model directory without a tokenizer."""
    (project / "bare").mkdir()
    for name in ("config.json", "model.safetensors"):
        (project / "bare" / name).symlink_to(tiny_model / name)
    return project / "bare"


@pytest.mark.parametrize(
    "arguments",
    [
        ("generator", "--broker", "tcp://127.0.0.1:9", "--set", "model.path=bare"),
        ("eval", "bare", "--task", "sort"),
    ],
)
def test_nor_does_any_other_command_take_it(
    project: Path, bare_model: Path, arguments: tuple[str, ...]
) -> None:
    done = umbra(project, *arguments)
    assert done.returncode == 2, done
    assert f"{bare_model.name} has no tokenizer (tokenizer.json or " in done.stderr
    assert "Traceback" not in done.stderr


def test_engine_arguments_are_flags_too(project: Path) -> None:
    broker = ("--broker", "tcp://127.0.0.1:9", "--set", "model.path=model")
    done = umbra(project, "generator", *broker, "--engine-arg", "block_size=32")
    assert done.returncode == 2, done
    assert "generator.engine_args is for vLLM: leave it out, or set " in done.stderr


def test_sampling_that_only_vllm_refuses(project: Path) -> None:
    sentence = expect_usage_error(project, "generator.engine=vllm", "sampling.temperature=0.001")
    assert sentence == (
        "sampling.temperature = 0.001 is out of range: vLLM, which would raise it, takes 0.01 or "
        "more"
    )


def test_an_occupied_port(project: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        sentence = expect_usage_error(project, f"run.broker=tcp://127.0.0.1:{port}", code=3)
    assert "in use" in sentence
    assert str(port) in sentence


def test_a_run_that_may_not_go_on_is_left_as_it_was(project: Path) -> None:
    """Its address is in use: refused at once, and every file is as it was."""
    folder = project / "runs" / "run-1"
    folder.mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        config = load_run(project / "run.toml", (f"run.broker={address}",))
        (folder / "config.json").write_bytes(to_json(config))
        before = {"ledger": {"issued": 8, "trained": 8, "ended": {}, "in_flight": {}}}
        (folder / "buffer.json").write_text(json.dumps({**before, "ending": "drained"}))
        (folder / "summary.json").write_text(json.dumps({**before, "exit_code": 143}))
        files = contents(folder)
        done = umbra(project, "up", str(folder), "--no-eval", "--json")
        bad = umbra(project, "up", str(folder), "--set", "environment.reward=tiny_reward:raises")
    assert done.returncode == 3, done
    assert f"{address} is in use by another process" in done.stderr
    assert bad.returncode in (2, 3), bad
    assert contents(folder) == files


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a run, but for its lock and its logs."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in found
        if path.name != "lock" and path.parent.name != "logs"
    }


def test_settings_with_which_a_run_cannot_go_on_are_not_kept(project: Path) -> None:
    folder = project / "runs" / "run-1"
    folder.mkdir(parents=True)
    config = load_run(project / "run.toml", ())
    (folder / "config.json").write_bytes(to_json(config))
    files = contents(folder)
    for setting, said in (
        ("environment.reward=tiny_reward:raises", "no such thing"),
        ("buffer.group_sze=3", "did you mean buffer.group_size"),
        ("model.path=nowhere", "nowhere"),
    ):
        done = umbra(project, "up", str(folder), "--set", setting)
        assert done.returncode == 2, done
        assert said in done.stderr
        assert contents(folder) == files


def test_a_second_up_on_a_folder_is_refused_and_told_who_has_it(project: Path) -> None:
    folder = project / "runs" / "run-1"
    folder.mkdir(parents=True)
    config = load_run(project / "run.toml", ())
    (folder / "config.json").write_bytes(to_json(config))
    with RunFolder.existing(folder).held():
        files = contents(folder)
        done = umbra(project, "up", str(folder), "--set", "model.path=nowhere")
    assert done.returncode == 2, done
    said = f"the run in {folder} is under way, started by process {os.getpid()}: watch it"
    assert said in done.stderr
    assert contents(folder) == files
    with RunFolder.existing(folder).held():
        pass  # whoever had it is gone


@pytest.mark.parametrize("command", [["status", "--ping"], ["status"], ["monitor"]])
def test_nobody_answers(command: list[str]) -> None:
    done = umbra(None, *command, "--broker", "tcp://127.0.0.1:9", "--timeout", "0.2")
    assert done.returncode == 5
    assert done.stderr.startswith(
        "umbra: error: no buffer answers at tcp://127.0.0.1:9 within 0.2 s"
    )
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("address", ["nowhere", "tcp://127.0.0.1", "http://127.0.0.1:1"])
def test_an_address_that_is_none(address: str) -> None:
    done = umbra(None, "status", "--ping", "--broker", address)
    assert done.returncode == 2
    assert "tcp://host:port" in done.stderr


def test_a_check_tells_the_worst_staleness(project: Path) -> None:
    done = umbra(project, "check", "run.toml", "--set", "buffer.max_staleness=4")
    assert done.returncode == 0, done
    assert "at most 4 versions, typically up to 1" in done.stdout


def test_what_is_shown_is_a_run_file(project: Path) -> None:
    first = umbra(
        project, "check", "run.toml", "--show", "--set", 'environment.options.text="a\\n\'é😀"'
    ).stdout
    (project / "shown.toml").write_text(first, encoding="utf-8")
    second = umbra(project, "check", "shown.toml", "--show").stdout
    assert second == first
    assert "😀" in first


def test_a_run_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "2+2=", "answer": "4"}\n', encoding="utf-8")
    given = ("--set", f"data.prompts={prompts}", "--insecure", "--run-dir", "file/run")
    done = umbra(tmp_path, "buffer", *given)
    assert done.returncode == 2, done
    assert done.stderr == (
        "umbra: error: --run-dir file/run cannot be made: Not a directory; name a folder that this "
        "user may write to\n"
    )
