"""A plan as Kubernetes manifests: one Job per node, whose pod has all processes of that node."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec

from umbra.deploy.cluster import invocation
from umbra.deploy.cluster.cluster_file import Node
from umbra.deploy.cluster.compose import CONFIG_FILE, ROOT
from umbra.deploy.cluster.invocation import KEYS, Paths, key_files
from umbra.deploy.cluster.plan import Plan, Process
from umbra.deploy.cluster.yaml import to_yaml
from umbra.proto.errors import UsageError

STORAGE = "100Gi"  # of each claim, until the user says otherwise
RESTARTS = 20  # of all containers of a pod together
GRACE_S = 40
KEY_MODE = 0o440  # for the group of the pod


def keys_secret(plan: Plan) -> str:
    """The name of the Secret that holds the run's keys, which is made by hand."""
    return _name(plan, "keys")


def manifests(plan: Plan, paths: Paths, config: str) -> str:
    """All manifests of the run; `config` is the text of its configuration.

    Raises:
        UsageError: processes share a GPU, or use the host's network.
    """
    if plan.shares_gpus():
        raise UsageError(
            "Kubernetes gives a GPU to one container only, and a group of this plan shares its "
            "GPUs among several tasks: give each task a group of its own, or use another launcher"
        )
    if plan.cluster.network == "host":
        raise UsageError("cluster.network = host is not rendered for Kubernetes: use bridge")
    addressed = _with_service_names(plan)
    labels = {"app.kubernetes.io/name": "umbra", "app.kubernetes.io/instance": plan.run_id}
    documents: list[dict[str, Any]] = [
        _object("v1", "ConfigMap", _name(plan, "config"), labels) | {"data": {CONFIG_FILE: config}}
    ]
    for node in addressed.nodes:
        if addressed.on(node):
            documents += _of_node(addressed, node, paths, labels)
    return to_yaml(*documents)


def _with_service_names(plan: Plan) -> Plan:
    """The plan with each node under the name of its Service."""

    def renamed(node: Node) -> Node:
        return msgspec.structs.replace(node, address=_name(plan, node.name))

    processes = tuple(replace(p, node=renamed(p.node)) for p in plan.processes)
    return replace(plan, nodes=tuple(map(renamed, plan.nodes)), processes=processes)


def _of_node(plan: Plan, node: Node, paths: Paths, labels: dict[str, str]) -> list[dict[str, Any]]:
    name, processes = node.address, plan.on(node)
    own = {**labels, "umbra/node": node.name}
    ports = [port for process in processes for port in invocation.ports(plan, process)]
    documents: list[dict[str, Any]] = []
    if ports:
        service: dict[str, Any] = {
            "clusterIP": "None",  # the name leads straight to the pod
            "publishNotReadyAddresses": True,
            "selector": own,
            "ports": [{"name": f"port-{port}", "port": port} for port in ports],
        }
        documents.append(_object("v1", "Service", name, own) | {"spec": service})
    claims = ["results"] + (["store"] if any(p.task == "buffer" for p in processes) else [])
    for claim in claims:
        storage = {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": STORAGE}},
        }
        claimed = _object("v1", "PersistentVolumeClaim", f"{name}-{claim}", own)
        documents.append(claimed | {"spec": storage})
    pod = {
        "metadata": {"labels": own},
        "spec": {
            "restartPolicy": "OnFailure",
            "nodeSelector": {"kubernetes.io/hostname": node.name},
            "terminationGracePeriodSeconds": GRACE_S,
            "automountServiceAccountToken": False,
            "securityContext": _pod_security(plan),
            "containers": [_container(plan, p, paths) for p in processes],
            "volumes": _volumes(plan, processes, paths, name, claims),
        },
    }
    job = {"backoffLimit": RESTARTS, "template": pod}
    return [*documents, _object("batch/v1", "Job", name, own) | {"spec": job}]


def _container(plan: Plan, process: Process, paths: Paths) -> dict[str, Any]:
    variables = invocation.environment(plan, paths)
    container: dict[str, Any] = {
        "name": process.name,
        "image": invocation.image(plan, process),
        "args": invocation.command(plan, process, paths),
        "env": [{"name": name, "value": value} for name, value in variables.items()],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        "readinessProbe": {
            "exec": {"command": ["umbra", *invocation.health(plan, process)]},
            "periodSeconds": 15,
            "timeoutSeconds": 10,
        },
        "volumeMounts": _mounts(plan, process, paths),
    }
    if process.gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": len(process.gpus)}}
    ports = invocation.ports(plan, process)
    if ports:
        container["ports"] = [{"containerPort": port} for port in ports]
    return container


def _mounts(plan: Plan, process: Process, paths: Paths) -> list[dict[str, Any]]:
    mounts = [
        {"name": "config", "mountPath": paths.config, "subPath": CONFIG_FILE, "readOnly": True},
        {"name": "results", "mountPath": f"{ROOT}/results"},
    ]
    if process.task == "buffer":
        mounts.append({"name": "store", "mountPath": f"{ROOT}/store"})
    else:
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    if paths.keys:
        name = _keys_volume(process)
        mounts.append({"name": name, "mountPath": paths.keys, "readOnly": True})
    all_inputs = _inputs(plan, plan.on(process.node), paths)
    for path in invocation.inputs(plan, process, paths):
        name = f"input-{all_inputs.index(path)}"
        mounts.append({"name": name, "mountPath": path, "readOnly": True})
    return mounts


def _volumes(
    plan: Plan, processes: list[Process], paths: Paths, node: str, claims: list[str]
) -> list[dict[str, Any]]:
    memory = {"medium": "Memory", "sizeLimit": f"{plan.cluster.shm_gib}Gi"}
    return [
        {"name": "config", "configMap": {"name": _name(plan, "config")}},
        {"name": "shm", "emptyDir": memory},
        *(
            {"name": claim, "persistentVolumeClaim": {"claimName": f"{node}-{claim}"}}
            for claim in claims
        ),
        *(
            {"name": f"input-{index}", "hostPath": {"path": path}}
            for index, path in enumerate(_inputs(plan, processes, paths))
        ),
        *(_keys(plan, processes) if paths.keys else ()),
    ]


def _keys(plan: Plan, processes: list[Process]) -> Iterator[dict[str, Any]]:
    """A volume per role on the node, with the files that it needs of the run's keys."""
    for name, process in {_keys_volume(process): process for process in processes}.items():
        items = [{"key": file, "path": file} for file in key_files(process)]
        secret = {"secretName": keys_secret(plan), "defaultMode": KEY_MODE, "items": items}
        yield {"name": name, "secret": secret}


def _keys_volume(process: Process) -> str:
    return f"keys-{KEYS[process.task].replace('_', '-')}"


def _inputs(plan: Plan, processes: list[Process], paths: Paths) -> list[str]:
    return sorted({path for p in processes for path in invocation.inputs(plan, p, paths)})


def _pod_security(plan: Plan) -> dict[str, Any]:
    user, _, group = plan.cluster.user.partition(":")
    number = int(group or user)
    return {
        "runAsNonRoot": True,
        "runAsUser": int(user),
        "runAsGroup": number,
        "fsGroup": number,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _object(version: str, kind: str, name: str, labels: dict[str, str]) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "labels": labels}}


def _name(plan: Plan, part: str) -> str:
    """A name that Kubernetes takes: lower case, no more than 63 characters."""
    run = re.sub(r"[^a-z0-9]+", "-", plan.run_id.lower()).strip("-")
    return f"{run[: 62 - len(part)].rstrip('-')}-{part}"
