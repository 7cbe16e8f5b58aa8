"""`umbra init`: asks four questions and writes a run file that fits this machine."""

from __future__ import annotations

import re
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from umbra.deploy.commands.init_files import MACHINES, PROMPTS, REWARD, REWARDS, Machine, run_file
from umbra.deploy.files.shown import shown_command, shown_path
from umbra.proto.errors import EXIT_DONE, UsageError
from umbra.services.modeling.hub import is_hub_name
from umbra.services.prompts.readers import DATASETS, is_elsewhere

RUN_FILE, REWARD_FILE, PROMPTS_FILE = "run.toml", "reward.py", "prompts.jsonl"
DEVICES = Path("/dev")
SEVERAL = 8  # GPUs, from which on trainer and generator have their own


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), default=Path())
@click.option("--model", help="Its directory, or ORG/NAME on the hub.")
@click.option("--prompts", help="A file, URL or datasets:NAME:SPLIT.")
@click.option("--reward", type=click.Choice(list(REWARDS)), help="What answers are worth.")
@click.option("--machine", type=click.Choice(list(MACHINES)), help="What the run file is for.")
def command(
    folder: Path,
    model: str | None,
    prompts: str | None,
    reward: str | None,
    machine: Machine | None,
) -> int:
    """Write run.toml, and what it needs, to FOLDER [default: this one]; overwrite nothing.

    Asks for what no flag gives; without a terminal the answers are those in brackets. Without
    prompts, some sums are written to prompts.jsonl; reward "function" writes reward.py, to be
    changed. machine is cpu, gpu (one) or 8gpu; found out by default.
    """
    model = _ask("model: its directory, or ORG/NAME on the hub", model, "model")
    prompts = _ask("prompts: a file, or nothing for an example", prompts, "")
    if prompts and not _is_source(prompts) and not Path(prompts).is_file():
        raise UsageError(f"--prompts {prompts}: there is no such file")
    reward = _choose("reward: your own function, or the row's answer", reward, REWARDS, "function")
    found = _this_machine()
    machine = _choose("machine", machine, MACHINES, found)  # pyright: ignore[reportAssignmentType]
    assert machine is not None
    texts = {
        RUN_FILE: run_file(
            machine,
            file=shlex.quote(shown_path((folder / RUN_FILE).absolute())),
            name=_name(folder),
            model=_from(folder, model),
            prompts=_from(folder, prompts) or PROMPTS_FILE,
            reward=reward,
            vllm=find_spec("vllm") is not None,
        )
    }
    if reward == "function":
        texts[REWARD_FILE] = REWARD
    if not prompts:
        texts[PROMPTS_FILE] = PROMPTS
    _write(folder, texts)
    run = shlex.quote(shown_path((folder / RUN_FILE).absolute()))
    if not Path(model).is_dir() and not is_hub_name(model):
        click.echo(f"{model} is not there yet: hf download NAME --local-dir {model}")
    click.echo(f"next:\n  {shown_command()} check {run}\n  {shown_command()} up {run}")
    return EXIT_DONE


def _write(folder: Path, texts: dict[str, str]) -> None:
    """Write `texts` to files of `folder`; all, or none if one is there.

    Raises:
        UsageError: one is there, or the folder cannot be written to.
    """
    there = [name for name in texts if (folder / name).exists()]
    if there:
        raise UsageError(
            f"{' and '.join(str(folder / name) for name in there)} would be overwritten: name "
            "another folder, or move it away"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            with (folder / name).open("x", encoding="utf-8") as file:
                file.write(text)
            click.echo(f"wrote {shown_path((folder / name).absolute())}")
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror}") from error


def _ask(question: str, given: str | None, default: str) -> str:
    if given is not None:
        return given
    if not sys.stdin.isatty():
        return default
    return str(click.prompt(question, default=default, show_default=bool(default)))


def _choose(question: str, given: str | None, among: Any, default: str) -> str:
    if given is not None:
        return given
    if not sys.stdin.isatty():
        return default
    return str(click.prompt(question, default=default, type=click.Choice(list(among))))


def _this_machine() -> Machine:
    """By the GPUs whose device files are here."""
    gpus = sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in DEVICES.iterdir())
    return "8gpu" if gpus >= SEVERAL else "gpu" if gpus else "cpu"


def _is_source(prompts: str) -> bool:
    """Whether it is no path."""
    return prompts.startswith(DATASETS) or is_elsewhere(prompts)


def _from(folder: Path, path: str) -> str:
    """`path` as it is found from any folder: as it is for a run file that lies here."""
    if not path or _is_source(path) or not Path(path).exists() or folder == Path():
        return path
    return str(Path(path).absolute())


def _name(folder: Path) -> str:
    """A run's name: that of the folder, as far as an id can be made of it."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", folder.absolute().name).strip("-.") or "run"
