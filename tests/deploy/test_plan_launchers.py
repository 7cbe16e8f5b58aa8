"""Plans for SLURM and Kubernetes: scripts that run, manifests that hold to the schema."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from fakes.clusters import PLANS, SCHEMAS, parse_planned, plan_of, plans, render, run_config
from fakes.slowness import limit

from umbra.deploy.cluster.cluster_file import ClusterFile, ClusterSpec, Node
from umbra.deploy.cluster.containers import keys_command
from umbra.deploy.cluster.plan import Plan, make_plan
from umbra.proto.errors import UsageError

NAME = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")  # RFC 1035
LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


def documents_of(plan: Plan) -> list[dict[str, Any]]:
    """The manifests of `plan`, which hold to Kubernetes' schema."""
    schema = json.loads((SCHEMAS / "kubernetes.json").read_text(encoding="utf-8"))
    documents = list(yaml.safe_load_all(render(plan, "kubernetes")["kubernetes.yaml"]))
    for document in documents:
        reference = f"#/definitions/{schema['kinds'][document['kind']]}"
        jsonschema.Draft7Validator({**schema, "$ref": reference}).validate(document)
    return documents


def jobs_of(plan: Plan) -> list[dict[str, Any]]:
    return [document["spec"] for document in documents_of(plan) if document["kind"] == "Job"]


@pytest.mark.parametrize(
    "name", ["separate", "one node", "head without GPUs", "no GPUs", "own modules"]
)
def test_manifests_hold_to_the_schema(name: str) -> None:
    check_manifests(PLANS[name], documents_of(PLANS[name]))


def check_manifests(plan: Plan, documents: list[dict[str, Any]]) -> None:
    """Check beyond the schema: names that fit together, and every process once."""
    names = [(document["kind"], document["metadata"]["name"]) for document in documents]
    assert len(names) == len(set(names))
    for _, name in names:
        assert NAME.fullmatch(name)
    for document in documents:
        check_labels(document["metadata"])
    of_kind = {
        kind: {d["metadata"]["name"]: d for d in documents if d["kind"] == kind}
        for kind in ("Job", "Service", "PersistentVolumeClaim", "ConfigMap")
    }
    containers: list[str] = []
    for job in of_kind["Job"].values():
        template = job["spec"]["template"]
        pod = template["spec"]
        check_labels(template["metadata"])
        assert NAME.fullmatch(pod["hostname"])  # the host in `umbra status`
        assert pod["restartPolicy"] == "OnFailure"
        assert job["spec"]["backoffLimit"] > 0 and job["spec"]["ttlSecondsAfterFinished"] > 0
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for volume in volumes.values():
            if "persistentVolumeClaim" in volume:
                claim = volume["persistentVolumeClaim"]["claimName"]
                assert claim in of_kind["PersistentVolumeClaim"]
            if "configMap" in volume:
                assert volume["configMap"]["name"] in of_kind["ConfigMap"]
        assert len({container["name"] for container in pod["containers"]}) == len(pod["containers"])
        for container in pod["containers"]:
            assert NAME.fullmatch(container["name"])
            containers.append(container["args"][container["args"].index("--name") + 1])
            parse_planned(container["args"])
            assert {mount["name"] for mount in container["volumeMounts"]} <= set(volumes)
            broker = {e["name"]: e["value"] for e in container["env"]}["UMBRA_BROKER"]
            host = broker.removeprefix("tcp://").rpartition(":")[0]
            selector = of_kind["Service"][host]["spec"]["selector"]
            targets = [
                j for j in of_kind["Job"].values()
                if selector.items() <= j["spec"]["template"]["metadata"]["labels"].items()
            ]  # fmt: skip
            assert len(targets) == 1
    assert sorted(containers) == sorted(process.name for process in plan.processes)


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
    for job in jobs_of(plan):
        pod = job["template"]["spec"]
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


LONG = "gpu-node-17.rack-4.the-large-hall.cluster.example.com"


@pytest.mark.parametrize("run_id", ["7-Runs_of " + "x" * 90, "ÄÖ", "a.b"])
def test_names_keep_to_the_rules(run_id: str) -> None:
    names = (LONG, f"{LONG[:-1]}n")
    nodes = [Node(name=n, address=f"10.0.0.{i}", gpus=1) for i, n in enumerate(names, start=1)]
    plan = make_plan(ClusterFile(cluster=ClusterSpec(), nodes=nodes), run_config(), run_id)
    check_manifests(plan, documents_of(plan))
    selectors = [job["template"]["spec"]["nodeSelector"] for job in jobs_of(plan)]
    assert {selector["kubernetes.io/hostname"] for selector in selectors} == {*names}


