"""Runs from Python: a script of a few lines, a run that is watched and operated, mistakes."""

import json
import linecache
import runpy
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fakes.commands import fork_server
from fakes.slowness import limit, until

import umbra
from umbra import cli
from umbra.deploy.python import run as run_module
from umbra.deploy.run_folder import RunFolder
from umbra.services.monitor.run_address import find_address

ROOT = Path(__file__).parents[2]
DEADLINE_S = limit(60.0)
SMALL: dict[str, Any] = {
    "sampling": {"max_tokens": 12},
    "buffer": {"group_size": 4, "batch_groups": 4},
    "generator": {"device": "cpu", "threads": 1, "slots": 16, "max_context": 64},
    "trainer": {"device": "cpu", "threads": 1, "learning_rate": 1e-3},
}


@pytest.fixture(autouse=True)
def forked(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    for name in ("ChildProcess", "Stages"):
        start = getattr(run_module, name)
        monkeypatch.setattr(run_module, name, partial(start, server=fork_server()))


@pytest.mark.timeout(4 * DEADLINE_S)
def test_the_notebook_of_the_first_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Its cells in order, of which Python knows the source as in a kernel; with fewer steps."""
    notebook = json.loads((ROOT / "examples" / "start.ipynb").read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            source = "".join(cell["source"]).replace("STEPS = 40", "STEPS = 3")
            name = f"<cell {number}>"
            linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
            exec(compile(source, name, "exec"), names)
    assert len(names["rewards"]) == names["summary"]["steps"] == 3
    assert names["run"].model.is_dir() and (names["run"].path / "report.html").is_file()
    assert "step   3  reward" in capsys.readouterr().out


@pytest.mark.timeout(4 * DEADLINE_S)
def test_a_run_is_watched_operated_stopped_and_goes_on(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    worth = {"a": 1.0}

    class Vowels:
        def reset(self, row: dict[str, Any]) -> list[dict[str, Any]]:
            return [{"role": "user", "content": row["prompt"]}]

        def step(self, response: str) -> umbra.StepResult:
            return umbra.StepResult(reward=sum(worth.get(letter, 0.1) for letter in response))

    with umbra.train(
        "model", "prompts.jsonl", environment=Vowels, steps=100_000, wait=False, show=False, **SMALL
    ) as run:
        steps = iter(run)
        assert [next(steps).number for _ in range(3)] == [1, 2, 3]
        again = umbra.attach(run.id)
        assert again.under_way
        until(lambda: len(again.metrics) >= 3, "the third step", quiet_s=30.0)
        with pytest.raises(umbra.UsageError, match="has no trained model yet"):
            run.evaluate()
        again.stop(DEADLINE_S)  # as its program would do it by run.stop()
    assert not capfd.readouterr().out
    summary = run.summary
    assert summary is not None and summary["ledger"]["balance"] == 0
    assert summary["exit_code"] == 143
    with pytest.raises(umbra.UmbraError) as caught:
        run.wait()
    assert caught.value.exit_code == 143
    assert len(run.metrics) == summary["steps"]
    with pytest.raises(umbra.UsageError, match=r"no run in .* is under way"):
        find_address()
    # The folder has all that it was given.
    goal = str(summary["steps"] + 1)
    child = run_module.start(RunFolder(run.path), "--set", f"run.steps={goal}")
    on = umbra.Run(run.path, child)
    assert on.wait(2 * DEADLINE_S)["steps"] == int(goal)
    assert on.evaluate("prompts.jsonl", samples=4)["samples"] == 4
    monkeypatch.setenv("UMBRA_SEARCH", "")  # which the command sets, for its processes
    assert cli.main(["eval", str(run.path), "--prompts", "prompts.jsonl", "--samples", "4"]) == 0


@pytest.mark.timeout(3 * DEADLINE_S)
def test_mistakes_are_sentences_and_leave_no_folder(project: Path) -> None:
    (project / "sub" / "keys").mkdir(parents=True)
    (project / "sub" / "run.toml").write_text('[security]\nkeys = "keys"\n')
    for given, named in (
        ({"prompts": []}, "prompts has no rows"),
        ({"prompts": [1]}, "row 1 is a int"),
        ({"prompts": [{"prompt": object()}]}, "a object is no JSON value"),
        ({"reward": lambda completion: 0.0}, "a lambda has no name"),
        ({"reward": None}, "give a reward"),
        ({"reward": "exact", "environment": "guess"}, "give reward or environment, not both"),
        ({"learning_rate": 1.0}, "umbra.train has no argument 'learning_rate'"),
        ({"trainer": {"learning_rat": 1.0}}, "learning_rate"),
        ({"config": "nothing.toml"}, "nothing.toml does not exist"),
        ({"config": {"buffer": [1]}}, "'buffer'; a section of the run file is given as a mapping"),
        ({"config": "sub/run.toml"}, r"sub/keys/.*\.key_secret is missing"),  # beside the file
        ({"config": {"environments": [{}]}}, "every one of .*environments.* needs a name"),
    ):
        arguments: dict[str, Any] = {
            "model": "model", "prompts": "prompts.jsonl", "reward": "tiny_reward:score", **given
        }  # fmt: skip
        with pytest.raises(umbra.UsageError, match=named):
            umbra.train(**arguments)
        assert not list(project.glob("runs/*")), given
    with (
        pytest.MonkeyPatch.context() as patched,
        ThreadPoolExecutor(1) as pool,
    ):  # a thread that ends
        patched.setattr(run_module, "ChildProcess", lambda *_, **__: threading.current_thread())
        forking: Any = pool.submit(run_module.start, RunFolder(project)).result()
    assert forking.is_alive()  # the run would end with the thread that forks it
    # What only the processes can find out.
    with pytest.raises(umbra.UmbraError, match="tiny_reward has no callable 'scores'") as caught:
        umbra.train("model", "prompts.jsonl", "tiny_reward:scores", **SMALL)
    assert caught.value.exit_code == 2
    group = {"environment": {"reward_scope": "group"}}  # the scoring stage comes with it
    with pytest.raises(umbra.UmbraError, match="no function with the parameter completions"):
        umbra.train("model", "prompts.jsonl", "tiny_reward:score", config=group, **SMALL)
    assert not list(project.glob("runs/*"))


@pytest.mark.timeout(3 * DEADLINE_S)
def test_trls_quick_start_runs_with_another_import(
    project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (project / "script.py").write_text(QUICK_START)
    runpy.run_path("script.py", run_name="__main__")
    assert "trained 2 steps" in capfd.readouterr().out
    assert (project / "trained" / "config.json").is_file()


# TRL's own quick start with LoRA, two rewards and a callback, and settings of its size.
QUICK_START = """
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig
from umbra.compat.trl import GRPOTrainer

dataset = Dataset.from_list([{"prompt": f"say {n}", "word": "a"} for n in range(8)])
heard = []

def reward_letters(prompts, completions, word, **kwargs):
    return [completion.count(letter) / 12 for completion, letter in zip(completions, word)]

def reward_length(completions, **kwargs):
    return [len(completion) / 100 for completion in completions]

class Listener(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        heard.append(f"begin of {state.max_steps}")

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "reward" in logs:
            heard.append((state.global_step, "rewards/reward_length/mean" in logs))

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        assert 0 <= metrics["eval_reward"] < 9
        heard.append("evaluated")

    def on_save(self, args, state, control, **kwargs):
        heard.append("saved")

if __name__ == "__main__":
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained("model"),
        reward_funcs=[reward_letters, reward_length],
        args=GRPOConfig(
            output_dir="trl", max_steps=2, learning_rate=1e-3, num_generations=4,
            per_device_train_batch_size=16, max_completion_length=12, report_to="none",
            use_cpu=True, reward_weights=[1.0, 0.1],
        ),
        train_dataset=dataset,
        eval_dataset=dataset.select(range(2)),
        peft_config=LoraConfig(r=4, target_modules="all-linear"),
        callbacks=[Listener],
        umbra={
            "generator": {"threads": 1, "slots": 16, "max_context": 64}, "eval": {"samples": 4}
        },
    )
    output = trainer.train()
    print("trained", output.global_step, "steps")
    heard.sort(key=str)
    assert heard[:2] == [(1, True), (2, True)] and heard[2] == "begin of 2", heard
    assert {"evaluated", "saved"} == set(heard[3:]), heard
    assert [log["step"] for log in trainer.state.log_history if "loss" in log] == [1, 2]
    assert trainer.model.config.vocab_size >= len(trainer.processing_class)
    trainer.save_model("trained")
"""
