"""Plans on a SLURM of three nodes on this machine; `tests/real/setup.sh` installs it."""

import json
import os
import re
from pathlib import Path

import pytest
from fakes.clusters import plan_of
from fakes.machines import check_ledger, logs, on_machines, plan, skipped, sort_task
from fakes.whole_runs import sets

from umbra.deploy.cluster.command import render, write

pytestmark = [pytest.mark.real, pytest.mark.timeout(660), skipped("slurm")]

# Waits until the job has ended, and prints its state.
ENDED = """
ended() { # JOB
    while :; do
        state=$(scontrol show job "$1" | sed -n 's/.*JobState=\\([A-Z_]*\\).*/\\1/p' | head -n 1)
        case $state in PENDING | RUNNING | COMPLETING | CONFIGURING) sleep 0.5 ;; *) break ;; esac
    done
    echo "$state"
}
"""
# Stands in for `umbra`. A generator fails once; the trainer's rank 0 waits for all.
STAND_IN = """\
#!/bin/bash
echo "host=$(hostname) gpus=$CUDA_VISIBLE_DEVICES broker=$UMBRA_BROKER $*"
case "$*" in
    generator*)
        if mkdir "$MARKS/failed" 2>/dev/null; then exit 5; fi
        touch "$MARKS/again"
        ;;
    *"--node-rank 0"*)
        until [ -e "$MARKS/again" ]; do sleep 0.1; done
        touch "$MARKS/ended"
        exit 0
        ;;
esac
trap 'exit 0' TERM
until [ -e "$MARKS/ended" ]; do sleep 0.1; done
"""


def test_nodes_with_and_without_gpus_and_a_trainer_of_two(tmp_path: Path) -> None:
    """The script with a stand-in for what it starts, under names that have to be quoted."""
    program, marks, out = tmp_path / "bin" / "umbra", tmp_path / "marks", tmp_path / "the plan 1%"
    for folder in (program.parent, marks):
        folder.mkdir()
    program.write_text(STAND_IN, encoding="utf-8")
    program.chmod(0o755)
    names = (f"run.dir={tmp_path}/my 100% runs", 'run.name=a "run" 50%')
    made = plan_of(0, 1, 1, 1, ratios=[0.67, 0.33], overrides=names, run_id="the run 7%")
    write(render(made, ["slurm"], "", out, None), out)
    path = f"{program.parent}:{os.environ['PATH']}"
    script = f'ended "$(sbatch --parsable "{out}/run.sbatch")"; sinfo'
    nodes = {"x1": 1, "x2": 0, "x3": 1, "x4": 1}
    printed = on_machines("slurm", tmp_path, nodes, ENDED + script, PATH=path, MARKS=str(marks))
    assert printed.startswith("COMPLETED\n"), logs(tmp_path)
    folder = tmp_path / "my 100% runs" / "the run 7%" / "logs"
    said = {path.stem: path.read_text(encoding="utf-8") for path in folder.iterdir()}
    assert set(said) == {process.name for process in made.processes}
    # The buffer's node is the one without GPU, wherever it is in the cluster file.
    assert said["buffer"].startswith("host=x2 gpus= broker=tcp://10.88.0.2:5555 buffer")
    hosts: list[str] = []
    for name in ("trainer", "trainer-c", "generator-d-0"):
        found = re.match(r"host=(x[134]) gpus=0 broker=tcp://10.88.0.2:5555 ", said[name])
        assert found, said[name]
        hosts.append(found[1])
    assert len(set(hosts)) == 3
    for rank, name in enumerate(("trainer", "trainer-c")):
        assert f"--node-rank {rank} " in said[name]
        assert f"trainer.rendezvous=10.88.0.{hosts[0][1]}:5561 " in said[name]
    assert f"host={hosts[1]} " in said["part-c"]
    assert said["generator-d-0"].count("generator --set generator.device=cuda") == 2
    (output,) = out.glob("slurm-*.log")
    assert "generator-d-0 ended with exit code 5: restart in 2 s" in output.read_text()


# -- whole runs -----------------------------------------------------------------------------------

STEPS = 40
CLUSTER = """
[cluster]
groups = ["train", "generate"]
ratios = [0.34, 0.66]
slurm_options = ["--time=2:00:00"]
"""
THREE = {"x1": 0, "x2": 0, "x3": 0}
# Submits the run and waits for its fifth step.
BEGIN = """
steps() { cat runs/slurm/*/metrics.jsonl 2>/dev/null | grep -c '"kind":"step"' || true; }
job=$(sbatch --parsable plan/run.sbatch)
until [ "$(steps)" -ge 5 ]; do
    sleep 0.5
    squeue --noheader --job "$job" | grep -q . || { echo "the job ended early" >&2; exit 1; }
done
"""
FINISH = 'ended "$job"'


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with the sort task, and a plan of it on three nodes."""
    nodes = [f'[[nodes]]\nname = "{n}"\naddress = "unused-{n}"\n' for n in "abc"]
    settings = sets(f"run.steps={STEPS}", "checkpoint.every=2", "run.broker_grace_s=120")
    sort_task(tmp_path)
    words = ("--format", "slurm", "--run-id", "slurm", *settings)
    plan(tmp_path, CLUSTER + "".join(nodes), *words)
    return tmp_path


def run_whole(project: Path, script: str) -> str:
    return on_machines("slurm", project, THREE, ENDED + BEGIN + script + FINISH)


def check_samples(project: Path) -> None:
    (file,) = (project / "runs" / "slurm").glob("*/buffer.json")
    check_ledger(file, STEPS * 8 * 32)


@pytest.mark.cluster
def test_a_run_that_is_requeued_goes_on_from_its_checkpoint(project: Path) -> None:
    # SLURM holds a requeued job back for two minutes, unless it is told otherwise.
    requeue = """
    scontrol requeue "$job"
    until scontrol show job "$job" | grep -q "JobState=PENDING"; do sleep 0.5; done
    until scontrol update JobId="$job" StartTime=now 2>/dev/null; do sleep 0.5; done
    until scontrol show job "$job" | grep -q "Restarts=1"; do sleep 0.5; done
    """
    assert run_whole(project, requeue).endswith("COMPLETED\n")
    check_samples(project)
    metrics = project / "runs" / "slurm" / "a" / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    steps = [row["step"] for row in rows if row["kind"] == "step"]
    assert steps[-1] == STEPS
    assert steps.count(1) == 1, "it began again"


def test_a_run_outlives_a_node_of_a_generator(project: Path) -> None:
    # The last of the hosts has the last of the nodes; the bridge is where this script is.
    lose = """
    ip link set to-3 down
    until sinfo --noheader --Node --partition=all --states=down | grep -q x3; do sleep 0.5; done
    echo "down at step $(steps)"
    """
    printed = run_whole(project, lose)
    assert printed.endswith("COMPLETED\n"), printed
    check_samples(project)


def test_a_whole_run_that_is_cancelled_leaves_a_checkpoint(project: Path) -> None:
    cancel = """
    before=$(steps)
    scancel "$job"
    until [ -z "$(squeue --noheader)" ]; do sleep 0.2; done
    """
    assert run_whole(project, cancel).endswith("CANCELLED\n")
    found = list((project / "runs" / "slurm").glob("*/checkpoints/step-*"))
    assert found, logs(project)
    log = (project / "runs" / "slurm" / "logs" / "trainer.log").read_text(encoding="utf-8")
    assert "Traceback" not in log
