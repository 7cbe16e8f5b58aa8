"""A SLURM cluster on this machine, and a shell script that uses it; all ends with the script.

    unshare --net --mount --uts --pid --fork --kill-child --mount-proc \\
        python slurm_cluster.py FOLDER NODES SCRIPT [ARGUMENT...]

NODES is JSON: the number of pretended GPUs of each node, by name. Each node is a slurmd in network,
mount and host name namespaces of its own, on one bridge, with its own /dev/shm. SCRIPT is run by
bash where the controller is, with SLURM's commands configured; FOLDER/NODE.pid is the process that
holds a node's namespaces, and FOLDER/NODE.slurmd the one of its slurmd. Needs root, but neither
cgroups nor systemd. Ends with the script's exit code.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from network import CONTROLLER, NETWORK, make_network, start_machine

READY_S = 120.0

CONF = """\
ClusterName=umbra
SlurmctldHost=ctl({controller})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
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
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SlurmdTimeout=10
KillWait=10
SchedulerParameters=bf_interval=2,sched_interval=2
{gres}{nodes}
PartitionName=all Nodes={names} Default=YES MaxTime=INFINITE State=UP
PartitionName=short Nodes={names} MaxTime=5 State=UP
"""


def configure(folder: Path, nodes: dict[str, int]) -> None:
    """Write slurm.conf, gres.conf and munge's key to `folder`."""
    lines = [
        f"NodeName={name} NodeAddr={NETWORK}.{index} CPUs=2 RealMemory=2000"
        + (f" Gres=gpu:{gpus}" if gpus else "")
        for index, (name, gpus) in enumerate(nodes.items(), 1)
    ]
    gres = [f"NodeName={n} Name=gpu File=/dev/tty[1-{g}]\n" for n, g in nodes.items() if g]
    text = CONF.format(
        controller=CONTROLLER,
        folder=folder,
        gres="GresTypes=gpu\n" if gres else "",
        nodes="\n".join(lines),
        names=",".join(nodes),
    )
    (folder / "slurm.conf").write_text(text, encoding="utf-8")
    (folder / "gres.conf").write_text("".join(gres), encoding="utf-8")
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)


def start(folder: Path, nodes: dict[str, int]) -> None:
    with (folder / "daemons.log").open("ab") as log:

        def daemon(*argv: str) -> subprocess.Popen[bytes]:
            return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

        daemon(
            *("munged", "--foreground", "--force", f"--key-file={folder}/munge.key"),
            *(f"--socket={folder}/munge.socket", f"--pid-file={folder}/munged.pid"),
            *(f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed"),
        )
        while not (folder / "munge.socket").exists():
            time.sleep(0.05)
        make_network(CONTROLLER)
        subprocess.run(["hostname", "ctl"], check=True)
        daemon("slurmctld", "-D", "-i")
        for index, name in enumerate(nodes, 1):
            (folder / f"spool-{name}").mkdir()
            serve = f"while :; do slurmd -D -N {name} || true; sleep 1; done"
            memory = "mount -t tmpfs -o mode=1777 tmpfs /dev/shm"
            start_machine(folder, index, name, f"{memory}; {serve}", log)


def wait_for_nodes(count: int) -> None:
    deadline = time.monotonic() + READY_S
    while True:
        done = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--partition=all", "--states=idle"],
            capture_output=True,
            text=True,
            check=False,
        )
        if len(done.stdout.splitlines()) == count:
            return
        if time.monotonic() > deadline:
            raise SystemExit(f"the nodes did not come up: {done.stdout}{done.stderr}")
        time.sleep(0.2)


def main() -> None:
    folder, nodes = Path(sys.argv[1]).resolve(), json.loads(sys.argv[2])
    folder.mkdir(parents=True)
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    configure(folder, nodes)
    start(folder, nodes)
    wait_for_nodes(len(nodes))
    sys.exit(subprocess.run(["bash", "-euo", "pipefail", *sys.argv[3:]], check=False).returncode)


if __name__ == "__main__":
    main()
