"""Machines with a Docker daemon each, and a shell script that uses them; all ends with the script.

    unshare --net --mount --uts --pid --fork --kill-child --mount-proc \\
        python docker_nodes.py FOLDER NODES SCRIPT [ARGUMENT...]

NODES is JSON: names of the machines. Each is a dockerd in network, mount and host name namespaces
of its own, on one bridge; the first has the address 10.88.0.1. SCRIPT is run by bash beside them
(address 10.88.0.254), with these functions:

    on NODE COMMAND...     run a command on the machine; docker there is its own daemon
    daemon_down NODE       kill the daemon, and with it all of its containers, as a lost machine
    daemon_up NODE         start it again, and wait until it answers

Needs root, but no systemd. Ends with the script's exit code.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from network import CONTROLLER, make_network, start_machine

FUNCTIONS = """\
on() {
    local node=$1; shift
    nsenter --wd="$PWD" --target "$(cat "$NODES/$node.pid")" --net --mount --uts \\
        -- env DOCKER_HOST=unix:///run/docker.sock "$@"
}
daemon_down() {
    : > "$NODES/$1.down"
    kill -KILL "$(cat "$NODES/$1.daemon")"
    while on "$1" docker info >/dev/null 2>&1; do sleep 0.1; done
}
daemon_up() {
    rm "$NODES/$1.down"
    until on "$1" docker info >/dev/null 2>&1; do sleep 0.2; done
}
"""
# Starts the machine's daemon, again unless NODE.down is there.
MACHINE = """\
mount -t tmpfs tmpfs /run
mkdir /run/exec
ip route add default via {controller}
while :; do
    if [ ! -e {folder}/{name}.down ]; then
        # Processes of its own: all that a container runs ends with it. The shell reaps them.
        unshare --pid --fork --kill-child --mount-proc sh -c 'rm -f /run/dockerd.pid
            dockerd --data-root {folder}/{name} --exec-root /run/exec --pidfile /run/dockerd.pid \\
                -H unix:///run/docker.sock & wait' &
        echo $! > {folder}/{name}.daemon
        wait $! || true
    fi
    sleep 0.2
done
"""
READY_S = 120.0


def start(folder: Path, nodes: list[str]) -> None:
    make_network(CONTROLLER)
    subprocess.run(["hostname", "ctl"], check=True)
    for index, name in enumerate(nodes, 1):
        script = MACHINE.format(name=name, folder=folder, controller=CONTROLLER)
        with (folder / f"{name}.log").open("ab") as log:
            start_machine(folder, index, name, script, log)


def main() -> None:
    folder, nodes = Path(sys.argv[1]).resolve(), json.loads(sys.argv[2])
    folder.mkdir(parents=True)
    start(folder, nodes)
    functions = folder / "functions.sh"
    functions.write_text(FUNCTIONS, encoding="utf-8")
    environ = {**os.environ, "NODES": str(folder), "BASH_ENV": str(functions)}
    wait = f'for n in {" ".join(nodes)}; do until on "$n" docker info >/dev/null 2>&1; do '
    subprocess.run(
        ["bash", "-euc", wait + "sleep 0.2; done; done"], env=environ, check=True, timeout=READY_S
    )
    done = subprocess.run(["bash", "-euo", "pipefail", *sys.argv[3:]], env=environ, check=False)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