def test_a_container_asks_for_its_gpus() -> None:
    plan = plan_of(2, 1, overrides=("trainer.ranks=2",))
    asked = {
        container["name"]: container.get("resources")
        for job in jobs_of(plan)
        for container in job["template"]["spec"]["containers"]
    }
    gpus = {"trainer": 2, "generator-b-0": 1}
    assert {name for name, resources in asked.items() if resources is None} == asked.keys() - gpus
    for name, count in gpus.items():
        assert asked[name] == {"limits": {"nvidia.com/gpu": count}}
    assert keys_command(plan, "/k").endswith(" --from-file=/k")


def test_inputs_come_from_a_claim_if_there_is_one() -> None:
    for job in jobs_of(plan_of(1, 1, inputs_claim="lake")):
        pod = job["template"]["spec"]
        assert not any("hostPath" in volume for volume in pod["volumes"])
        for container in pod["containers"]:
            for mount in container["volumeMounts"]:
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


def run_script(
    folder: Path, *gpus: int, name: str = "runs", broker: str = "", **environ: str
) -> tuple[int, dict[str, str], str, Plan]:
    """Run a plan's script with stand-ins: exit code, calls of srun by process, errors, the plan."""
    plan = plan_of(*gpus, broker=broker, overrides=(f"run.dir={folder}/{name}",))
    script, calls = folder / "run.sbatch", folder / "calls"
    script.write_text(render(plan, "slurm", out=folder)["run.sbatch"], encoding="utf-8")
    for name, text in {"scontrol": SCONTROL, "srun": SRUN}.items():
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(0o755)
    calls.touch()
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "CALLS": str(calls), **environ}
    done = subprocess.run(
        ["bash", script], env=env, timeout=limit(60), capture_output=True, text=True, check=False
    )
    lines = calls.read_text(encoding="utf-8").splitlines()
    named = {line.split("--name ")[1].split()[0]: line for line in lines}
    return done.returncode, named, done.stderr, plan


@pytest.mark.parametrize("code", [0, 2, 7])
def test_the_script_starts_every_step_and_ends_as_the_trainer(tmp_path: Path, code: int) -> None:
    environ = {"TRAINER_EXIT": str(code), "SLURM_JOB_NODELIST": "tux3,tux9"}
    ended, named, said, plan = run_script(tmp_path, 2, 2, name="runs of 100%", **environ)
    assert ended == code, said
    assert set(named) <= {process.name for process in plan.processes}
    if code == 0:  # a failure of the trainer ends the others at once
        assert set(named) == {process.name for process in plan.processes}
    trainer = named["trainer"]
    assert "--nodelist=tux3 --overlap --mpi=none --cpu-bind=none" in trainer
    assert "CUDA_VISIBLE_DEVICES=0,1 umbra trainer" in trainer
    # Each node has its own metrics; SLURM would replace the % of the log's name.
    assert f"--run-dir {tmp_path}/runs of 100%/{plan.run_id}/a" in trainer
    assert f"--output={tmp_path}/runs of 100%%/{plan.run_id}/logs/trainer.log" in trainer


def test_a_step_that_fails_is_started_again(tmp_path: Path) -> None:
    ended, _, said, _ = run_script(tmp_path, 1, 1, FAILS="1", SLURM_JOB_NODELIST="x1,x2")
    assert ended == 0, said
    assert "generator-b-0 ended with exit code 5: restart in 2 s" in said
    assert (tmp_path / "calls").read_text().count("umbra generator") == 2


def test_processes_meet_at_the_addresses_of_the_hosts_that_the_job_got(tmp_path: Path) -> None:
    hosts = ("x1", "c,x2", "head")  # c is in the cluster file, with an address
    lists = {f"SLURM_JOB_NODELIST_HET_GROUP_{i}": names for i, names in enumerate(hosts)}
    ended, named, said, plan = run_script(tmp_path, 2, 0, 1, 1, broker="b", **lists)
    assert ended == 0, said
    assert "--het-group=2 --nodes=1 --ntasks=1 --nodelist=head " in named["buffer"]
    assert "--advertise head.ib" in named["buffer"]
    assert "--het-group=0 --nodes=1 --ntasks=1 --nodelist=x1 " in named["weight-hub"]
    assert "--het-group=1 --nodes=1 --ntasks=1 --nodelist=c " in named["relay-c"]
    assert "--upstream tcp://x1.ib:5558" in named["relay-c"]
    assert "--advertise 10.0.0.3" in named["relay-c"]
    assert "--advertise x2.ib" in named["relay-d"]
    text = render(plan, "slurm")["run.sbatch"]
    assert 'export UMBRA_BROKER="tcp://${addresses[3]}:5555"' in text


def test_a_job_of_another_size_is_refused(tmp_path: Path) -> None:
    ended, named, said, _ = run_script(tmp_path, 1, 1, SLURM_JOB_NODELIST="x1,x2,x3")
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
