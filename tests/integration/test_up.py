"""Whole runs by `umbra up`: all processes and sockets for real, a tiny model, a reward of ours."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fakes.slowness import seconds
from fakes.waiting import until

DEADLINE_S = seconds(60.0)  # importing torch in every process takes most of it
LEFT_S = 2.5  # until those that were killed are gone
UMBRA = (sys.executable, "-m", "umbra")


@dataclass
class UpProcess:
    """An `umbra up` under way in a project folder."""

    popen: subprocess.Popen[str]
    project: Path
    lines: list[str] = field(default_factory=list)

    @property
    def run_dir(self) -> Path:
        """The folder of its run."""
        (found,) = (self.project / "runs").iterdir()
        return found

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait for `condition` while it runs."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            if self.popen.poll() is not None:
                pytest.fail(f"ended before {what}: {self.popen.communicate()}")
            if time.monotonic() > deadline:
                pytest.fail(f"{what} did not happen within {DEADLINE_S:g} s")
            time.sleep(0.05)

    def broker(self) -> str:
        """Where its buffer listens, once it has said so."""
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            if "its buffer at " in line:
                return line.split("its buffer at ")[1].strip()
        raise AssertionError("no address was printed")

    def steps(self) -> list[dict[str, Any]]:
        """The rows of the train steps so far."""
        return [row for row in self.rows() if row["kind"] == "step"]

    def rows(self) -> list[dict[str, Any]]:
        """What was measured so far."""
        path = self.run_dir / "metrics.jsonl"
        if not path.exists():
            return []
        lines = path.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def finish(self, limit_s: float | None = None) -> dict[str, Any]:
        """Wait for the end, `DEADLINE_S` seconds unless said otherwise; the summary."""
        limit_s = DEADLINE_S if limit_s is None else limit_s  # a test may have set it
        out, err = self.popen.communicate(timeout=limit_s)
        self.lines = (out + err).splitlines()
        return json.loads((self.run_dir / "summary.json").read_text())


@pytest.fixture
def up(project: Path) -> Iterator[Callable[..., UpProcess]]:
    """Starts `umbra up run.toml` with overrides; after the test nothing of it may be left."""
    started: list[UpProcess] = []

    def start(*overrides: str, flags: tuple[str, ...] = ()) -> UpProcess:
        settings = [part for override in overrides for part in ("--set", override)]
        popen = subprocess.Popen(
            [*UMBRA, "up", "run.toml", *settings, *flags],
            cwd=project,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        started.append(UpProcess(popen, project))
        return started[-1]

    yield start
    for process in started:
        if process.popen.poll() is None:
            process.popen.kill()
        process.popen.communicate()
    if started and (project / "runs").exists():
        # Who was killed with its session is there for a moment more; orphans stay for longer.
        until(lambda: not leftovers(project), lambda: leftovers(project), limit_s=seconds(LEFT_S))


def leftovers(project: Path) -> list[str]:
    """Processes and shared memory of the runs in `project`."""
    found = [
        str(path)
        for run in (project / "runs").iterdir()
        for path in Path("/dev/shm").glob(f"umbra-{run.name}*")
    ]
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if any(word.startswith(bytes(project / "runs")) for word in words):
            found.append(b" ".join(words).decode())
    return found


@pytest.mark.e2e
@pytest.mark.timeout(180)
def test_a_run_with_own_model_prompts_and_reward(
    project: Path, up: Callable[..., UpProcess]
) -> None:
    process = up("eval.prompts=prompts.jsonl", "eval.samples=16", flags=("--json",))
    summary = process.finish()
    assert process.popen.returncode == 0, process.lines
    assert json.loads(process.lines[0]) == summary
    assert summary["exit_reason"] == "finished"
    assert summary["steps"] == 4
    assert summary["samples"] == 4 * 16
    assert summary["ledger"]["trained"] == 4 * 16
    assert summary["ledger"]["balance"] == 0
    assert sum(summary["ledger"]["in_flight"].values()) == 0
    assert summary["staleness"]["max"] <= summary["staleness"]["bound"] == 2
    assert summary["mismatch_k3_on_policy"] < 1e-6
    assert isinstance(summary["accuracy_before"], float)
    assert isinstance(summary["accuracy_after"], float)
    assert set(summary["seconds"]["services"]) == {
        "buffer", "weight-hub", "trainer", "generator-0",
    }  # fmt: skip
    assert all(used["cpu"] > 0 for used in summary["seconds"]["services"].values())
    assert generates(summary["model"])
    trace = json.loads((process.run_dir / "trace.json").read_text())["traceEvents"]
    spans = {(event["cat"], event["name"]) for event in trace if event["ph"] == "X"}
    assert {("trainer", "train_step"), ("generator-0", "decode"), ("weight-hub", "push 4")} <= spans
    assert summary["run_id"] in (process.run_dir / "report.html").read_text()


def generates(model_dir: str) -> bool:
    """Whether a plain Transformers program can load the model and generate with it."""
    program = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
ids = tokenizer("say a", return_tensors="pt").input_ids
out = model.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None)
print(out.shape[1] - ids.shape[1])
"""
    result = subprocess.run(
        [sys.executable, "-c", program, model_dir],
        check=True,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    return result.stdout.strip() == "3"


@pytest.mark.e2e
@pytest.mark.real  # in the suite a run is drained so, and goes on, in test_refused_resume.py
@pytest.mark.timeout(180)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_the_run(up: Callable[..., UpProcess], number: signal.Signals) -> None:
    """1. A run trains. 2. `umbra up` gets a signal. Result: 128 + n, all gone, ledger balanced."""
    process = up("run.steps=100000")
    process.broker()
    process.until(lambda: len(process.steps()) >= 2, "the second step")
    process.popen.send_signal(number)
    check_drained(process, number)


def check_drained(process: UpProcess, number: signal.Signals) -> None:
    """The run that got this signal ends with it, and in order."""
    summary = process.finish()
    assert process.popen.returncode == 128 + number, process.lines
    assert summary["exit_reason"] == "interrupted"
    assert summary["ledger"]["balance"] == 0
    assert summary["model"] is None
    assert not [line for line in process.lines if "killed" in line]


@pytest.mark.e2e
@pytest.mark.timeout(180)
def test_a_second_signal_ends_at_once(up: Callable[..., UpProcess]) -> None:
    process = up("run.steps=100000")
    process.broker()
    process.popen.send_signal(signal.SIGINT)
    process.popen.send_signal(signal.SIGTERM)
    summary = process.finish()
    assert process.popen.returncode in (130, 143)  # the kernel may deliver them in either order
    assert summary["exit_reason"] == "interrupted"


@pytest.mark.e2e
@pytest.mark.fault
@pytest.mark.timeout(180)
def test_nothing_outlives_a_killed_supervisor(up: Callable[..., UpProcess]) -> None:
    process = up("run.steps=100000")
    process.broker()
    process.until(lambda: len(process.steps()) >= 1, "the first step")
    process.popen.kill()
    process.popen.wait(DEADLINE_S)
    until(lambda: not leftovers(process.project), lambda: leftovers(process.project))


@pytest.mark.e2e
@pytest.mark.real  # in the suite: a run without run-ahead whose hub is killed (test_hub_restart.py)
@pytest.mark.timeout(180)
def test_run_ahead_0_is_strictly_on_policy(up: Callable[..., UpProcess]) -> None:
    process = up("buffer.run_ahead=0", "run.steps=5")
    summary = process.finish()
    assert process.popen.returncode == 0, process.lines
    assert summary["staleness"]["max"] == summary["staleness"]["bound"] == 0
    assert [row["staleness/total/max"] for row in process.steps()] == [0.0] * 5
    assert summary["mixed_version_trajectories"] == 0
    assert summary["ledger"]["balance"] == 0


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_a_run_is_seen_paused_goes_on_and_is_drained(up: Callable[..., UpProcess]) -> None:
    """An operator's commands; the run ends in order, and as one that can go on."""
    evals = ("eval.prompts=prompts.jsonl", "eval.samples=4")
    process = up("run.steps=100000", "buffer.store=memory", *evals, flags=("--no-eval",))
    broker = process.broker()

    def umbra(*command: str) -> str:
        done = subprocess.run(
            [*UMBRA, *command, "--broker", broker],
            check=True,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        return done.stdout

    def rested() -> bool:
        """Whether nothing is under way, and the trainer is through with its last step."""
        status = json.loads(umbra("status", "--json"))
        flight = status["ledger"]["in_flight"]
        is_over = flight["generating"] == flight["training"] == 0
        # A step is committed first, then pushed, then reported.
        return is_over and len(process.steps()) == status["version"]

    process.until(lambda: len(process.steps()) >= 1, "the first step")
    assert umbra("status", "--ping").startswith(f"buffer at {broker} is ready")
    assert "generator-0" in umbra("monitor", "--once")
    assert "ledger: " in umbra("status")
    assert "umbra resume" in umbra("pause", "--reason", "lunch")
    process.until(rested, "the end of what was under way")
    assert json.loads(umbra("status", "--json"))["paused"] == "lunch"
    assert "PAUSED: lunch" in umbra("status")
    steps = len(process.steps())
    assert f"saved its state after step {steps}\n" in umbra("checkpoint")
    assert (process.run_dir / "checkpoints" / f"step-{steps}").is_dir()
    umbra("resume")
    process.until(lambda: len(process.steps()) > steps, "a step after the pause")
    assert "begins: 4 samples" in umbra("eval")
    process.until(
        lambda: json.loads(umbra("status", "--json"))["evals"][0]["done"], "the evaluation's end"
    )
    umbra("pause")
    process.until(rested, "the end of what was under way")
    umbra("resume")
    assert umbra("drain", "--reason", "enough") == "the run is draining\n"
    summary = process.finish()
    assert process.popen.returncode == 143, process.lines
    assert summary["exit_reason"] == "drained: enough"
    assert summary["ledger"]["balance"] == 0
