"""Plans for SLURM and Kubernetes: scripts that run, manifests that hold to the schema."""

import json
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from fakes.clusters import PLANS, SCHEMAS, parse_planned, plan_of, plan_on, plans, render
from fakes.slowness import limit

from umbra.deploy.cluster.cluster_file import Node
from umbra.deploy.cluster.plan import Plan
from umbra.proto.errors import UsageError

NAME = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")  # RFC 1035
LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
LONG = "gpu-node-17.rack-4.the-large-hall.cluster.example.com"
TWO_LONG = [
    Node(name=name, address=f"10.0.0.{i}", gpus=1) for i, name in enumerate((LONG, f"{LONG[:-1]}n"))
]
MANIFESTS = [
    *(PLANS[name] for name in ("separate", "one node", "head without GPUs", "own modules")),
    *(plan_on(TWO_LONG, run_id=run_id) for run_id in ("7-Runs_of " + "x" * 90, "ÄÖ", "a.b")),
]


def pods_of(plan: Plan) -> list[dict[str, Any]]:
    documents = yaml.safe_load_all(render(plan, "kubernetes")["kubernetes.yaml"])
    return [d["spec"]["template"]["spec"] for d in documents if d["kind"] == "Job"]


@pytest.mark.parametrize("plan", MANIFESTS, ids=lambda plan: plan.run_id[:9])
def test_manifests_hold_to_the_schema(plan: Plan) -> None:
    """And beyond it: names that fit together and keep to the rules, and every process once."""
    schema = json.loads((SCHEMAS / "kubernetes.json").read_text(encoding="utf-8"))
    of_kind: dict[str, dict[str, Any]] = {}
    for document in yaml.safe_load_all(render(plan, "kubernetes")["kubernetes.yaml"]):
        reference = f"#/definitions/{schema['kinds'][document['kind']]}"
        jsonschema.Draft7Validator({**schema, "$ref": reference}).validate(document)
        name, alike = document["metadata"]["name"], of_kind.setdefault(document["kind"], {})
        assert NAME.fullmatch(name) and name not in alike
        alike[name] = document
        check_labels(document["metadata"])
    jobs = [job["spec"] for job in of_kind["Job"].values()]
    containers: list[str] = []
    for job in jobs:
        pod = job["template"]["spec"]
        check_labels(job["template"]["metadata"])
        assert NAME.fullmatch(pod["hostname"])  # the host in `umbra status`
        assert pod["restartPolicy"] == "OnFailure"
        assert job["backoffLimit"] > 0 and job["ttlSecondsAfterFinished"] > 0
        for volume in pod["volumes"]:
            if claim := volume.get("persistentVolumeClaim"):
                assert claim["claimName"] in of_kind["PersistentVolumeClaim"]
            if config := volume.get("configMap"):
                assert config["name"] in of_kind["ConfigMap"]
        assert len({container["name"] for container in pod["containers"]}) == len(pod["containers"])
        for container in pod["containers"]:
            assert NAME.fullmatch(container["name"])
            containers.append(container["args"][container["args"].index("--name") + 1])
            parse_planned(container["args"])
            broker = {e["name"]: e["value"] for e in container["env"]}["UMBRA_BROKER"]
            host = broker.removeprefix("tcp://").rpartition(":")[0]
            selector = of_kind["Service"][host]["spec"]["selector"].items()
            labels = [job["template"]["metadata"]["labels"] for job in jobs]
            assert sum(selector <= one.items() for one in labels) == 1
    assert sorted(containers) == sorted(process.name for process in plan.processes)
    selected = [job["template"]["spec"]["nodeSelector"]["kubernetes.io/hostname"] for job in jobs]
    assert selected == [node.name for node in plan.nodes if plan.on(node)]


def check_labels(metadata: dict[str, Any]) -> None:
    for key, value in metadata["labels"].items():
        prefix, _, name = key.rpartition("/")
        assert re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", prefix)
        assert LABEL.fullmatch(name)
        assert LABEL.fullmatch(value)


@pytest.mark.parametrize("name", ["separate", "head without GPUs", "own modules"])
def test_a_container_sees_the_files_that_it_sees_under_compose(name: str) -> None:
    """And no others: of the keys its own role's alone."""
    plan = PLANS[name]
    composed = [text for path, text in render(plan, "compose").items() if "compose" in path]
    services = {k: v for text in composed for k, v in yaml.safe_load(text)["services"].items()}
    for pod in pods_of(plan):
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for container in pod["containers"]:
            service = services[container["name"]]
            keys: set[str] = set()
            folders: dict[str, bool] = {}
            for mount in container["volumeMounts"]:
                if secret := volumes[mount["name"]].get("secret"):
                    keys = {f"{mount['mountPath']}/{item['path']}" for item in secret["items"]}
                else:
                    folders[mount["mountPath"]] = mount.get("readOnly", False)
            assert folders == {v["target"]: v.get("read_only", False) for v in service["volumes"]}
            assert keys == {secret["target"] for secret in service["secrets"]}


