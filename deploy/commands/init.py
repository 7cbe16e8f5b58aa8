"""`umbra init`: asks three questions and writes a run file that fits this machine."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import click
import tomli_w

from umbra.deploy.shown import shown_path
from umbra.proto.errors import EXIT_DONE, UsageError
from umbra.services.modeling.hub import is_hub_name
from umbra.services.process.files import explained
from umbra.services.prompts import DATASETS

REWARD = '''"""What an answer is worth. The trainer sees nothing else of your task."""

from typing import Any


def score(prompt: Any, completion: str, row: dict[str, Any]) -> float:
    """Return the reward of one completion: 1 if it ends with the row's answer, else 0.

    Args:
        prompt: the row's "prompt", as it stands in the file.
        completion: what the model answered; may be empty.
        row: the whole line of the prompts file.
    """
    return float(completion.strip().endswith(str(row["answer"])))
'''

PROMPTS = "".join(
    f'{{"prompt": "What is {a} plus {b}? End with the number.", "answer": "{a + b}"}}\n'
    for a in range(2, 10)
    for b in range(2, 10)
)

_RUN = """\
# A run of Umbra.
#
#   umbra check {file}   tries all of it, starts nothing
#   umbra up {file}      runs it; Ctrl-C stops it, `umbra up runs/ID` resumes it
#
# docs/config.md has every key; engine, devices, threads, lengths and memory that are left out are
# chosen for the machine. Paths are looked up beside this file, then from where you are.

[run]
{name}
steps = 200                       # optimizer steps

[model]
{path}  # a Hugging Face model directory, or ORG/NAME on the hub

[data]
{prompts}  # rows with "prompt"; other columns reach the reward

[environment]
{environment}

[buffer]
group_size = 8                    # answers per prompt, which are compared with each other
batch_groups = {groups}                 # prompts per optimizer step
run_ahead = 1                     # batches that generation may be ahead of training
max_staleness = 2                 # no trained token is older than this many steps

[generator]
{generator}

[trainer]
{trainer}
objective = "tis_opsm"            # docs/algorithms.md has the others
"""

_EXACT = 'kind = "exact"                    # reward 1 if the response is the row\'s "answer"'
_MATH = """\
kind = "math"                     # reward 1 if the last number or formula equals the row's "answer"
                                  # (pip install 'umbra-rl[tasks]')"""
_FUNCTION = """\
kind = "reward"
reward = "reward:score"           # def score(prompt, completion, row) in reward.py here"""
REWARDS = {"function": _FUNCTION, "exact": _EXACT, "math": _MATH}

_CPU = ("slots = 32                        # answers generated at once", "learning_rate = 1e-5")
_ONE_GPU = ("# shares the GPU with the trainer", "learning_rate = 2e-6")


def run_file(gpus: int, *, file: str, name: str, model: str, prompts: str, reward: str) -> str:
    """Return the text of the run file `file` for a machine with `gpus`; half of several train."""
    generator, trainer = _ONE_GPU if gpus else _CPU
    if gpus > 1:
        ranks = gpus // 2
        generator = f"count = {gpus - ranks}                         # each on a GPU of its own"
        trainer = f"ranks = {ranks}                         # GPUs that train\nlearning_rate = 1e-6"
    keys = {"name": name, "path": model, "prompts": prompts}
    lines = {key: tomli_w.dumps({key: value}).strip() for key, value in keys.items()}
    environment, groups = REWARDS[reward], 32 if gpus else 8
    parts = {"generator": generator, "trainer": trainer, "environment": environment}
    return _RUN.format(file=file, groups=groups, **parts, **lines)


RUN_FILE, REWARD_FILE, PROMPTS_FILE = "run.toml", "reward.py", "prompts.jsonl"
DEVICES = Path("/dev")


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), default=Path())
@click.option("--model", help="Its directory, or ORG/NAME on the hub.")
@click.option("--prompts", help="A file or datasets:NAME:SPLIT.")
@click.option("--reward", type=click.Choice(list(REWARDS)), help="What answers are worth.")
@click.option("--gpus", type=click.IntRange(0), help="That will run it.  [default: those here]")
def command(
    folder: Path, model: str | None, prompts: str | None, reward: str | None, gpus: int | None
) -> int:
    """Write run.toml, and what it needs, to FOLDER [default: this one]; overwrite nothing.

    Asks for what no flag gives; without a terminal the answers are those in brackets. Without
    prompts, some sums are written to prompts.jsonl; reward "function" writes reward.py, to be
    changed. Of several GPUs half train, the others generate.
    """
    model = _ask("model: its directory, or ORG/NAME on the hub", model, "model")
    prompts = _ask("prompts: a file, or nothing for an example", prompts, "")
    if prompts and not prompts.startswith(DATASETS) and not Path(prompts).is_file():
        raise UsageError(f"--prompts {prompts}: there is no such file")
    kinds = click.Choice(list(REWARDS))
    reward = _ask("reward: your own function, or the row's answer", reward, "function", kinds)
    local = sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in DEVICES.iterdir())
    run = shlex.quote(shown_path((folder / RUN_FILE).absolute()))
    texts = {
        RUN_FILE: run_file(
            local if gpus is None else gpus,
            file=run,
            name=re.sub(r"[^A-Za-z0-9_.-]+", "-", folder.absolute().name).strip("-.") or "run",
            model=_from(folder, model),
            prompts=_from(folder, prompts) or PROMPTS_FILE,
            reward=reward,
        )
    }
    if reward == "function":
        texts[REWARD_FILE] = REWARD
    if not prompts:
        texts[PROMPTS_FILE] = PROMPTS
    present = " and ".join(str(folder / name) for name in texts if (folder / name).exists())
    if present:
        raise UsageError(f"{present} would be overwritten: name another folder, or move it away")
    with explained(f"cannot write to {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            with (folder / name).open("x", encoding="utf-8") as file:
                file.write(text)
            click.echo(f"wrote {shown_path((folder / name).absolute())}")
    if not Path(model).is_dir() and not is_hub_name(model):
        click.echo(f"{model} is not there yet: hf download NAME --local-dir {model}")
    click.echo(f"next:\n  umbra check {run}\n  umbra up {run}")
    return EXIT_DONE


def _ask(
    question: str, answer: str | None, default: str, kind: click.Choice[str] | None = None
) -> str:
    if answer is not None:
        return answer
    if not sys.stdin.isatty():
        return default
    return str(click.prompt(question, default=default, show_default=bool(default), type=kind))


def _from(folder: Path, path: str) -> str:
    """Return `path` as it is found from the run file, also once both have moved if it lies here."""
    if not path or path.startswith(DATASETS) or not Path(path).exists() or folder == Path():
        return path
    absolute = Path(path).absolute()
    return os.path.relpath(path, folder) if absolute.is_relative_to(Path.cwd()) else str(absolute)
