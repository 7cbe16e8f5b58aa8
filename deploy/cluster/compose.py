"""A plan as a compose file, an environment file and the run's configuration for each node."""

from __future__ import annotations

import ipaddress
from typing import Any

from umbra.deploy.cluster.cluster_file import Node
from umbra.deploy.cluster.launch import CONFIG_FILE, Launch, Paths, environment, launches
from umbra.deploy.cluster.plan import Plan
from umbra.deploy.files.formats import to_yaml

COMPOSE_FILE = "compose.yaml"
ENVIRONMENT_FILE = "umbra.env"
KEYS_FOLDER = "keys"
# Taken from the shell that starts the containers, if they are set there: no secret is in a plan.
HUB_VARIABLES = ["HF_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE"]


def compose_files(plan: Plan, paths: Paths, config: str) -> dict[str, str]:
    """Return the texts of all nodes by path; `config` is that of the run's configuration."""
    variables, launched = environment(plan, paths).items(), launches(plan, paths)
    files: dict[str, str] = {}
    for node in plan.nodes:
        if own := [one for one in launched if one.process.node == node]:
            files[f"{node.name}/{COMPOSE_FILE}"] = to_yaml(_compose(plan, node, own, paths))
            files[f"{node.name}/{ENVIRONMENT_FILE}"] = "".join(f"{k}={v}\n" for k, v in variables)
            files[f"{node.name}/{CONFIG_FILE}"] = config
    return files


def _compose(plan: Plan, node: Node, own: list[Launch], paths: Paths) -> dict[str, Any]:
    user, group = plan.cluster.owner
    memory = f"size={plan.cluster.shm_gib}g,uid={user},gid={group},mode=0700"
    shm = {"driver_opts": {"type": "tmpfs", "device": "tmpfs", "o": memory}}
    named = sorted({name for one in own for name in one.volumes})
    tree: dict[str, Any] = {
        "name": f"umbra-{node.name.replace('.', '-')}",
        "services": {one.process.name: _service(plan, one, own, paths) for one in own},
        "volumes": {name: shm if name == "shm" else {} for name in named},
    }
    if paths.keys:
        keys = sorted({name for one in own for name in one.key_files})
        tree["secrets"] = {name: {"file": f"./{KEYS_FOLDER}/{name}"} for name in keys}
    return tree


def _service(plan: Plan, one: Launch, beside: list[Launch], paths: Paths) -> dict[str, Any]:
    node, task = one.process.node, one.process.task
    service: dict[str, Any] = {
        "image": one.image,
        "command": one.command,
        "env_file": [ENVIRONMENT_FILE],
        "user": plan.cluster.user,
        "init": True,
        # Not `unless-stopped`, which would run processes again that are done.
        "restart": f"on-failure:{one.restarts}",
        "stop_grace_period": "40s",  # a trainer may have to end its step
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges=true"],
        "healthcheck": {
            "test": ["CMD", "umbra", *one.health],
            "interval": "15s",
            "timeout": "10s",
            "retries": 4,
            "start_period": "600s",  # large models load for minutes
        },
        "logging": {"driver": "json-file", "options": {"max-size": "50m", "max-file": "4"}},
        "volumes": [
            _bind(f"./{CONFIG_FILE}", paths.config),
            *(_bind(path, path) for path in one.inputs),
            *({"type": "volume", "source": k, "target": v} for k, v in one.volumes.items()),
        ],
    }
    if one.host_network:
        service["network_mode"] = "host"
    else:
        service["hostname"] = node.name  # by which `umbra drain --node` finds it
        if one.ports:
            service["ports"] = [
                {**_interface(node), "target": port, "published": str(port), "protocol": "tcp"}
                for port in one.ports
            ]
    if task != "buffer" and any(other.process.task == "buffer" for other in beside):
        service["depends_on"] = {"buffer": {"condition": "service_healthy"}}
    if paths.keys:
        service["secrets"] = [
            {"source": name, "target": f"{paths.keys}/{name}"} for name in one.key_files
        ]
    if one.fetches:
        service["environment"] = HUB_VARIABLES
    if resources := _resources(one):
        service["deploy"] = {"resources": resources}
    return service


def _interface(node: Node) -> dict[str, Any]:
    """Return where ports are published: the node's address alone, if it is a number."""
    try:
        return {"host_ip": str(ipaddress.ip_address(node.address))}
    except ValueError:
        return {}


def _resources(one: Launch) -> dict[str, Any]:
    limits: dict[str, str] = {}
    if one.memory_mib is not None:
        limits["memory"] = f"{one.memory_mib}m"
    if one.cpus is not None:
        limits["cpus"] = f"{one.cpus:g}"
    resources: dict[str, Any] = {"limits": limits} if limits else {}
    if ids := [str(gpu) for gpu in one.process.gpus]:
        device = {"driver": "nvidia", "device_ids": ids, "capabilities": ["gpu"]}
        resources["reservations"] = {"devices": [device]}
    return resources


def _bind(source: str, target: str) -> dict[str, Any]:
    found = {"type": "bind", "source": source, "target": target, "read_only": True}
    return {**found, "bind": {"create_host_path": False}}
