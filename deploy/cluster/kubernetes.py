"""A plan as Kubernetes manifests: one Job per node, whose pod has all processes of that node."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from umbra.deploy.cluster import invocation
from umbra.deploy.cluster.cluster_file import Node
from umbra.deploy.cluster.compose import CONFIG_FILE, ROOT
from umbra.deploy.cluster.invocation import KEYS, Paths, key_files
from umbra.deploy.cluster.plan import Plan, Process
from umbra.deploy.files.formats import to_yaml
from umbra.proto.errors import UsageError

GRACE_S = 40
KEY_MODE = 0o440  # for the group of the pod
LONGEST = 63  # characters of a label, and of the names that become host names


def keys_secret(plan: Plan) -> str:
    """Return the name of the Secret with the run's keys, which is made by hand."""
    return _name(plan, "keys")


def keys_command(plan: Plan, keys: str) -> str:
    """Return the command that makes that Secret of the folder `keys`."""
    namespace = plan.cluster.kubernetes.namespace
    where = f" --namespace={namespace}" if namespace else ""
    return f"kubectl create secret generic {keys_secret(plan)}{where} --from-file={keys}"


def manifests(plan: Plan, paths: Paths, config: str) -> str:
    """Return all manifests of the run.

    `config` is the text of its configuration.

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
    addressed = plan.readdressed(lambda node: _name(plan, node.name))
    labels = {"app.kubernetes.io/name": "umbra", "app.kubernetes.io/instance": _label(plan.run_id)}
    shared = _object("v1", "ConfigMap", _name(plan, "config"), labels)
    documents = [shared | {"data": {CONFIG_FILE: config}}]
    for node in addressed.nodes:
        if addressed.on(node):
            documents += _of_node(addressed, node, paths, labels)
    if namespace := plan.cluster.kubernetes.namespace:
        for document in documents:
            document["metadata"]["namespace"] = namespace
    return to_yaml(*documents)


def _of_node(plan: Plan, node: Node, paths: Paths, labels: dict[str, str]) -> list[dict[str, Any]]:
    spec = plan.cluster.kubernetes
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
    for claim in _claims(plan, processes):
        storage: dict[str, Any] = {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": spec.storage}},
        }
        if spec.storage_class:
            storage["storageClassName"] = spec.storage_class
        claimed = _object("v1", "PersistentVolumeClaim", _claim_name(node, claim), own)
        documents.append(claimed | {"spec": storage})
    pod: dict[str, Any] = {
        "restartPolicy": "OnFailure",  # of each container by itself; a Job counts the restarts
        "hostname": _label(node.name),  # by which `umbra drain --node` finds its processes
        "nodeSelector": {"kubernetes.io/hostname": node.name},
        "terminationGracePeriodSeconds": GRACE_S,
        "automountServiceAccountToken": False,
        "securityContext": _pod_security(plan),
        "containers": [_container(plan, process, paths) for process in processes],
        "volumes": _volumes(plan, processes, paths, node),
    }
    if spec.tolerations:
        pod["tolerations"] = [msgspec.to_builtins(one) for one in spec.tolerations]
    job = {
        "backoffLimit": invocation.RESTARTS,
        "ttlSecondsAfterFinished": spec.keep_finished_s,
        "template": {"metadata": {"labels": own}, "spec": pod},
    }
    return [*documents, _object("batch/v1", "Job", name, own) | {"spec": job}]


def _container(plan: Plan, process: Process, paths: Paths) -> dict[str, Any]:
    variables = invocation.environment(plan, paths)
    container: dict[str, Any] = {
        "name": _label(process.name),
        "image": invocation.image(plan, process),
        "imagePullPolicy": plan.cluster.kubernetes.image_pull_policy,
        "args": invocation.command(plan, process, paths),
        "env": [
            *({"name": name, "value": value} for name, value in variables.items()),
            *([_token(plan)] if invocation.fetches(plan, process) else []),
        ],
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
    if resources := _resources(plan, process):
        container["resources"] = resources
    ports = invocation.ports(plan, process)
    if ports:
        container["ports"] = [{"containerPort": port} for port in ports]
    return container


def _resources(plan: Plan, process: Process) -> dict[str, Any]:
    """Return requests equal to limits: the scheduler then keeps them free."""
    amounts: dict[str, Any] = {}
    if (memory := invocation.memory_gib(plan, process)) is not None:
        amounts["memory"] = f"{round(memory * 1024)}Mi"
    if (cpus := plan.cluster.cpus.get(process.task)) is not None:
        amounts["cpu"] = f"{round(cpus * 1000)}m"
    if process.gpus:
        amounts["nvidia.com/gpu"] = len(process.gpus)
    return {"requests": amounts, "limits": amounts} if amounts else {}


def _mounts(plan: Plan, process: Process, paths: Paths) -> list[dict[str, Any]]:
    mounts: list[dict[str, Any]] = [
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
    if invocation.fetches(plan, process):
        mounts.append({"name": "cache", "mountPath": paths.cache})
    claim = plan.cluster.kubernetes.inputs_claim
    all_inputs = _inputs(plan, plan.on(process.node), paths)
    for path in invocation.inputs(plan, process, paths):
        mount = {"name": "inputs" if claim else f"input-{all_inputs.index(path)}"}
        if claim and (inside := _in_claim(plan, path)):
            mount["subPath"] = inside
        mounts.append({**mount, "mountPath": path, "readOnly": True})
    return mounts


def _in_claim(plan: Plan, path: str) -> str:
    """Return the place of `path` in the claim for inputs; empty is its top."""
    root = plan.cluster.kubernetes.inputs_root.rstrip("/")
    if path != root and not path.startswith(f"{root}/"):
        raise UsageError(
            f"{path} is not below cluster.kubernetes.inputs_root = {root or '/'}, so it is not in "
            f"the claim {plan.cluster.kubernetes.inputs_claim}: put it there, or change the root"
        )
    return path.removeprefix(root).strip("/")


def _volumes(
    plan: Plan, processes: list[Process], paths: Paths, node: Node
) -> list[dict[str, Any]]:
    memory = {"medium": "Memory", "sizeLimit": f"{plan.cluster.shm_gib}Gi"}
    volumes: list[dict[str, Any]] = [
        {"name": "config", "configMap": {"name": _name(plan, "config")}},
        {"name": "shm", "emptyDir": memory},
    ]
    for claim in _claims(plan, processes):
        source = {"claimName": _claim_name(node, claim)}
        volumes.append({"name": claim, "persistentVolumeClaim": source})
    inputs = _inputs(plan, processes, paths)
    if name := plan.cluster.kubernetes.inputs_claim:
        source = {"claimName": name, "readOnly": True}
        if inputs:
            volumes.append({"name": "inputs", "persistentVolumeClaim": source})
    else:
        for index, path in enumerate(inputs):
            volumes.append({"name": f"input-{index}", "hostPath": {"path": path}})
    return [*volumes, *(_keys(plan, processes) if paths.keys else ())]


def _claims(plan: Plan, processes: list[Process]) -> list[str]:
    stores = any(process.task == "buffer" for process in processes)
    caches = any(invocation.fetches(plan, process) for process in processes)
    return ["results", *(["store"] if stores else []), *(["cache"] if caches else [])]


def hub_secret(plan: Plan) -> str:
    """Return the name of the optional Secret whose HF_TOKEN reads private models."""
    return _name(plan, "hub")


def _token(plan: Plan) -> dict[str, Any]:
    secret = {"name": hub_secret(plan), "key": "HF_TOKEN", "optional": True}
    return {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": secret}}


def _claim_name(node: Node, claim: str) -> str:
    return _label(f"{node.address}-{claim}")


def _keys(plan: Plan, processes: list[Process]) -> Iterator[dict[str, Any]]:
    """Yield a volume per role on the node, with the key files that it needs."""
    for name, process in {_keys_volume(process): process for process in processes}.items():
        items = [{"key": file, "path": file} for file in key_files(process)]
        secret = {"secretName": keys_secret(plan), "defaultMode": KEY_MODE, "items": items}
        yield {"name": name, "secret": secret}


def _keys_volume(process: Process) -> str:
    return f"keys-{KEYS[process.task].replace('_', '-')}"


def _inputs(plan: Plan, processes: list[Process], paths: Paths) -> list[str]:
    return sorted({path for p in processes for path in invocation.inputs(plan, p, paths)})


def _pod_security(plan: Plan) -> dict[str, Any]:
    user, group = plan.cluster.owner
    return {
        "runAsNonRoot": True,
        "runAsUser": user,
        "runAsGroup": group,
        "fsGroup": group,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _object(version: str, kind: str, name: str, labels: dict[str, str]) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "labels": labels}}


def _name(plan: Plan, part: str) -> str:
    return _label(f"{plan.run_id}-{part}")


def _label(text: str) -> str:
    """`text` by the strictest of Kubernetes' rules for names (RFC 1035).

    Lower case letters, digits and dashes, a letter first, at most 63 characters; what is too long
    ends with a part of its hash, so that it is still its own.
    """
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if not name[:1].isalpha():
        name = f"umbra-{name}".rstrip("-")
    if len(name) > LONGEST:
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        name = f"{name[: LONGEST - 9].rstrip('-')}-{digest}"
    return name
