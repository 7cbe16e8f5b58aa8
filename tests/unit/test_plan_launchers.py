"""Plans for SLURM and Kubernetes: scripts that run, manifests that hold to the schema."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from fakes.clusters import PLANS, SCHEMAS, parse_planned, plan_of, plans, render
from fakes.slowness import seconds

from umbra.deploy.cluster.plan import Plan
from umbra.proto.errors import UsageError

# -- Kubernetes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["separate", "one node", "head without GPUs", "no GPUs", "own modules"]
)
def test_manifests_hold_to_the_schema(name: str) -> None:
    schema = json.loads((SCHEMAS / "kubernetes.json").read_text(encoding="utf-8"))
    plan = PLANS[name]
    documents = list(yaml.safe_load_all(render(plan, "kubernetes")["kubernetes.yaml"]))
    for document in documents:
        reference = f"#/definitions/{schema['kinds'][document['kind']]}"
        jsonschema.Draft7Validator({**schema, "$ref": reference}).validate(document)
    check_manifests(plan, documents)


def check_manifests(plan: Plan, documents: list[dict[str, Any]]) -> None:
    """What a schema cannot see: names that fit together, and every process once."""
    names = [(document["kind"], document["metadata"]["name"]) for document in documents]
    assert len(names) == len(set(names))
    for _, name in names:
        assert re.fullmatch(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", name)
    of_kind = {
        kind: {d["metadata"]["name"]: d for d in documents if d["kind"] == kind}
        for kind in ("Job", "Service", "PersistentVolumeClaim", "ConfigMap")
    }
    containers: list[str] = []
    for job in of_kind["Job"].values():
        template = job["spec"]["template"]
        pod = template["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for volume in volumes.values():
            if "persistentVolumeClaim" in volume:
                claim = volume["persistentVolumeClaim"]["claimName"]
                assert claim in of_kind["PersistentVolumeClaim"]
            if "configMap" in volume:
                assert volume["configMap"]["name"] in of_kind["ConfigMap"]
        for container in pod["containers"]:
            containers.append(container["name"])
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


@pytest.mark.parametrize(
    ("name", "told"),
    [("hybrid", "gives a GPU to one container"), ("host network", "cluster.network = host")],
)
def test_what_kubernetes_cannot_do_is_refused(name: str, told: str) -> None:
    plan = PLANS[name]
    with pytest.raises(UsageError, match=told):
        render(plan, "kubernetes")


# -- SLURM ----------------------------------------------------------------------------------------

FAKE_SRUN = """\
#!/bin/sh
# Notes what it was asked for, and fails twice for the generator.
printf '%s\\n' "$*" >> "$CALLS"
case "$*" in
    *"umbra generator"*) [ "$(grep -c 'umbra generator' "$CALLS")" -gt 2 ] || exit 5 ;;
    *"umbra trainer"*) exit "${TRAINER_EXIT:-0}" ;;
esac
"""


@pytest.mark.parametrize("code", [0, 2, 7])
def test_the_script_starts_every_step_and_ends_as_the_trainer(tmp_path: Path, code: int) -> None:
    plan = plan_of(2, 1, overrides=(f"run.dir={tmp_path}/runs",))
    text = render(plan, "slurm", out=tmp_path)["run.sbatch"]
    script, srun, calls = tmp_path / "run.sbatch", tmp_path / "srun", tmp_path / "calls"
    script.write_text(text, encoding="utf-8")
    srun.write_text(FAKE_SRUN, encoding="utf-8")
    srun.chmod(0o755)
    (tmp_path / "sleep").symlink_to("/bin/true")  # between restarts
    environ = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "CALLS": str(calls),
        "TRAINER_EXIT": str(code),
    }
    done = subprocess.run(["bash", script], env=environ, timeout=seconds(30), check=False)
    assert done.returncode == code
    lines = calls.read_text(encoding="utf-8").splitlines()
    started = {line.split("--name ")[1].split()[0] for line in lines}
    assert started <= {process.name for process in plan.processes}
    if code == 0:  # a failure of the trainer ends the others at once
        assert started == {process.name for process in plan.processes}
        assert sum("umbra generator" in line for line in lines) == 3
    (trainer,) = [line for line in lines if "umbra trainer" in line]
    assert "--nodelist=a" in trainer
    assert "CUDA_VISIBLE_DEVICES=0,1 umbra trainer" in trainer


@plans
def test_scripts_are_valid_shell_and_name_all_nodes(plan: Plan, tmp_path: Path) -> None:
    text = render(plan, "slurm", out=tmp_path)["run.sbatch"]
    checked = subprocess.run(
        ["bash", "-n"], input=text, text=True, timeout=seconds(30), check=False
    )
    assert checked.returncode == 0
    nodes = [node for node in plan.nodes if plan.on(node)]
    used = [node.name for node in nodes]
    assert f"#SBATCH --nodes={len(used)}\n#SBATCH --nodelist={','.join(used)}\n" in text
    counts = {node.gpus for node in nodes}
    same = len(counts) == 1 and counts != {0}  # else it is for the user to say how to ask for them
    assert (f"#SBATCH --gpus-per-node={max(counts)}\n" in text) == same
    assert ("gpus-per-node" in text) == same
