"""Plans on a SLURM of three nodes on this machine; `tests/real/setup.sh` installs it."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
from fakes.clusters import cluster, run_config
from fakes.machines import check_ledger, logs, on_machines, sort_task, why_not

from umbra.deploy.cluster.command import render
from umbra.deploy.cluster.command import write as write_files
from umbra.deploy.cluster.plan import Plan, make_plan

WHY_NOT = why_not("SLURM", "slurmctld", "slurmd", "sbatch", "munged", "unshare", "ip")

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(660),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]


def on_slurm(folder: Path, nodes: dict[str, int], script: str, **environ: str) -> str:
    """Run `script` with SLURM's commands on a cluster of `nodes`; what it prints."""
    whole = {**os.environ, **environ}
    return on_machines("slurm_cluster.py", folder, nodes, ENDED + script, whole)


# Waits until the job has ended; its state is in $state.
ENDED = """
ended() { # JOB
    while :; do
        state=$(scontrol show job "$1" | sed -n 's/.*JobState=\\([A-Z_]*\\).*/\\1/p' | head -n 1)
        case $state in PENDING | RUNNING | COMPLETING | CONFIGURING) sleep 0.5 ;; *) break ;; esac
    done
}
"""

# -- the script, with stand-ins for what it starts ------------------------------------------------

# Stands in for `umbra`. A generator fails once; the trainer waits for all.
STAND_IN = """\
#!/bin/bash
echo "host=$(hostname) gpus=$CUDA_VISIBLE_DEVICES broker=$UMBRA_BROKER $*"
touch "$MARKS/$1"
case $1 in
    generator)
        if mkdir "$MARKS/failed" 2>/dev/null; then exit 5; fi
        touch "$MARKS/again"
        ;;
    trainer)
        until [ -e "$MARKS/again" ]; do sleep 0.1; done
        touch "$MARKS/ended"
        exit "${TRAINER_EXIT:-0}"
        ;;
esac
trap 'exit 0' TERM
until [ -e "$MARKS/ended" ]; do sleep 0.1; done
"""
MIXED = {"x1": 1, "x2": 0, "x3": 1}


