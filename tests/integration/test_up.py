"""Whole runs by `umbra up`: all processes and sockets for real, a tiny model, a reward of ours."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from fakes.commands import call, fork_server, needs
from fakes.slowness import limit
from fakes.whole_runs import QUIET_S, UMBRA, Up
from transformers import AutoModelForCausalLM, AutoTokenizer

from umbra import __version__
from umbra.deploy.run.live import View
from umbra.deploy.run.up import Up as Run
from umbra.deploy.run_folder import RunFolder
from umbra.proto.errors import UmbraError
from umbra.services.config.loader import load_config
from umbra.services.modeling.run_file import located
from umbra.services.process.command import SignalCounter
from umbra.services.trainer.make_model import make_model


def test_a_run_with_own_model_prompts_and_reward(up: Up) -> None:
    process = up("eval.prompts=prompts.jsonl", "eval.samples=16", flags=("--json",))
    summary = process.finish()
    assert json.loads(process.lines[0]) == summary
    assert summary["exit_reason"] == "finished"
    assert summary["samples"] == summary["ledger"]["trained"] == 4 * 16
    assert summary["staleness"]["max"] <= summary["staleness"]["bound"] == 2
    assert summary["mismatch_k3_on_policy"] < 1e-6
    assert all(isinstance(summary[f"accuracy_{when}"], float) for when in ("before", "after"))
    services = summary["seconds"]["services"]
    assert set(services) == {"buffer", "weight-hub", "trainer", "generator-0"}
    assert all(used["cpu"] > 0 for used in services.values())
    assert generates(summary["model"])
    firsts = {name: process.log(name).splitlines()[0] for name in services}
    assert all(f"umbra-rl {__version__}, torch " in line for line in firsts.values()), firsts
    assert "on cpu (float32), versions in float32; " in firsts["trainer"]
    assert "engine torch on cpu (float32), plane auto; " in firsts["generator-0"]
    assert "weights come over plane shm" in process.log("generator-0")
    trace = json.loads((process.run_dir / "trace.json").read_text())["traceEvents"]
    spans = {(event["cat"], event["name"]) for event in trace if event["ph"] == "X"}
    assert {("trainer", "train_step"), ("generator-0", "decode"), ("weight-hub", "push 4")} <= spans
    assert summary["run_id"] in (process.run_dir / "report.html").read_text()


def generates(model_dir: str) -> bool:
    """Return whether plain Transformers can load the model and generate with it."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir)
    ids = tokenizer("say a", return_tensors="pt").input_ids
    out = model.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None)
    return out.shape[1] - ids.shape[1] == 3


@pytest.mark.parametrize("outcome", ["made", "interrupted", "it failed"])
def test_buffer_and_hub_do_not_wait_for_the_model(
    outcome: str, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a demo, whose warm start makes it meanwhile; a directory like it is tried."""
    monkeypatch.chdir(project)
    stand_in = (project / "model").rename(project / "stand-in")
    run_file = project / "run.toml"
    config = located(load_config(run_file, overrides=["run.steps=1"], environ={}), run_file)
    folder = RunFolder.create(project / "runs", "run")
    log = folder.log("weight-hub")

    def made() -> bool:
        if not log.is_file() or "ready: " not in log.read_text():
            return False
        assert not folder.log("trainer").exists()
        if outcome == "interrupted":
            os.kill(os.getpid(), signal.SIGINT)
            return False
        if outcome != "made":
            raise UmbraError(outcome)
        stand_in.rename(project / "model")
        return True

    with SignalCounter() as interrupts:
        how: Any = {"view": View(quiet=True), "interrupts": interrupts, "server": fork_server()}
        how |= {"search": [project], "model_made": made, "stand_in": str(stand_in)}
        run = Run(config, folder, **how)
        if outcome == "made":
            summary = run.run()
            assert (summary["exit_code"], summary["steps"]) == (0, 1)
        else:
            with pytest.raises(UmbraError, match=outcome):
                run.run()
    assert folder.config.is_file() == (outcome == "made")  # nobody can go on without a model


@pytest.mark.timeout(400)
def test_a_run_on_vllm(project: Path, up: Up) -> None:
    """A core that dies is in `test_engines.py`."""
    needs("vllm")
    (project / "model").unlink()
    make_model(project / "model", hidden=64, heads=2, kv_heads=1, layers=1, ff=32)
    own = ("generator.engine=vllm", "generator.engine_args.block_size=32")
    process = up(*own, "sampling.max_tokens=24", "weight_hub.dtype=float32", quiet_s=400.0)
    summary = process.finish()
    assert summary["ledger"]["trained"] == 4 * 16
    assert summary["mismatch_k3_on_policy"] < 1e-5


def test_a_second_signal_ends_at_once(up: Up) -> None:
    process = up("run.steps=100000")
    process.broker()
    process.popen.send_signal(signal.SIGINT)
    process.popen.send_signal(signal.SIGTERM)
    process.popen.communicate(timeout=limit(QUIET_S))
    assert process.popen.returncode in (130, 143)  # the kernel may deliver them in either order
    summary = json.loads((process.run_dir / "summary.json").read_text())
    assert summary["exit_reason"] == "interrupted"


@pytest.mark.timeout(300)
def test_a_run_is_seen_and_drained(up: Up) -> None:
    """An operator's commands; the run ends in order, and as one that can go on."""
    process = up("run.steps=100000", "buffer.store=memory", "checkpoint.every=0")
    broker = process.broker()

    def umbra(*command: str) -> str:
        return call([*UMBRA, *command, "--broker", broker], check=True).stdout

    process.until_step(1)
    assert umbra("status", "--ping").startswith(f"buffer at {broker} is ready")
    assert "generator-0" in umbra("status")
    assert "ledger: " in umbra("status")
    assert umbra("drain", "--reason", "enough") == "the run is draining\n"
    assert process.finish(143)["exit_reason"] == "drained: enough"
