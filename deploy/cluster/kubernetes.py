"""A plan as Kubernetes manifests: one Job per node, whose pod has all processes of that node."""

from __future__ import annotations

import hashlib
import re
from typing import Any

from umbra.deploy.cluster.cluster_file import Node
from umbra.deploy.cluster.launch import (
    CONFIG_FILE,
    RESTARTS,
    Launch,
    Paths,
    environment,
    launches,
)
from umbra.deploy.cluster.plan import Plan
from umbra.deploy.files.formats import to_yaml
from umbra.proto.errors import UsageError

GRACE_S = 40
KEY_MODE = 0o440  # for the group of the pod
KEPT_S = 86_400  # until Kubernetes removes a Job that has ended
LONGEST = 63  # characters of a label, and of the names that become host names


def keys_command(plan: Plan, keys: str) -> str:
    """Return the command that makes the Secret of the folder `keys`."""
    namespace = plan.cluster.kubernetes.namespace
    where = f" --namespace={namespace}" if namespace else ""
    return f"kubectl create secret generic {_name(plan, 'keys')}{where} --from-file={keys}"


def manifests(plan: Plan, paths: Paths, config: str) -> str:
    """Return all manifests of the run; `config` is the text of its configuration.

    Raises:
        UsageError: processes share a GPU, or use the host's network, or a file that they need is
            not in the claim.
    """
    if plan.shares_gpus():
        raise UsageError(
            "Kubernetes gives a GPU to one container only, and a group of this plan shares its "
            "GPUs among several tasks: give each task a group of its own, or use another launcher"
        )
    if plan.cluster.network == "host":
        raise UsageError("cluster.network = host is not rendered for Kubernetes: use bridge")
    plan = plan.readdressed(lambda node: _name(plan, node.name))
    labels = {"app.kubernetes.io/name": "umbra", "app.kubernetes.io/instance": _label(plan.run_id)}
    shared = _object("v1", "ConfigMap", _name(plan, "config"), labels)
    documents = [shared | {"data": {CONFIG_FILE: config}}]
    launched = launches(plan, paths)
    for node in plan.nodes:
        if own := [one for one in launched if one.process.node == node]:
            documents += _of_node(plan, node, own, paths, labels)
    if namespace := plan.cluster.kubernetes.namespace:
        for document in documents:
            document["metadata"]["namespace"] = namespace
    return to_yaml(*documents)


def _of_node(
    plan: Plan, node: Node, launched: list[Launch], paths: Paths, labels: dict[str, str]
) -> list[dict[str, Any]]:
    spec, (user, group) = plan.cluster.kubernetes, plan.cluster.owner
    own = {**labels, "umbra/node": node.name}
    documents: list[dict[str, Any]] = []
    if ports := [port for one in launched for port in one.ports]:
        service: dict[str, Any] = {
            "clusterIP": "None",  # the name leads straight to the pod
            "publishNotReadyAddresses": True,
            "selector": own,
            "ports": [{"name": f"port-{port}", "port": port} for port in ports],
        }
        documents.append(_object("v1", "Service", node.address, own) | {"spec": service})
    volumes: list[dict[str, Any]] = [
        {"name": "config", "configMap": {"name": _name(plan, "config")}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{plan.cluster.shm_gib}Gi"}},
    ]
    for volume in sorted({name for one in launched for name in one.volumes} - {"shm"}):
        claim = _label(f"{node.address}-{volume}")
        storage: dict[str, Any] = {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": spec.storage}},
        }
        if spec.storage_class:
            storage["storageClassName"] = spec.storage_class
        documents.append(_object("v1", "PersistentVolumeClaim", claim, own) | {"spec": storage})
        volumes.append({"name": volume, "persistentVolumeClaim": {"claimName": claim}})
    variables = environment(plan, paths)
    inputs = sorted({path for one in launched for path in one.inputs})
    if not spec.inputs_claim:
        volumes += [
            {"name": f"input-{i}", "hostPath": {"path": path}} for i, path in enumerate(inputs)
        ]
    elif inputs:
        claimed = {"claimName": spec.inputs_claim, "readOnly": True}
        volumes.append({"name": "inputs", "persistentVolumeClaim": claimed})
    for one in {one.role: one for one in launched}.values() if paths.keys else ():
        secret = {"secretName": _name(plan, "keys"), "defaultMode": KEY_MODE}
        items = [{"key": file, "path": file} for file in one.key_files]
        volumes.append({"name": _keys_volume(one), "secret": {**secret, "items": items}})
    pod: dict[str, Any] = {
        "restartPolicy": "OnFailure",  # of each container by itself; a Job counts the restarts
        "hostname": _label(node.name),  # by which `umbra drain --node` finds its processes
        "nodeSelector": {"kubernetes.io/hostname": node.name},
        "terminationGracePeriodSeconds": GRACE_S,
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": user,
            "runAsGroup": group,
            "fsGroup": group,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(plan, one, paths, inputs, variables) for one in launched],
        "volumes": volumes,
    }
    if spec.tolerations:
        pod["tolerations"] = spec.tolerations
    job = {
        "backoffLimit": RESTARTS,
        "ttlSecondsAfterFinished": KEPT_S,
        "template": {"metadata": {"labels": own}, "spec": pod},
    }
    return [*documents, _object("batch/v1", "Job", node.address, own) | {"spec": job}]


