"""`umbra init`: writes a run file, a reward and prompts to begin with."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import tomli_w

from umbra.deploy.shown import shown_path
from umbra.proto.errors import EXIT_DONE, UsageError
from umbra.services.process.host import driver_version

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
learning_rate = {rate}
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

_CPU = {
    "groups": 8,
    "generator": "slots = 32                        # answers generated at once",
    "rate": "1e-5",
}
_GPU = {
    "groups": 32,
    "generator": "count = 1                         # each on a GPU; trainer.ranks train",
    "rate": "2e-6",
}


def run_file(*, gpu: bool, file: str, name: str, model: str, prompts: str, reward: str) -> str:
    """Return the text of the run file `file` for a machine with or without a GPU."""
    keys = {"name": name, "path": model, "prompts": prompts}
    lines = {key: tomli_w.dumps({key: value}).strip() for key, value in keys.items()}
    return _RUN.format(file=file, environment=REWARDS[reward], **lines, **(_GPU if gpu else _CPU))


RUN_FILE, REWARD_FILE, PROMPTS_FILE = "run.toml", "reward.py", "prompts.jsonl"


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), default=Path())
@click.option(
    "--model", default="", help="Its directory, or ORG/NAME on the hub.  [default: named later]"
)
@click.option("--prompts", help="A file or datasets:NAME:SPLIT.  [default: some sums]")
@click.option(
    "--reward", type=click.Choice(list(REWARDS)), default="function", show_default=True,
    help="What answers are worth.",
)  # fmt: skip
def command(folder: Path, model: str, prompts: str | None, reward: str) -> int:
    """Write run.toml, and what it needs, to FOLDER [default: this one]; overwrite nothing.

    Reward "function" writes reward.py, to be changed. Without --prompts some sums are written to
    prompts.jsonl. What the machine decides is chosen when the run starts, but for the numbers of
    answers and the learning rate: they are for a GPU if there is one here.
    """
    run = shlex.quote(shown_path((folder / RUN_FILE).absolute()))
    texts = {
        RUN_FILE: run_file(
            gpu=bool(driver_version()),
            file=run,
            name=re.sub(r"[^A-Za-z0-9_.-]+", "-", folder.absolute().name).strip("-.") or "run",
            model=model,
            prompts=prompts or PROMPTS_FILE,
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
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        with (folder / name).open("x", encoding="utf-8") as file:
            file.write(text)
        click.echo(f"wrote {shown_path((folder / name).absolute())}")
    steps = [] if model else [f"name a model: model.path in {run}"]
    click.echo("\n  ".join(["next:", *steps, f"umbra check {run}", f"umbra up {run}"]))
    return EXIT_DONE
