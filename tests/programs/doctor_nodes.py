"""`umbra doctor --listen` on two hosts made of network namespaces; one drops what comes to a port.

    unshare --user --map-root-user --net --mount --uts --kill-child python doctor_nodes.py \
        PLAN SETTINGS

PLAN is a folder of `umbra plan` for nodes alpha and beta. SETTINGS is JSON: the port that alpha
drops, by how many seconds beta's clock is ahead, and how long both listen. Prints one JSON object:
what each of them said, by node.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from programs.two_hosts import Host, make_network

SKEWED = Path(__file__).with_name("skewed")


def main(plan: str, settings: dict[str, Any]) -> None:
    make_network()
    hosts = {name: Host(name) for name in ("alpha", "beta")}
    hosts["alpha"].sh(f"iptables -A INPUT -p tcp --dport {settings['dropped']} -j DROP")
    path = os.pathsep.join([str(SKEWED), *sys.path])
    looking: dict[str, subprocess.Popen[str]] = {}
    for name, host in hosts.items():
        skew = {"PYTHONPATH": path, "SKEW_S": str(settings["ahead_s"])} if name == "beta" else {}
        argv = ["-m", "umbra", "doctor", "--plan", plan, "--listen", "--json"]
        looking[name] = subprocess.Popen(
            [*host.enter, sys.executable, *argv, "--for", str(settings["for_s"])],
            env=os.environ | skew,
            stdout=subprocess.PIPE,
            text=True,
        )
    said = {name: process.communicate()[0] for name, process in looking.items()}
    codes = {name: process.returncode for name, process in looking.items()}
    print(json.dumps({"said": said, "codes": codes}))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
