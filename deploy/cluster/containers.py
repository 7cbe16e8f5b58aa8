"""A plan for containers: compose files for each node, or Kubernetes manifests.

Kubernetes gets a Job per node, whose pod has all processes of that node.
"""

from __future__ import annotations

import hashlib
import ipaddress
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import yaml

from umbra.deploy.cluster.cluster_file import Node
from umbra.deploy.cluster.launch import CONFIG_FILE, RESTARTS, Launch, Paths, environment, launches
from umbra.deploy.cluster.plan import Plan
from umbra.proto.errors import UsageError

COMPOSE_FILE = "compose.yaml"
ENVIRONMENT_FILE = "umbra.env"
KEYS_FOLDER = "keys"
# Taken from the shell that starts the containers, if they are set there: no secret is in a plan.
HUB_VARIABLES = ["HF_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE"]
Tree = dict[str, Any]


def compose_files(plan: Plan, paths: Paths, config: str) -> dict[str, str]:
    """Return the texts of all nodes by path; `config` is that of the run's configuration."""
    variables = "".join(f"{k}={v}\n" for k, v in environment(plan, paths).items())
    user, group = plan.cluster.owner
    memory = f"size={plan.cluster.shm_gib}g,uid={user},gid={group},mode=0700"
    shm = {"driver_opts": {"type": "tmpfs", "device": "tmpfs", "o": memory}}
    files: dict[str, str] = {}
    for node, local in _by_node(plan, paths):
        volumes = sorted({name for launch in local for name in launch.volumes})
        tree: Tree = {
            "name": f"umbra-{node.name.replace('.', '-')}",
            "services": {each.process.name: _service(plan, each, local, paths) for each in local},
            "volumes": {name: shm if name == "shm" else {} for name in volumes},
        }
        if paths.keys:
            keys = sorted({name for launch in local for name in launch.key_files})
            tree["secrets"] = {name: {"file": f"./{KEYS_FOLDER}/{name}"} for name in keys}
        text = to_yaml(tree).replace("$", "$$")  # compose fills in variables
        texts = {COMPOSE_FILE: text, ENVIRONMENT_FILE: variables, CONFIG_FILE: config}
        files |= {f"{node.name}/{name}": text for name, text in texts.items()}
    return files


def _by_node(plan: Plan, paths: Paths) -> list[tuple[Node, list[Launch]]]:
    """Return the nodes that are used, with what starts there."""
    every = launches(plan, paths)
    nodes = ((node, [e for e in every if e.process.node == node]) for node in plan.nodes)
    return [(node, local) for node, local in nodes if local]