def test_a_container_asks_for_its_gpus() -> None:
    pods = pods_of(plan_of(2, 1, overrides=("trainer.ranks=2",)))
    asked = {
        c["name"]: c["resources"] for pod in pods for c in pod["containers"] if "resources" in c
    }
    assert asked == {
        name: {"limits": {"nvidia.com/gpu": count}}
        for name, count in {"trainer": 2, "generator-b-0": 1}.items()
    }


def test_inputs_come_from_a_claim_if_there_is_one() -> None:
    for pod in pods_of(plan_of(1, 1, inputs_claim="lake")):
        assert not any("hostPath" in volume for volume in pod["volumes"])
        for mount in (mount for one in pod["containers"] for mount in one["volumeMounts"]):
            if mount["name"] == "inputs":
                assert f"/{mount['subPath']}" == mount["mountPath"]
                assert mount["readOnly"]


@pytest.mark.parametrize(
    ("name", "told"),
    [("hybrid", "gives a GPU to one container"), ("host network", "cluster.network = host")],
)
def test_what_kubernetes_cannot_do_is_refused(name: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        render(PLANS[name], "kubernetes")


# -- SLURM ----------------------------------------------------------------------------------------

# Stand-ins: the job has hosts by the list's name.
SCONTROL = """\
#!/bin/sh
case "$2" in
    hostnames) echo "$3" | tr ',' '\\n' ;;
    node) echo "NodeName=$3 Arch=x86_64 NodeAddr=$3.ib NodeHostName=$3" ;;
esac
"""
SRUN = """\
#!/bin/sh
printf '%s\\n' "$*" >> "$CALLS"
case "$*" in
    *"umbra trainer"*) exit "${TRAINER_EXIT:-0}" ;;
    *"umbra generator"*) [ -z "${FAILS:-}" ] || ! mkdir "$CALLS.failed" 2>/dev/null || exit 5 ;;
esac
"""


Called = tuple[int, dict[str, str], str, Plan]


def run_script(folder: Path, hosts: str | Sequence[str], *gpus: int, **environ: str) -> Called:
    """Run a plan's script with stand-ins: exit code, calls of srun by process, errors, the plan.

    `hosts` are what the job got, or its components; the plan's broker is its second node.
    """
    plan = plan_of(*gpus, broker="b", overrides=(f"run.dir={folder}/runs of 100%",))
    script, calls = folder / "run.sbatch", folder / "calls"
    script.write_text(render(plan, "slurm", out=folder)["run.sbatch"], encoding="utf-8")
    for name, text in {"scontrol": SCONTROL, "srun": SRUN}.items():
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(0o755)
    calls.touch()
    lists = {"SLURM_JOB_NODELIST": hosts} if isinstance(hosts, str) else {
        f"SLURM_JOB_NODELIST_HET_GROUP_{i}": names for i, names in enumerate(hosts)
    }  # fmt: skip
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "CALLS": str(calls), **lists, **environ}
    done = subprocess.run(
        ["bash", script], env=env, timeout=limit(60), capture_output=True, text=True, check=False
    )
    lines = calls.read_text(encoding="utf-8").splitlines()
    named = {line.split("--name ")[1].split()[0]: line for line in lines}
    return done.returncode, named, done.stderr, plan


@pytest.mark.parametrize("code", [0, 7])
def test_the_script_starts_every_step_and_ends_as_the_trainer(tmp_path: Path, code: int) -> None:
    fails = {"TRAINER_EXIT": str(code), "FAILS": "" if code else "1"}
    ended, named, said, plan = run_script(tmp_path, "tux3,tux9", 2, 2, **fails)
    assert ended == code, said
    assert set(named) <= {process.name for process in plan.processes}
    if code == 0:  # a failure of the trainer ends the others at once
        assert set(named) == {process.name for process in plan.processes}
        # A step that fails is started again.
        (again,) = (line for line in said.splitlines() if "restart in 2 s" in line)
        assert again.startswith("generator-b-") and "ended with exit code 5" in again
        assert (tmp_path / "calls").read_text().count("umbra generator") == 3
    trainer = named["trainer"]
    assert "--nodelist=tux3 --overlap --mpi=none --cpu-bind=none" in trainer
    assert "CUDA_VISIBLE_DEVICES=0,1 umbra trainer" in trainer
    # Each node has its own metrics; SLURM would replace the % of the log's name.
    assert f"--run-dir {tmp_path}/runs of 100%/{plan.run_id}/a" in trainer
    assert f"--output={tmp_path}/runs of 100%%/{plan.run_id}/logs/trainer.log" in trainer


