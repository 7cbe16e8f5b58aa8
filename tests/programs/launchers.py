"""Machines with Docker daemons, or with a SLURM, and a shell script that uses them; all ends then.

    unshare --net --mount --uts --pid --fork --kill-child --mount-proc \\
        python launchers.py (docker|slurm) FOLDER NODES SCRIPT

NODES is JSON: the number of pretended GPUs of each machine, by name. They are on one bridge; the
first has the address 10.88.0.1. SCRIPT is run by bash beside them (10.88.0.254); FOLDER/NODE.pid is
the process that holds a machine's namespaces. With `docker` each has a daemon, and there are these
functions:

    on NODE COMMAND...     run a command on the machine; docker there is its own daemon
    daemon_down NODE       kill the daemon, and with it all of its containers, as a lost machine
    daemon_up NODE         start it again, and wait until it answers

With `slurm` each has a slurmd, and SLURM's commands are configured where SCRIPT runs. Needs root,
but neither cgroups nor systemd. Ends with the script's exit code.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from network import Host, make_network

NETWORK = "10.88.0"
CONTROLLER = f"{NETWORK}.254"
READY_S = 120.0

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
    rm -f "$NODES/$1.down"
    until on "$1" docker info >/dev/null 2>&1; do sleep 0.2; done
}
"""
# Starts the machine's daemon, again unless NODE.down is there.
DOCKERD = """\
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
SLURMD = """\
mkdir {folder}/spool-{name}
while :; do slurmd -D -N {name} || true; sleep 1; done
"""
MUNGED = """\
head -c 1024 /dev/urandom > {folder}/munge.key
chmod 400 {folder}/munge.key
munged --force --key-file={folder}/munge.key --socket={folder}/munge.socket \\
    --pid-file={folder}/munged.pid --log-file={folder}/munged.log --seed-file={folder}/munged.seed
slurmctld -i
"""
CONF = """\
ClusterName=umbra
SlurmctldHost=ctl({controller})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/%n.slurmd
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
ReturnToService=2
SlurmdTimeout=10
KillWait=10
SchedulerParameters=bf_interval=2,sched_interval=2
GresTypes=gpu
{nodes}
PartitionName=all Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""


def configure_slurm(folder: Path, nodes: dict[str, int]) -> None:
    """Write slurm.conf and gres.conf, and start the controller."""
    lines = [
        f"NodeName={name} NodeAddr={NETWORK}.{index} CPUs=2 RealMemory=2000"
        + (f" Gres=gpu:{gpus}" if gpus else "")
        for index, (name, gpus) in enumerate(nodes.items(), 1)
    ]
    conf = CONF.format(
        controller=CONTROLLER, folder=folder, nodes="\n".join(lines), names=",".join(nodes)
    )
    gres = [f"NodeName={n} Name=gpu File=/dev/tty[1-{g}]\n" for n, g in nodes.items() if g]
    (folder / "slurm.conf").write_text(conf, encoding="utf-8")
    (folder / "gres.conf").write_text("".join(gres), encoding="utf-8")
    (folder / "state").mkdir()
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    subprocess.run(["sh", "-ec", MUNGED.format(folder=folder)], check=True)


def wait_for_slurm(count: int) -> None:
    deadline = time.monotonic() + READY_S
    sinfo = ["sinfo", "--noheader", "--Node", "--partition=all", "--states=idle"]
    while True:
        done = subprocess.run(sinfo, capture_output=True, text=True, check=False)
        if len(done.stdout.splitlines()) == count:
            return
        if time.monotonic() > deadline:
            raise SystemExit(f"the nodes did not come up: {done.stdout}{done.stderr}")
        time.sleep(0.2)


def main() -> None:
    kind, folder, nodes = sys.argv[1], Path(sys.argv[2]).resolve(), json.loads(sys.argv[3])
    folder.mkdir(parents=True)
    make_network(CONTROLLER)
    subprocess.run(["hostname", "ctl"], check=True)
    if kind == "slurm":
        configure_slurm(folder, nodes)
    for index, name in enumerate(nodes, 1):
        host = Host(name, f"{NETWORK}.{index}", f"to-{index}")
        (folder / f"{name}.pid").write_text(str(host.pid), encoding="ascii")
        script = SLURMD if kind == "slurm" else DOCKERD
        script = script.format(name=name, folder=folder, controller=CONTROLLER)
        host.start(script, folder / f"{name}.log")
    environ = {**os.environ, "NODES": str(folder)}
    if kind == "slurm":
        wait_for_slurm(len(nodes))
    else:
        functions = folder / "functions.sh"
        functions.write_text(FUNCTIONS, encoding="utf-8")
        environ["BASH_ENV"] = str(functions)
        wait = f"for n in {' '.join(nodes)}; do daemon_up $n; done"
        subprocess.run(["bash", "-euc", wait], env=environ, check=True, timeout=READY_S)
    bash = ["bash", "-euo", "pipefail", sys.argv[4]]
    sys.exit(subprocess.run(bash, env=environ, check=False).returncode)


if __name__ == "__main__":
    main()
