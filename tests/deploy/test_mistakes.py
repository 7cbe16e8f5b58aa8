"""Mistakes of a user, each answered by one sentence before anything begins.

`umbra up` in this process, so that libraries are loaded once: one mistake at least for each stage
of its checks. More of run files are in tests/config, of prompts in tests/prompts, of environments
in tests/environments; those that take a service or a signal in tests/integration/test_refusals.py.
"""

import os
import re
import signal
import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes.commands import SEARCH, UMBRA, Popen
from fakes.slowness import limit, until
from fakes.whole_runs import sets

from umbra import cli
from umbra.deploy.prepare.preflight import check_packages, check_room, load_given
from umbra.deploy.prepare.stage import find_rows
from umbra.deploy.run.command import check_extension
from umbra.deploy.run_folder import RunFolder
from umbra.proto.errors import UsageError
from umbra.services.config.loader import load_config, to_json
from umbra.services.generator.checks import check_chat
from umbra.services.process.fork_server import ForkServer

REWARDS = """
import os, time

def blocks(prompt, completion, row):
    time.sleep(3600)

def raises(prompt, completion, row):
    raise KeyError("gold")

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


FILES = {
    "user_rewards.py": REWARDS,
    "broken.py": "def score(:",
    "m.gguf": "GGUF",
    "long.jsonl": '{"prompt": "say something long", "word": "a"}\n',
    "longer.jsonl": f'{{"prompt": "{2000 * "a"}", "word": "a"}}\n',
    "array.jsonl": '[{"prompt": "a"}]',
    "words.jsonl": '{"prompt": "a", "answer": "x"}\n',
}


@pytest.fixture
def here(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (project / name).write_text(text)
    for folder, lost in (("no-tokenizer", "tokenizer"), ("no-config", "config.json")):
        (project / folder).mkdir()
        for file in (project / "model").resolve().iterdir():
            if not file.name.startswith(lost):
                (project / folder / file.name).symlink_to(file)
    monkeypatch.chdir(project)
    monkeypatch.setattr(ForkServer, "where_useful", lambda _environ: nullcontext())
    return project


def refused(capsys: pytest.CaptureFixture[str], told: str, *words: str) -> None:
    """Run `umbra`, which has to end with one sentence that matches `told`."""
    code = cli.main(words)
    captured = capsys.readouterr()
    assert code == 2, captured
    errors = [one for one in captured.err.splitlines() if one.startswith("umbra: error: ")]
    assert len(errors) == 1, captured  # libraries warn while they are imported
    assert re.search(told, errors[0]), errors


EXACT = "environment.kind=exact environment.reward="


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        # the run file, and what contradicts itself
        # what does not fit the model or this machine
        ('trainer.lora_rank=4 trainer.lora_targets=["nope"]', "no layer nope.*q_proj"),
        ("generator.engine_args.foo=1", "generator.engine_args is for vLLM"),
        ("generator.max_context=4096", "max_context = 4096.*1024 positions"),
        ("generator.max_context=8 data.prompts=long.jsonl", "leaves no room for an answer"),
        ("trainer.device=gpu", "trainer.device 'gpu': use cpu, cuda"),
        ("generator.device=cuda:99", "generator.device 'cuda:99': this machine has"),
        ("weight_hub.plane=cuda_ipc", "cannot be used"),
        ("environment.kind=user_rewards:Looks environment.reward=", "tokens, which leaves no"),
        # the model
        ("model.path=", "model.path"),
        ("model.path=no-config", "model.path.*config.json"),
        ("model.path=m.gguf", "is a GGUF file.*directory of the same model"),
        # the prompts
        ("data.prompts=array.jsonl", "line 1.*write one object per line"),
        (f"{EXACT}", 'needs "answer" in every row'),
        (
            f"{EXACT} data.prompts=words.jsonl eval.prompts=long.jsonl",
            'eval.prompts: .*needs "answer" in every row',
        ),
        ("eval.prompts=longer.jsonl", "the first of eval.prompts has.*generator.max_context"),
        # the reward and the environment
        ("environment.reward=user_rewards:block", "did you mean 'blocks'"),
        ("environment.reward=user_rewards:raises", "KeyError.*gold"),
        ("environment.reward=user_rewards:leaves", "exit code 7"),
        (
            "environment.reward=user_rewards:blocks environment.timeout_s=0.5",
            "took longer than environment.timeout_s = 0.5 s",
        ),
        ("environment.reward=broken:score", "importing it failed.*SyntaxError"),
        (
            "environment.kind=guess environment.reward= data.prompts=words.jsonl",
            "guess raised ValueError",
        ),
        # places
        ("run.dir=run.toml/runs", "run.toml is a file; name a folder"),
        ("run.broker=127.0.0.1:5555", "run.broker 127.0.0.1:5555: write it as tcp://host:port"),
        ("run.broker=ipc://buffer", "run.broker ipc://buffer: write it as tcp://host:port"),
        ("run.broker=tcp://127.0.0.1:99999", "99999: write it as tcp://host:port"),
        ("security.keys=nowhere", "nowhere.*umbra keys"),
    ],
)
def test_a_mistake_is_told_in_one_sentence(
    settings: str, told: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("up", "check"):
        refused(capsys, told, command, "run.toml", *sets(*settings.split()))
    assert not list((here / "runs").glob("*"))


def test_commands_that_have_nothing_to_work_on(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, told in (
        ("up model", "model is no run's folder"),
        (
            "up run.toml --set trainer.nodes=2 --set trainer.ranks=2",
            "`umbra up` runs everything on",
        ),
        ("report nope", "nope is no run"),
        ("export model --out=out", "model is no checkpoint.*checkpoint.every"),
        ("export model --out=run.toml", "run.toml exists and holds no model: name another folder"),
        ("sft model --data=long.jsonl --out=run.toml/x", "run.toml.*name another place"),
        ("sft model --data=long.jsonl --out=.", "--out . is the current directory or one above"),
        ("plan run.toml cluster.toml", r"\[run\], which is of run files: give the cluster file"),
    ):
        refused(capsys, told, *words.split())
    assert not list((here / "runs").glob("*"))


def test_packages_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting, told in (
        ("trainer.lora_rank=8", "trainer.lora_rank needs peft"),
        ("generator.engine=vllm", 'generator.engine = "vllm" needs vllm'),
        ("environment.kind=math", 'environment.kind = "math" needs math-verify'),
        ('metrics.also=["wandb"]', "metrics.also needs wandb"),
    ):
        config = load_config(overrides=[setting], environ={})
        monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
        with pytest.raises(UsageError, match=f"^{told}.*pip install 'umbra-rl"):
            check_packages(config)
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


def test_a_run_that_has_ended_needs_more_steps_a_store_and_a_checkpoint(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(here / "runs" / "run-1")
    (folder.checkpoints / "step-4").mkdir(parents=True)
    folder.summary.write_text('{"exit_code": 0}')
    for settings, asked, told in (
        ((), (), "--set run.steps=N"),
        ((), ("run.steps=4",), "reached its end, step 4: run.steps = 4 must be more"),
        (("buffer.store=memory",), ("run.steps=9",), r"left no store \(buffer.store\)"),
    ):
        folder.config.write_bytes(to_json(load_given(here / "run.toml", settings)[0]))
        refused(capsys, told, "up", str(folder.path), *sets(*asked))
    folder.config.write_bytes(to_json(load_given(here / "run.toml", ())[0]))
    longer = load_given(here / "run.toml", ("run.steps=8",))[0]
    assert check_extension(folder, longer) == "4 steps are done; trainer.schedule spans all 8"
    (folder.checkpoints / "step-4").rmdir()
    with pytest.raises(UsageError, match="left no checkpoint"):
        check_extension(folder, longer)


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


def test_a_disk_full_from_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(overrides=[f"run.dir={tmp_path / 'runs'}"], environ={})
    check_room(config)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=500_000))
    with pytest.raises(UsageError, match=r"run\.dir: .* free on the disk of .*: free some"):
        check_room(config)