def test_processes_meet_at_the_addresses_of_the_hosts_that_the_job_got(tmp_path: Path) -> None:
    hosts = ("x1", "c,x2", "head")  # c is in the cluster file, with an address
    ended, named, said, plan = run_script(tmp_path, hosts, 2, 0, 1, 1)
    assert ended == 0, said
    for name, words in {
        "buffer": ("--het-group=2 --nodes=1 --ntasks=1 --nodelist=head ", "--advertise head.ib"),
        "weight-hub": ("--het-group=0 --nodes=1 --ntasks=1 --nodelist=x1 ",),
        "relay-c": (
            *("--het-group=1 --nodes=1 --ntasks=1 --nodelist=c ", "--advertise 10.0.0.3"),
            "--upstream tcp://x1.ib:5558",
        ),
        "relay-d": ("--advertise x2.ib",),
    }.items():
        assert all(one in named[name] for one in words), named[name]
    text = render(plan, "slurm")["run.sbatch"]
    assert 'export UMBRA_BROKER="tcp://${addresses[3]}:5555"' in text


def test_a_job_of_another_size_is_refused(tmp_path: Path) -> None:
    ended, named, said, _ = run_script(tmp_path, "x1,x2,x3", 1, 1)
    assert (ended, named) == (2, {})
    assert "the plan needs 2 hosts, the job has 3" in said


def test_an_idle_node_is_no_part_of_the_job() -> None:
    text = render(plan_of(1, 1, 0, broker="a"), "slurm")["run.sbatch"]
    assert "the plan needs 2 hosts" in text and "#SBATCH hetjob" not in text


@plans
def test_scripts_are_valid_shell_and_ask_for_what_plans_need(plan: Plan, tmp_path: Path) -> None:
    text = render(plan, "slurm", out=tmp_path)["run.sbatch"]
    checked = subprocess.run(["bash", "-n"], input=text, text=True, timeout=limit(30), check=False)
    assert checked.returncode == 0
    nodes = [node for node in plan.nodes if plan.on(node)]
    options = [line.split(" ", 1)[1] for line in text.splitlines() if line.startswith("#SBATCH ")]
    components = "\n".join(options).split("\nhetjob\n")
    assert len(components) == len({node.gpus for node in nodes})
    asked: dict[int, int] = {}
    for component in components:
        lines = component.splitlines()
        assert {"--exclusive", "--mem=0", "--no-kill", "--signal=TERM@120"} <= set(lines)
        found = dict(line.removeprefix("--").split("=") for line in lines if "=" in line)
        asked[int(found.get("gpus-per-node", 0))] = int(found["nodes"])
    assert list(asked) == sorted(asked, reverse=True)
    assert asked == {node.gpus: [n.gpus for n in nodes].count(node.gpus) for node in nodes}


def test_a_script_says_what_the_cluster_file_says_about_slurm() -> None:
    options = ["--time=1-00:00:00", "--account=lab 7", "--constraint=a100&ib"]
    plan = plan_of(1, 2, overrides=('run.name=a "b" 50%',), slurm_options=options)
    text = render(plan, "slurm", out=Path("/shared/100%/my plan"))["run.sbatch"]
    first, second = text.split("#SBATCH hetjob\n")
    for line in ('--time="1-00:00:00"', '--account="lab 7"', '--constraint="a100&ib"'):
        assert f"#SBATCH {line}\n" in first and f"#SBATCH {line}\n" in second
    assert '#SBATCH --job-name="umbra-a \\"b\\" 50%"\n' in first
    # The folder of the script is there when the job begins.
    assert '#SBATCH --output="/shared/100%%/my plan/slurm-%j.log"\n' in first
    assert "#SBATCH --open-mode=append\n" in first


def test_names_that_would_break_the_script_are_refused() -> None:
    plan = plan_of(1, 1, overrides=("run.name=a\nrm -rf x",))
    with pytest.raises(UsageError, match="cannot stand in a script for sbatch"):
        render(plan, "slurm")
