"""Mistakes of a user, each answered by one sentence before anything begins.

`umbra up` in this process, so that libraries are loaded once: one mistake at least for each stage
of its checks. More of run files are in tests/config, of prompts in tests/prompts, of environments
in tests/environments; those that take a service or a signal in tests/integration/test_refusals.py.
"""

import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes.commands import SEARCH, UMBRA, Popen
from fakes.slowness import limit, until

from umbra import cli
from umbra.deploy.prepare.preflight import check_packages, check_room, load_given
from umbra.deploy.prepare.stage import find_rows, try_aside
from umbra.deploy.run.command import check_extension
from umbra.deploy.run_folder import RunFolder
from umbra.proto.errors import UsageError
from umbra.services.config.loader import load_config, to_json
from umbra.services.config.rules import cautions
from umbra.services.generator.checks import check_chat
from umbra.services.process.fork_server import ForkServer

REWARDS = """
import os, time

def blocks(prompt, completion, row):
    time.sleep(3600)

def raises(prompt, completion, row):
    raise KeyError("gold")

def nothing(prompt, completion, row):
    pass

def two_arguments(prompt, completion):
    return 1.0

def leaves(prompt, completion, row):
    os._exit(7)

def look(place: str) -> str:
    # looks
    return place

class Looks:
    def reset(self, row):
        from umbra.services.environments.protocol import Opening
        return Opening([{"role": "user", "content": row["prompt"]}], [look])

    def step(self, turn):
        from umbra.services.environments.protocol import StepResult
        return StepResult()
"""


@dataclass(frozen=True)
class Mistake:
    """`make` does it in the project; `settings` are its --set; the sentence has all of `told`."""

    told: tuple[str, ...]
    settings: tuple[str, ...] = ()
    make: Callable[[Path], object] = lambda project: None
    words: tuple[str, ...] = ("up", "run.toml")  # `umbra check run.toml` says the same


def wrong(*settings: str, told: str | tuple[str, ...]) -> Mistake:
    return Mistake((told,) if isinstance(told, str) else told, settings)


def prompts(text: str, *told: str) -> Mistake:
    return Mistake(told, make=lambda project: (project / "prompts.jsonl").write_text(text))


def reward(name: str, *told: str, limit_s: float = 30.0) -> Mistake:
    settings = (f"environment.reward=user_rewards:{name}", f"environment.timeout_s={limit_s}")
    return Mistake(told, settings)


def _without(name: str) -> Callable[[Path], object]:
    def make(project: Path) -> None:
        model = (project / "model").resolve()
        (project / "partial").mkdir()
        for file in model.iterdir():
            if file.name not in name.split():
                (project / "partial" / file.name).symlink_to(file)

    return make


