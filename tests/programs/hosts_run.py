"""A run with a trainer on two hosts, made of network namespaces; hosts are lost one after another.

    unshare --user --map-root-user --net --mount --uts --kill-child python hosts_run.py FOLDER JSON

FOLDER has `run.toml`. Host alpha has the buffer, the weight hub and node 0 of the trainer, beta
node 1 and its part hub, gamma and delta a generator each; each has its own /dev/shm and its own
folder for results. The JSON says which hosts there are (`hosts`), which of them have a relay
(`relays`), how long the whole may take (`limit_s`), and which are lost (`losses`), in this order:

    {"host": NAME, "steps": 3}                      lost after three more steps, for good
    {"host": NAME, "steps": 3, "back": {"steps": 2}}         back when the others have done two more
    {"host": NAME, "steps": 3, "back": {"ended": "beta/trainer"}}   back when that one has noticed

A host that is lost falls silent: its link is down, then its processes are killed and its shared
memory is emptied. What fails is started again, as a launcher would. Prints one JSON object: exit
codes by process; what ended with a lost host has none.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from programs.network import ADDRESSES, Host, Service, World, make_network


def services(folder: Path, hosts: dict[str, Host], relays: list[str]) -> dict[str, list[Service]]:
    """Return the services on each of `hosts`."""
    alpha, beta = ADDRESSES["alpha"], ADDRESSES["beta"]
    hub = f"tcp://{alpha}:5560"
    up = ["weight-hub", "--upstream", hub, "--set"]
    wanted = {
        "alpha": {
            "buffer": [
                *("buffer", "--broker", "tcp://0.0.0.0:5555", "--advertise", alpha, "--set"),
                *("buffer.ports=[5556,5557]", "--set", f"buffer.store={folder}/store"),
            ],
            "weight-hub": [
                *("weight-hub", "--set", "weight_hub.listen=tcp://0.0.0.0:5560"),
                *("--advertise", alpha),
            ],
            "trainer": ["trainer", "--node-rank", "0"],
        },
        "beta": {
            "part": [*up, f"weight_hub.listen=tcp://{beta}:5562", "--owner", "1"],
            "trainer": ["trainer", "--node-rank", "1"],
        },
    }
    made: dict[str, list[Service]] = {}
    for host in hosts:
        relay = {"relay": [*up, f"weight_hub.listen=tcp://{ADDRESSES[host]}:5563"]}
        own = {**(relay if host in relays else {}), "generator": ["generator"]}
        made[host] = []
        for name, argv in wanted.get(host, own).items():
            common = ["--config", f"{folder}/run.toml", "--set", "security.insecure=true"]
            common += ["--run-dir", f"{folder}/{host}/run"]
            if name != "buffer":
                common += ["--broker", f"tcp://{alpha}:5555"]
            if name != "part":
                common += ["--name", name if host in wanted else f"{name}-{host}"]
            whole = [*hosts[host].enter, sys.executable, "-m", "umbra", *argv, *common]
            made[host].append(Service(f"{host}/{name}", whole, folder / f"{host}-{name}.log"))
    return made


def run(folder: Path, settings: dict[str, Any]) -> dict[str, list[int]]:
    """The run from start to end; exit codes by process."""
    make_network()
    hosts = {name: Host(name) for name in settings["hosts"]}
    for name in hosts:
        (folder / name).mkdir()
    on_host = services(folder, hosts, settings["relays"])
    every = {service.name: service for those in on_host.values() for service in those}
    metrics = "alpha/run/metrics.jsonl"
    with World([*every.values()], folder, metrics, settings["limit_s"]) as world:
        for loss in settings["losses"]:
            lost, back = loss["host"], loss.get("back", {})
            world.until_steps(loss["steps"], f"{lost} is lost")
            hosts[lost].connect(connected=False)
            for service in on_host[lost]:
                service.kill()
            hosts[lost].sh("umount -l /dev/shm; mount -t tmpfs tmpfs /dev/shm")
            if "steps" in back:
                world.until_steps(back["steps"], f"{lost} is back")
            elif "ended" in back:
                world.until_ended(every[back["ended"]])
            if back:
                hosts[lost].connect(connected=True)
                for service in on_host[lost]:
                    service.start()
        return world.finish()


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]), json.loads(sys.argv[2]))))