@pytest.fixture
def stand_in(tmp_path: Path) -> dict[str, str]:
    """An environment in which `umbra` is the stand-in."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "marks").mkdir()
    program = tmp_path / "bin" / "umbra"
    program.write_text(STAND_IN, encoding="utf-8")
    program.chmod(0o755)
    return {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "MARKS": str(tmp_path / "marks"),
        "PYTHON": sys.executable,
    }


def mixed_plan(tmp_path: Path) -> Plan:
    """Nodes with and without a GPU, and names that have to be quoted."""
    config = run_config(f"run.dir={tmp_path}/my 100% runs", 'run.name=a "run" 50%')
    return make_plan(cluster(0, 1, 1), config, "the run 7%")


def write(plan: Plan, out: Path) -> Path:
    """The script of `plan` in folder `out`."""
    write_files(render(plan, ["slurm"], "", out, None), out)
    return out / "run.sbatch"


def test_nodes_with_and_without_gpus(tmp_path: Path, stand_in: dict[str, str]) -> None:
    plan = mixed_plan(tmp_path)
    script = write(plan, tmp_path / "the plan 1%")
    printed = on_slurm(
        tmp_path,
        MIXED,
        f'job=$(sbatch --parsable "{script}"); ended "$job"; echo "$state"; sinfo',
        **stand_in,
    )
    assert printed.startswith("COMPLETED\n"), logs(tmp_path)
    folder = tmp_path / "my 100% runs" / "the run 7%" / "logs"
    said = {path.stem: path.read_text(encoding="utf-8").splitlines() for path in folder.iterdir()}
    assert set(said) == {process.name for process in plan.processes}
    # The buffer's node is the one without GPU, wherever it is in the cluster file.
    assert "host=x2 gpus= broker=tcp://10.88.0.2:5555 buffer" in said["buffer"][0]
    hosts = {line.split()[0] for name in ("trainer", "generator-c-0") for line in said[name]}
    assert hosts == {"host=x1", "host=x3"}
    for name in ("trainer", "generator-c-0"):
        assert " gpus=0 broker=tcp://10.88.0.2:5555 " in said[name][0]
    assert sum("generator --device cuda" in line for line in said["generator-c-0"]) == 2
    (output,) = (tmp_path / "the plan 1%").glob("slurm-*.log")
    assert "generator-c-0 ended (exit code 5): restart in 2 s" in output.read_text(encoding="utf-8")


def test_a_trainer_of_two_nodes(tmp_path: Path, stand_in: dict[str, str]) -> None:
    config = run_config(f"run.dir={tmp_path}/runs", "trainer.ranks=2", "trainer.nodes=2")
    plan = make_plan(cluster(0, 0, 0, ratios=[0.67, 0.33]), config, "two")
    script = write(plan, tmp_path / "plan")
    whole = f'job=$(sbatch --parsable "{script}"); ended "$job"; echo "$state"'
    nodes = {"x1": 0, "x2": 0, "x3": 0}
    assert on_slurm(tmp_path, nodes, whole, **stand_in) == "COMPLETED\n", logs(tmp_path)
    folder = tmp_path / "runs" / "two" / "logs"
    said = {path.stem: path.read_text(encoding="utf-8") for path in folder.iterdir()}
    hosts: list[str] = []
    for rank, name in enumerate(("trainer", "trainer-b")):
        # The first of the trainer's nodes has the buffer as well.
        found = re.search(
            r"host=(\S+) .* broker=tcp://(\S+):5555 .* trainer.rendezvous=(\S+):5561 ", said[name]
        )
        assert found and found[2] == found[3]
        assert f"--node-rank {rank} " in said[name]
        hosts.append(found[1])
    assert hosts[0] != hosts[1]
    assert f"host={hosts[1]} " in said["part-b"]
    assert "weight-hub --upstream tcp://" in said["part-b"]


@pytest.mark.parametrize("code", [2, 7])
def test_a_job_ends_as_its_trainer(tmp_path: Path, stand_in: dict[str, str], code: int) -> None:
    script = write(mixed_plan(tmp_path), tmp_path / "plan")
    fail = f"""
    job=$(sbatch --parsable "{script}"); ended "$job"; echo "$state"
    scontrol show job "$job" | sed -n 's/.*ExitCode=\\([0-9]*\\):.*/\\1/p' | head -n 1
    """
    environ = {**stand_in, "TRAINER_EXIT": str(code)}
    assert on_slurm(tmp_path, MIXED, fail, **environ) == f"FAILED\n{code}\n"


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
FINISH = """
ended "$job"
echo "$state"
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with the sort task, and a plan of it on three nodes."""
    nodes = [f'[[nodes]]\nname = "{n}"\naddress = "unused-{n}"\n' for n in "abc"]
    overrides = (f"run.steps={STEPS}", "checkpoint.every=2", "run.broker_grace_s=120")
    settings = [part for override in overrides for part in ("--set", override)]
    own = ("--format", "slurm", "--run-id", "slurm", *settings)
    sort_task(tmp_path, CLUSTER + "".join(nodes), *own)
    return tmp_path


def run_whole(project: Path, script: str) -> str:
    """Run `script` where `umbra` is ours."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return on_slurm(project, THREE, script, PATH=path)


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
    assert run_whole(project, BEGIN + requeue + FINISH).endswith("COMPLETED\n")
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
    printed = run_whole(project, BEGIN + lose + FINISH)
    assert printed.endswith("COMPLETED\n"), printed
    check_samples(project)


def test_a_whole_run_that_is_cancelled_leaves_a_checkpoint(project: Path) -> None:
    cancel = """
    before=$(steps)
    scancel "$job"
    until [ -z "$(squeue --noheader)" ]; do sleep 0.2; done
    """
    assert run_whole(project, BEGIN + cancel + FINISH).endswith("CANCELLED\n")
    found = list((project / "runs" / "slurm").glob("*/checkpoints/step-*"))
    assert found, logs(project)
    log = (project / "runs" / "slurm" / "logs" / "trainer.log").read_text(encoding="utf-8")
    assert "Traceback" not in log