MISTAKES = {
    # the run file
    "no run file": Mistake(("nowhere.toml does not exist",), words=("up", "nowhere.toml")),
    "a folder that is no run": Mistake(("model is no run's folder",), words=("up", "model")),
    "a section misspelt": wrong("bufer.run_ahead=1", told="did you mean buffer"),
    "a key misspelt": wrong("run.step=3", told="did you mean run.steps"),
    "an objective misspelt": wrong("trainer.objective=grop", told="did you mean grpo?"),
    # what contradicts itself
    "more minibatches than samples": wrong(
        "trainer.minibatches=100", told=("trainer.minibatches = 100", "16 samples")
    ),
    # what does not fit the model or this machine
    "layers that the model lacks": wrong(
        "trainer.lora_rank=4", 'trainer.lora_targets=["nope"]', told=("no layer nope", "q_proj")
    ),
    "arguments of another engine": wrong(
        "generator.engine_args.foo=1", told="generator.engine_args is for vLLM"
    ),
    "a context beyond the model": wrong(
        "generator.max_context=4096", told=("max_context = 4096", "1024 positions")
    ),
    "a prompt without room": wrong(
        "generator.max_context=8", "data.prompts=long.jsonl", told="leaves no room for an answer"
    ),
    "a device misspelt": wrong("trainer.device=gpu", told="trainer.device 'gpu': use cpu, cuda"),
    "a GPU that is not here": wrong(
        "generator.device=cuda:99", told="generator.device 'cuda:99': this machine has"
    ),
    "a plane that is not here": wrong("weight_hub.plane=cuda_ipc", told="cannot be used"),
    "tools that leave no room": wrong(
        "environment.kind=user_rewards:Looks", "environment.reward=", told="tokens, which leaves no"
    ),
    # the model
    "no model": wrong("model.path=", told="model.path"),
    "a model that is not there": wrong("model.path=nowhere", told=("model.path", "nowhere")),
    "a model without tokenizer": Mistake(
        ("model.path", "has no tokenizer"),
        ("model.path=partial",),
        _without("tokenizer.json tokenizer_config.json"),
    ),
    "a model without config": Mistake(
        ("model.path", "config.json"), ("model.path=partial",), _without("config.json")
    ),
    "a GGUF file": Mistake(
        ("is a GGUF file", "directory of the same model"),
        ("model.path=m.gguf",),
        lambda project: (project / "m.gguf").write_text("GGUF"),
    ),
    "a name without its organisation": wrong(
        "model.path=Qwen3-0.6B", told="name one on the hub (ORG/NAME)"
    ),
    # the prompts
    "prompts that are not there": wrong("data.prompts=nowhere.jsonl", told="nowhere.jsonl"),
    "a line that is no JSON": prompts('{"prompt": "a"}\nb\n', "prompts.jsonl, line 2"),
    "an array of rows": prompts('[{"prompt": "a"}]', "line 1", "write one object per line"),
    "rows of an evaluation without an answer": Mistake(
        ("eval.prompts: ", 'needs "answer" in every row'),
        ("eval.prompts=long.jsonl", "environment.kind=exact", "environment.reward="),
        lambda project: (project / "prompts.jsonl").write_text('{"prompt": "a", "answer": "a"}\n'),
    ),
    "a prompt of an evaluation without room": Mistake(
        ("the first of eval.prompts has", "generator.max_context"),
        ("eval.prompts=heldout.jsonl",),
        lambda project: (project / "heldout.jsonl").write_text(
            f'{{"prompt": "{2000 * "a"}", "word": "a"}}\n'
        ),
    ),
    # the reward and the environment
    "a function misspelt": wrong(
        "environment.reward=user_rewards:block", told="did you mean 'blocks'?"
    ),
    "a reward that raises": reward("raises", "KeyError", "gold"),
    "a reward that returns nothing": reward("nothing", "None"),
    "a reward of other arguments": reward("two_arguments", "two_arguments", "row"),
    "a reward that ends its process": reward("leaves", "exit code 7"),
    "a reward that blocks": reward(
        "blocks", "took longer than environment.timeout_s = 0.5 s", limit_s=0.5
    ),
    "a module that cannot be imported": Mistake(
        ("importing it failed", "SyntaxError"),
        ("environment.reward=broken:score",),
        lambda project: (project / "broken.py").write_text("def score(:"),
    ),
    "rows without an answer": wrong(
        "environment.kind=exact", "environment.reward=", told='needs "answer" in every row'
    ),
    "a row that an environment cannot take": Mistake(
        ("guess raised ValueError",),
        ("environment.kind=guess", "environment.reward="),
        lambda project: (project / "prompts.jsonl").write_text('{"prompt": "a", "answer": "x"}\n'),
    ),
    "a function of other values": wrong(
        "environment.reward=math:sqrt", told="math:sqrt raised TypeError"
    ),
    # places and flags
    "a report of nothing": Mistake(("nope is no run",), words=("report", "nope")),
    "an export without checkpoint": Mistake(
        ("model is no checkpoint", "checkpoint.every"), words=("export", "model", "--out=out")
    ),
    "an export over other files": Mistake(
        ("--out prompts.jsonl exists and holds no model: name another folder",),
        words=("export", "model", "--out=prompts.jsonl"),
    ),
    "a warm start over the current directory": Mistake(
        ("--out . is the current directory or one above: name another folder",),
        words=("sft", "model", "--data=prompts.jsonl", "--out=."),
    ),
    "files of a plan the wrong way round": Mistake(
        ("[run], which is of run files: give the cluster file first",),
        words=("plan", "run.toml", "cluster.toml"),
    ),
    "a file for a folder": wrong("run.dir=run.toml", told="run.toml is a file; name a folder"),
    "an address without protocol": wrong(
        "run.broker=127.0.0.1:5555", told="run.broker 127.0.0.1:5555: write it as tcp://host:port"
    ),
    "several hosts": wrong(
        "trainer.nodes=2", "trainer.ranks=2", told="`umbra up` runs everything on this machine"
    ),
    "keys that are not there": wrong("security.keys=nowhere", told=("nowhere", "umbra keys")),
}