def _service(plan: Plan, launch: Launch, local: list[Launch], paths: Paths) -> Tree:
    node, published = launch.process.node, Tree()
    service: Tree = {
        "image": launch.image,
        "command": launch.command,
        "env_file": [ENVIRONMENT_FILE],
        "user": plan.cluster.user,
        "init": True,
        # Not `unless-stopped`, which would run processes again that are done.
        "restart": f"on-failure:{launch.restarts}",
        "stop_grace_period": f"{GRACE_S}s",
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges=true"],
        "healthcheck": {
            "test": ["CMD", "umbra", *launch.health],
            "interval": "15s",
            "timeout": "10s",
            "retries": 4,
            "start_period": "600s",  # large models load for minutes
        },
        "logging": {"driver": "json-file", "options": {"max-size": "50m", "max-file": "4"}},
        "volumes": [
            _bind(f"./{CONFIG_FILE}", paths.config),
            *(_bind(path, path) for path in launch.inputs),
            *({"type": "volume", "source": k, "target": v} for k, v in launch.volumes.items()),
        ],
    }
    if launch.host_network:
        service["network_mode"] = "host"
    else:
        service["hostname"] = node.name  # the host of its member in `umbra status`
        with suppress(ValueError):  # a number: the address alone, else all interfaces
            published["host_ip"] = str(ipaddress.ip_address(node.address))
        ports = (
            {"target": port, "published": str(port), "protocol": "tcp"} for port in launch.ports
        )
        service |= {"ports": [published | port for port in ports]} if launch.ports else {}
    if launch.role != "buffer" and any(other.role == "buffer" for other in local):
        service["depends_on"] = {"buffer": {"condition": "service_healthy"}}
    if paths.keys:
        files = ({"source": name, "target": f"{paths.keys}/{name}"} for name in launch.key_files)
        service["secrets"] = [*files]
    if "cache" in launch.volumes:
        service["environment"] = HUB_VARIABLES
    if ids := [str(gpu) for gpu in launch.process.gpus]:
        device = {"driver": "nvidia", "device_ids": ids, "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
    return service


def _bind(source: str, target: str) -> Tree:
    mount = {"type": "bind", "source": source, "target": target, "read_only": True}
    return {**mount, "bind": {"create_host_path": False}}


GRACE_S = 40  # a trainer may have to end its step
KEY_MODE = 0o440  # for the group of the pod
STORAGE = "100Gi"  # of each claim for results, store or cache
KEPT_S = 86_400  # until Kubernetes removes a Job that has ended
LONGEST = 63  # characters of a label, and of the names that become host names


def keys_command(plan: Plan, keys: str) -> str:
    """Return the command that makes the Secret of the folder `keys`."""
    return f"kubectl create secret generic {_name(plan, 'keys')} --from-file={keys}"


def manifests(plan: Plan, paths: Paths, config: str) -> str:
    """Return all manifests of the run; `config` is the text of its configuration.

    UsageError says that processes share a GPU or the host's network.
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
    documents = [_object("ConfigMap", _name(plan, "config"), labels, data={CONFIG_FILE: config})]
    for node, local in _by_node(plan, paths):
        documents += _node_documents(plan, node, local, paths, {**labels, "umbra/node": node.name})
    return to_yaml(*documents)


def _node_documents(
    plan: Plan, node: Node, local: list[Launch], paths: Paths, labels: dict[str, str]
) -> list[Tree]:
    user, group = plan.cluster.owner
    documents: list[Tree] = []
    if ports := [port for launch in local for port in launch.ports]:
        service: Tree = {
            "clusterIP": "None",  # the name leads straight to the pod
            "publishNotReadyAddresses": True,
            "selector": labels,
            "ports": [{"name": f"port-{port}", "port": port} for port in ports],
        }
        documents.append(_object("Service", node.address, labels, spec=service))
    volumes: list[Tree] = [
        {"name": "config", "configMap": {"name": _name(plan, "config")}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{plan.cluster.shm_gib}Gi"}},
    ]
    storage: Tree = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": STORAGE}},
    }
    for volume in sorted({name for launch in local for name in launch.volumes} - {"shm"}):
        claim = _label(f"{node.address}-{volume}")
        documents.append(_object("PersistentVolumeClaim", claim, labels, spec=storage))
        volumes.append({"name": volume, "persistentVolumeClaim": {"claimName": claim}})
    inputs = sorted({path for launch in local for path in launch.inputs})
    if not plan.cluster.inputs_claim:
        volumes += [
            {"name": f"input-{i}", "hostPath": {"path": path}} for i, path in enumerate(inputs)
        ]
    elif inputs:
        claimed = {"claimName": plan.cluster.inputs_claim, "readOnly": True}
        volumes.append({"name": "inputs", "persistentVolumeClaim": claimed})
    for launch in {launch.role: launch for launch in local}.values() if paths.keys else ():
        secret = {"secretName": _name(plan, "keys"), "defaultMode": KEY_MODE}
        items = [{"key": file, "path": file} for file in launch.key_files]
        volumes.append({"name": _keys_volume(launch), "secret": {**secret, "items": items}})
    pod: Tree = {
        "restartPolicy": "OnFailure",  # of each container by itself; a Job counts the restarts
        "hostname": _label(node.name),  # the host of its members
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
        "containers": [_container(plan, launch, paths, inputs) for launch in local],
        "volumes": volumes,
    }
    template = {"metadata": {"labels": labels}, "spec": pod}
    job = {"backoffLimit": RESTARTS, "ttlSecondsAfterFinished": KEPT_S, "template": template}
    return [*documents, _object("Job", node.address, labels, spec=job)]


def _container(plan: Plan, launch: Launch, paths: Paths, inputs: list[str]) -> Tree:
    env: list[Tree] = [{"name": k, "value": v} for k, v in environment(plan, paths).items()]
    if "cache" in launch.volumes:  # an optional Secret, whose token reads private models
        token = {"name": _name(plan, "hub"), "key": "HF_TOKEN", "optional": True}
        env.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": token}})
    mounts: list[Tree] = [
        {"name": "config", "mountPath": paths.config, "subPath": CONFIG_FILE, "readOnly": True},
        *({"name": name, "mountPath": path} for name, path in launch.volumes.items()),
    ]
    if paths.keys:
        mounts.append({"name": _keys_volume(launch), "mountPath": paths.keys, "readOnly": True})
    for path in launch.inputs:
        mount = {"name": f"input-{inputs.index(path)}"}
        if plan.cluster.inputs_claim:  # has files at the same paths, from its top on
            mount = {"name": "inputs", "subPath": path.strip("/")}
        mounts.append({**mount, "mountPath": path, "readOnly": True})
    container: Tree = {
        "name": _label(launch.process.name),
        "image": launch.image,
        "args": launch.command,
        "env": env,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "readinessProbe": {
            "exec": {"command": ["umbra", *launch.health]},
            "periodSeconds": 15,
            "timeoutSeconds": 10,
        },
        "volumeMounts": mounts,
    }
    if gpus := launch.process.gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": len(gpus)}}  # requests are equal
    if launch.ports:
        container["ports"] = [{"containerPort": port} for port in launch.ports]
    return container


def _keys_volume(launch: Launch) -> str:
    return f"keys-{launch.role.replace('_', '-')}"


def _object(kind: str, name: str, labels: dict[str, str], **content: Tree) -> Tree:
    version = "batch/v1" if kind == "Job" else "v1"
    metadata = {"name": name, "labels": labels}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **content}


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


class _Dumper(yaml.SafeDumper):
    """Quotes all text, and repeats what occurs twice instead of naming it.

    PyYAML itself leaves `1e3` and `y` bare, which compose and Kubernetes read as number and true.
    """

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def to_yaml(*documents: Mapping[str, Any]) -> str:
    """Return `documents` in block style, divided by `---`."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=math.inf)