def _container(
    plan: Plan, one: Launch, paths: Paths, inputs: list[str], variables: dict[str, str]
) -> dict[str, Any]:
    env: list[dict[str, Any]] = [{"name": k, "value": v} for k, v in variables.items()]
    if one.fetches:  # an optional Secret, whose token reads private models
        token = {"name": _name(plan, "hub"), "key": "HF_TOKEN", "optional": True}
        env.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": token}})
    mounts: list[dict[str, Any]] = [
        {"name": "config", "mountPath": paths.config, "subPath": CONFIG_FILE, "readOnly": True},
        *({"name": name, "mountPath": path} for name, path in one.volumes.items()),
    ]
    if paths.keys:
        mounts.append({"name": _keys_volume(one), "mountPath": paths.keys, "readOnly": True})
    for path in one.inputs:
        mount = {"name": f"input-{inputs.index(path)}"}
        if plan.cluster.kubernetes.inputs_claim:
            inside = _in_claim(plan, path)
            mount = {"name": "inputs", **({"subPath": inside} if inside else {})}
        mounts.append({**mount, "mountPath": path, "readOnly": True})
    container: dict[str, Any] = {
        "name": _label(one.process.name),
        "image": one.image,
        "args": one.command,
        "env": env,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "readinessProbe": {
            "exec": {"command": ["umbra", *one.health]},
            "periodSeconds": 15,
            "timeoutSeconds": 10,
        },
        "volumeMounts": mounts,
    }
    amounts: dict[str, Any] = {}
    if one.memory_mib is not None:
        amounts["memory"] = f"{one.memory_mib}Mi"
    if one.cpus is not None:
        amounts["cpu"] = f"{round(one.cpus * 1000)}m"
    if one.process.gpus:
        amounts["nvidia.com/gpu"] = len(one.process.gpus)
    if amounts:  # requests equal to limits: the scheduler then keeps them free
        container["resources"] = {"requests": amounts, "limits": amounts}
    if one.ports:
        container["ports"] = [{"containerPort": port} for port in one.ports]
    return container


def _in_claim(plan: Plan, path: str) -> str:
    """Return the place of `path` in the claim for inputs; empty is its top."""
    root = plan.cluster.kubernetes.inputs_root.rstrip("/")
    if path != root and not path.startswith(f"{root}/"):
        raise UsageError(
            f"{path} is not below cluster.kubernetes.inputs_root = {root or '/'}, so it is not in "
            f"the claim {plan.cluster.kubernetes.inputs_claim}: put it there, or change the root"
        )
    return path.removeprefix(root).strip("/")


def _keys_volume(one: Launch) -> str:
    return f"keys-{one.role.replace('_', '-')}"


def _object(version: str, kind: str, name: str, labels: dict[str, str]) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "labels": labels}}


def _name(plan: Plan, part: str) -> str:
    return _label(f"{plan.run_id}-{part}")


def _label(text: str) -> str:
    """Return `text` by the strictest of Kubernetes' rules for names (RFC 1035).

    Lower case letters, digits and dashes, a letter first, at most 63 characters; a longer text
    ends with a part of its hash, so that names stay distinct.
    """
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if not name[:1].isalpha():
        name = f"umbra-{name}".rstrip("-")
    if len(name) > LONGEST:
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        name = f"{name[: LONGEST - 9].rstrip('-')}-{digest}"
    return name
