"""A plan as one compose file and one environment file per node."""

from __future__ import annotations

import ipaddress
from typing import Any

from umbra.deploy.cluster import invocation
from umbra.deploy.cluster.cluster_file import Node
from umbra.deploy.cluster.invocation import Paths, key_files
from umbra.deploy.cluster.plan import Plan, Process
from umbra.deploy.files.formats import to_yaml

ROOT = "/srv/umbra"
CONFIG_FILE = "run.toml"
ENVIRONMENT_FILE = "umbra.env"
KEYS_FOLDER = "keys"
GRACE = "40s"  # a trainer may have to end its step
START_PERIOD = "600s"  # large models load for minutes
# Taken from the shell that starts the containers, if they are set there: no secret is in a plan.
HUB_VARIABLES = ("HF_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE")
LOGGING = {"driver": "json-file", "options": {"max-size": "50m", "max-file": "4"}}


def container_paths(plan: Plan, modules: str, *, keys: bool) -> Paths:
    """Return where the files of a run are in every container."""
    return Paths(
        config=f"{ROOT}/{CONFIG_FILE}",
        results=f"{ROOT}/results/{plan.run_id}",
        store=f"{ROOT}/store/{plan.run_id}",
        keys=f"{ROOT}/{KEYS_FOLDER}" if keys else "",
        modules=modules,
        cache=f"{ROOT}/cache",
    )


def compose_file(plan: Plan, node: Node, paths: Paths) -> str:
    processes = plan.on(node)
    volumes: dict[str, Any] = {"results": {}, "shm": _shared_memory(plan)}
    if any(process.task == "buffer" for process in processes):
        volumes["store"] = {}
    if any(invocation.fetches(plan, process) for process in processes):
        volumes["cache"] = {}
    tree: dict[str, Any] = {
        "name": f"umbra-{node.name.replace('.', '-')}",
        "services": {p.name: _service(plan, p, processes, paths) for p in processes},
        "volumes": volumes,
    }
    if paths.keys:
        names = sorted({name for process in processes for name in key_files(process)})
        tree["secrets"] = {name: {"file": f"./{KEYS_FOLDER}/{name}"} for name in names}
    return to_yaml(tree)


def environment_file(plan: Plan, paths: Paths) -> str:
    variables = invocation.environment(plan, paths)
    return "".join(f"{name}={value}\n" for name, value in variables.items())


def _service(plan: Plan, process: Process, beside: list[Process], paths: Paths) -> dict[str, Any]:
    service: dict[str, Any] = {
        "image": invocation.image(plan, process),
        "command": invocation.command(plan, process, paths),
        "env_file": [ENVIRONMENT_FILE],
        "user": plan.cluster.user,
        "init": True,
        # Not `unless-stopped`, which would run processes again that are done.
        "restart": f"on-failure:{invocation.restarts(plan, process)}",
        "stop_grace_period": GRACE,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges=true"],
        "healthcheck": {
            "test": ["CMD", "umbra", *invocation.health(plan, process)],
            "interval": "15s",
            "timeout": "10s",
            "retries": 4,
            "start_period": START_PERIOD,
        },
        "logging": LOGGING,
        "volumes": _volumes(plan, process, paths),
    }
    ports = invocation.ports(plan, process)
    if invocation.on_host_network(plan, process):
        service["network_mode"] = "host"
    else:
        service["hostname"] = process.node.name  # by which `umbra drain --node` finds it
        if ports:
            interface = _interface(process.node)
            service["ports"] = [
                {**interface, "target": port, "published": str(port), "protocol": "tcp"}
                for port in ports
            ]
    if process.task != "buffer" and any(other.task == "buffer" for other in beside):
        service["depends_on"] = {"buffer": {"condition": "service_healthy"}}
    if paths.keys:
        service["secrets"] = [
            {"source": name, "target": f"{paths.keys}/{name}"} for name in key_files(process)
        ]
    if invocation.fetches(plan, process):
        service["environment"] = list(HUB_VARIABLES)
    if resources := _resources(plan, process):
        service["deploy"] = {"resources": resources}
    return service


def _interface(node: Node) -> dict[str, Any]:
    """Return where ports are published: the node's address alone, if it is a number."""
    try:
        return {"host_ip": str(ipaddress.ip_address(node.address))}
    except ValueError:
        return {}


def _resources(plan: Plan, process: Process) -> dict[str, Any]:
    limits: dict[str, Any] = {}
    if (memory := invocation.memory_gib(plan, process)) is not None:
        limits["memory"] = f"{round(memory * 1024)}m"
    if (cpus := plan.cluster.cpus.get(process.task)) is not None:
        limits["cpus"] = f"{cpus:g}"
    resources: dict[str, Any] = {"limits": limits} if limits else {}
    if process.gpus:
        device = {
            "driver": "nvidia",
            "device_ids": [str(gpu) for gpu in process.gpus],
            "capabilities": ["gpu"],
        }
        resources["reservations"] = {"devices": [device]}
    return resources


def _volumes(plan: Plan, process: Process, paths: Paths) -> list[dict[str, Any]]:
    volumes = [_bind(f"./{CONFIG_FILE}", paths.config)]
    volumes += [_bind(path, path) for path in invocation.inputs(plan, process, paths)]
    volumes.append({"type": "volume", "source": "results", "target": f"{ROOT}/results"})
    if process.task == "buffer":
        volumes.append({"type": "volume", "source": "store", "target": f"{ROOT}/store"})
    else:
        # The hub's versions: trainer, hub and generators of a node see the same memory.
        volumes.append({"type": "volume", "source": "shm", "target": "/dev/shm"})
    if invocation.fetches(plan, process):
        volumes.append({"type": "volume", "source": "cache", "target": paths.cache})
    return volumes


def _bind(source: str, target: str) -> dict[str, Any]:
    return {
        "type": "bind",
        "source": source,
        "target": target,
        "read_only": True,
        "bind": {"create_host_path": False},
    }


def _shared_memory(plan: Plan) -> dict[str, Any]:
    user, group = plan.cluster.owner
    options = f"size={plan.cluster.shm_gib}g,uid={user},gid={group},mode=0700"
    return {"driver_opts": {"type": "tmpfs", "device": "tmpfs", "o": options}}