@pytest.fixture
def here(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (project / "user_rewards.py").write_text(REWARDS)
    (project / "long.jsonl").write_text('{"prompt": "say something long", "word": "a"}\n')
    monkeypatch.chdir(project)
    monkeypatch.setattr(ForkServer, "where_useful", lambda _environ: nullcontext())
    return project


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_in_one_sentence(
    name: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mistake = MISTAKES[name]
    mistake.make(here)
    settings = [word for setting in mistake.settings for word in ("--set", setting)]
    same = mistake.words == Mistake.words and name != "several hosts"  # which a plan is for
    for words in (mistake.words, *([("check", "run.toml")] if same else [])):
        code = cli.main([*words, *settings])
        captured = capsys.readouterr()
        assert code == 2, captured
        errors = [one for one in captured.err.splitlines() if one.startswith("umbra: error: ")]
        assert len(errors) == 1, captured  # libraries warn while they are imported
        for part in mistake.told:
            assert part in errors[0]
    assert not list((here / "runs").glob("*"))


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("trainer.lora_rank=8", "trainer.lora_rank needs peft"),
        ("generator.engine=vllm", 'generator.engine = "vllm" needs vllm'),
        ("environment.kind=math", 'environment.kind = "math" needs math-verify'),
        ('metrics.also=["tensorboard"]', "metrics.also needs tensorboard"),
        ('metrics.also=["wandb"]', "metrics.also needs wandb"),
    ],
)  # fmt: skip
def test_a_package_that_is_not_installed(
    setting: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(overrides=[setting], environ={})
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    with pytest.raises(UsageError, match="pip install 'umbra-rl") as caught:
        check_packages(config)
    assert str(caught.value).startswith(told)
    monkeypatch.setattr("importlib.util.find_spec", lambda package: package)
    check_packages(config)


def test_ctrl_c_before_anything_has_begun(here: Path) -> None:
    """1. The reward blocks. 2. Ctrl-C. Result: a sentence, exit code 130, no folder."""
    words = ["up", "run.toml", "--set", "environment.reward=user_rewards:blocks"]
    process = Popen(
        [*UMBRA, *words],
        env={**os.environ, "PYTHONPATH": SEARCH},
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        until(lambda: list(here.glob("runs/*/logs/environment-check.log")), "the check")
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=limit(50))
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert said == "umbra: error: interrupted before anything was started\n"
    assert not list((here / "runs").iterdir())


def ended(here: Path, *settings: str) -> RunFolder:
    folder = RunFolder(here / "runs" / "run-1")
    (folder.checkpoints / "step-4").mkdir(parents=True)
    folder.config.write_bytes(to_json(load_given(here / "run.toml", settings)[0]))
    folder.summary.write_text('{"exit_code": 0}')
    return folder


@pytest.mark.parametrize(
    ("settings", "asked", "told"),
    [
        ((), (), "--set run.steps=N"),
        ((), ("run.steps=4",), "reached its end, step 4: run.steps = 4 must be more"),
        (("buffer.store=memory",), ("run.steps=9",), "left no store (buffer.store)"),
    ],
)
def test_a_run_that_cannot_be_trained_on(
    settings: tuple[str, ...],
    asked: tuple[str, ...],
    told: str,
    here: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = ended(here, *settings)
    sets = [word for setting in asked for word in ("--set", setting)]
    assert cli.main(["up", str(folder.path), *sets]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


def test_a_longer_run_needs_a_checkpoint(here: Path) -> None:
    folder, longer = ended(here), load_given(here / "run.toml", ("run.steps=8",))[0]
    assert check_extension(folder, longer) == "4 steps are done; trainer.schedule spans all 8"
    (folder.checkpoints / "step-4").rmdir()
    with pytest.raises(UsageError, match="left no checkpoint"):
        check_extension(folder, longer)


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ("buffer.group_size=1", "lone_groups"),
        ("sampling.max_tokens=1024", "max_tokens"),
    ],
)
def test_what_is_seldom_meant_is_a_warning(setting: str, name: str) -> None:
    assert list(cautions(load_config(environ={}))) == []
    config = load_config(overrides=[setting, "trainer.objective=ppo"], environ={})
    assert [found for found, _ in cautions(config)] == [name]


def test_prompts_that_leave_little_room_or_none(here: Path) -> None:
    rows = [f'{{"prompt": "say {word}", "word": "a"}}\n' for word in ("a", 20 * "b", "c", 30 * "d")]
    (here / "prompts.jsonl").write_text("".join(rows))

    def warnings(*settings: str) -> list[str]:
        config = load_given(here / "run.toml", settings)[0]
        return check_chat(config, find_rows(config))

    assert warnings() == []
    cut, long = warnings("generator.max_context=16")
    assert "less than sampling.max_tokens = 12: longer answers are cut off" in cut
    assert "prompts.jsonl, row 2 has 26 tokens" in long and "as in 1 more" in long


def test_rows_of_a_parquet_file(here: Path) -> None:
    """The environment is tried on a row of whatever the prompts are in."""
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").Table.from_pylist([{"prompt": "say b", "word": "b"}])
    parquet.write_table(table, here / "prompts.parquet")
    setting = "data.prompts=prompts.parquet"
    try_aside(load_given(here / "run.toml", (setting,))[0], [here])
    with pytest.raises(UsageError, match="no such thing"):
        bad = (setting, "environment.reward=tiny_reward:raises")
        try_aside(load_given(here / "run.toml", bad)[0], [here])


def test_a_disk_full_from_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(overrides=[f"run.dir={tmp_path / 'runs'}"], environ={})
    check_room(config)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=500_000))
    with pytest.raises(UsageError, match=r"run\.dir: .* free on the disk of .*: free some"):
        check_room(config)
