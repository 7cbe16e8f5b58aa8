"""Runs the manifests of a plan as Kubernetes' nodes would; all ends with it.

    unshare --net --mount --uts --pid --fork --kill-child --mount-proc \\
        python pods.py MANIFESTS FOLDER SETTINGS

Each pod has a network namespace of its own on one bridge, and a host name. Each of its containers
has a process namespace, the user of the pod without any capability, and a file system of its own:
this machine's Python, read-only, in place of an image, and the volumes that its manifest mounts.
Claims are folders of FOLDER/claims. SETTINGS is JSON: `image`, the folders that stand in for it;
`keys`, the one that the Secret was made of; `run`, whether the containers are started, or only
looked into. Prints one JSON object: what
each container sees before it is started, whether its probe was content after the fifth step, and
its exit code.

Services are names in /etc/hosts. Exit codes are not acted on, and limits, tolerations and node
selectors are not tried. What it does not know in a volume or a mount is an error. Needs root.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from network import CONTROLLER, NETWORK, Host, make_network, sh

POLL_S = 0.2
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
PATH = f"{Path(sys.executable).parent}:/usr/bin:/bin"
# Every file that is not of the image; the rest of the arguments are the folders to leave out.
LOOK = """\
import os, sys
def refuse(error):
    raise error
for top, folders, files in os.walk("/", onerror=refuse):
    folders[:] = [f for f in folders if os.path.join(top, f) not in sys.argv[1:] and f[:2] != ".."]
    for file in files:
        path = os.path.join(top, file)
        with open(path, "rb") as read:  # its user can
            read.read(1)
        print(path, "rw"[os.access(path, os.W_OK)])
"""


class Pod:
    """The pod of a Job: its namespaces, held by a process that sleeps in them."""

    def __init__(self, job: dict[str, Any], address: str, place: Path, world: World) -> None:
        template = job["spec"]["template"]
        self.labels: dict[str, str] = template["metadata"]["labels"]
        self.spec: dict[str, Any] = template["spec"]
        self.address = address
        self._security = self.spec["securityContext"]
        self._world = world
        self._place = place
        self.volumes = {volume["name"]: self._volume(volume) for volume in self.spec["volumes"]}
        self.containers = [Container(self, spec, place) for spec in self.spec["containers"]]

    @property
    def user(self) -> int:
        return self._security["runAsUser"]

    @property
    def group(self) -> int:
        assert self._security["runAsGroup"] == self._security["fsGroup"]
        return self._security["fsGroup"]

    def start(self, link: str) -> None:
        """Make the machine, which sees the volumes that there are by now."""
        self.host = Host(self.spec["hostname"], self.address, link)

    def _volume(self, volume: dict[str, Any]) -> Path:
        """The file or folder that is mounted for `volume`."""
        name, (kind,) = volume["name"], volume.keys() - {"name"}
        source, place = volume[kind], self._place / "volumes" / name
        place.mkdir(parents=True)
        if kind == "configMap":
            assert source.keys() == {"name"}
            for file, text in self._world.of("ConfigMap", source["name"])["data"].items():
                (place / file).write_text(text, encoding="utf-8")
        elif kind == "secret":
            assert source.keys() == {"secretName", "defaultMode", "items"}
            # As Kubernetes has them: links to files in a folder that is replaced as a whole.
            (place / "..1").mkdir()
            (place / "..data").symlink_to("..1")
            for item in source["items"]:
                file = place / "..1" / item["path"]
                file.write_bytes((self._world.keys / item["key"]).read_bytes())
                file.chmod(source["defaultMode"])
                os.chown(file, 0, self.group)
                (place / item["path"]).symlink_to(f"..data/{item['path']}")
        elif kind == "emptyDir":
            assert source.keys() == {"medium", "sizeLimit"} and source["medium"] == "Memory"
            size = source["sizeLimit"].removesuffix("i")
            sh(f"mount -t tmpfs -o size={size},mode=2777,gid={self.group} tmpfs {place}")
        elif kind == "persistentVolumeClaim":
            assert source.keys() <= {"claimName", "readOnly"}
            place = self._world.claims / source["claimName"]
            if not source.get("readOnly", False):
                self._world.of("PersistentVolumeClaim", source["claimName"])
                place.mkdir(parents=True, exist_ok=True)
                os.chown(place, 0, self.group)
                place.chmod(0o2775)
        else:
            assert kind == "hostPath" and source.keys() == {"path"}, volume
            place = Path(source["path"])
        return place


class Container:
    """Container of a pod: its mounts and its command."""

    def __init__(self, pod: Pod, spec: dict[str, Any], place: Path) -> None:
        self.name: str = spec["name"]
        self.probe: list[str] = spec["readinessProbe"]["exec"]["command"]
        self.process: subprocess.Popen[bytes] | None = None
        self._pod = pod
        self._spec = spec
        self._log = place / f"{self.name}.log"

    def start(self, world: World) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._inside(world, ["umbra", *self._spec["args"]]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def ask(self, world: World, argv: list[str]) -> subprocess.CompletedProcess[str]:
        """Run `argv` in a container just like it, beside it in the pod."""
        inside = self._inside(world, argv)
        return subprocess.run(inside, capture_output=True, text=True, check=False)

    def sees(self, world: World) -> list[str]:
        image = [*world.image, "/proc", "/dev", "/etc"]
        done = self.ask(world, ["python", "-c", LOOK, *image])
        if done.returncode:
            raise SystemExit(f"{self.name}: {done.stderr}")
        return sorted(done.stdout.splitlines())

    def _inside(self, world: World, argv: list[str]) -> list[str]:
        security = self._spec["securityContext"]
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert not security["allowPrivilegeEscalation"]
        environ = {variable["name"]: variable["value"] for variable in self._spec["env"]}
        environ["PATH"], environ["HOME"] = PATH, "/tmp"
        user, group = self._pod.user, self._pod.group
        last = [
            *("chroot", "/mnt", "setpriv", f"--reuid={user}", f"--regid={group}"),
            *(f"--groups={group}", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"),
            *("env", "-i", "PYTHONDONTWRITEBYTECODE=1"),
            *(f"{name}={value}" for name, value in environ.items()),
            *argv,
        ]
        script = "\n".join([*self._mounts(world), f"exec {shlex.join(last)}"])
        spaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--", "sh", "-ec"]
        return [*self._pod.host.enter, *spaces, script]

    def _mounts(self, world: World) -> list[str]:
        lines = [
            "mount -t tmpfs -o mode=0755 tmpfs /mnt",
            "mkdir -p /mnt/proc /mnt/dev/shm /mnt/etc /mnt/tmp; chmod 1777 /mnt/tmp",
            "mount -t proc proc /mnt/proc",
            "mount -t tmpfs -o mode=1777,size=64m tmpfs /mnt/dev/shm",
            f"echo 'umbra:x:{self._pod.user}:{self._pod.group}::/tmp:/bin/sh' > /mnt/etc/passwd",
            *(f"echo '{address} {name}' >> /mnt/etc/hosts" for name, address in world.names()),
        ]
        lines += [f"touch /mnt{d}; mount --bind {d} /mnt{d}" for d in DEVICES]
        lines += [_bind(Path(place), place, read_only=True) for place in world.image]
        for mount in self._spec["volumeMounts"]:
            assert mount.keys() <= {"name", "mountPath", "subPath", "readOnly"}, mount
            source = self._pod.volumes[mount["name"]] / mount.get("subPath", "")
            lines.append(_bind(source, mount["mountPath"], read_only=mount.get("readOnly", False)))
        return lines


def _bind(source: Path, target: str, *, read_only: bool) -> str:
    if not source.exists():
        raise SystemExit(f"{source}, which is mounted at {target}, does not exist")
    here, there = shlex.quote(str(source)), shlex.quote(f"/mnt{target}")
    make = f"mkdir -p {there}"
    if not source.is_dir():
        make = f'mkdir -p "$(dirname {there})"; touch {there}'
    again = f"; mount -o remount,bind,ro {there}" if read_only else ""
    return f"{make}; mount --bind {here} {there}{again}"


class World:
    def __init__(self, manifests: Path, folder: Path, settings: dict[str, Any]) -> None:
        self._documents: list[dict[str, Any]] = list(
            yaml.safe_load_all(manifests.read_text(encoding="utf-8"))
        )
        self.keys = Path(settings["keys"])
        self.image: list[str] = settings["image"]
        self.claims = folder / "claims"
        make_network(CONTROLLER)
        jobs = [document for document in self._documents if document["kind"] == "Job"]
        self.pods = [
            Pod(job, f"{NETWORK}.{index}", folder / job["metadata"]["name"], self)
            for index, job in enumerate(jobs, 1)
        ]
        for index, pod in enumerate(self.pods, 1):
            pod.start(f"to-{index}")

    def of(self, kind: str, name: str) -> dict[str, Any]:
        (found,) = (
            document
            for document in self._documents
            if document["kind"] == kind and document["metadata"]["name"] == name
        )
        return found

    def names(self) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        for document in self._documents:
            if document["kind"] == "Service":
                selector = document["spec"]["selector"].items()
                (pod,) = (pod for pod in self.pods if selector <= pod.labels.items())
                found.append((document["metadata"]["name"], pod.address))
        return found

    def containers(self) -> list[Container]:
        return [container for pod in self.pods for container in pod.containers]

    def sees(self) -> dict[str, list[str]]:
        return {container.name: container.sees(self) for container in self.containers()}

    def run(self) -> dict[str, Any]:
        """The run from start to end: what the probes said at the fifth step, and exit codes."""
        for container in self.containers():
            container.start(self)
        self._until(lambda: self._steps() >= 5, "the fifth step")
        probes: dict[str, str] = {}
        for container in self.containers():
            asked = container.ask(self, container.probe)
            probes[container.name] = asked.stderr if asked.returncode else ""
        self._until(lambda: not self._running(), "")
        codes = {c.name: c.process.returncode for c in self.containers() if c.process}
        return {"probes": probes, "codes": codes}

    def _steps(self) -> int:
        files = self.claims.glob("*/*/metrics.jsonl")
        return sum(file.read_text(encoding="utf-8").count('"kind":"step"') for file in files)

    def _running(self) -> list[str]:
        return [c.name for c in self.containers() if c.process and c.process.poll() is None]

    def _until(self, condition: Any, what: str) -> None:
        while not condition():
            if what and "trainer" not in self._running():
                raise SystemExit(f"the trainer ended before {what}")
            time.sleep(POLL_S)


def main() -> None:
    settings = json.loads(sys.argv[3])
    world = World(Path(sys.argv[1]), Path(sys.argv[2]), settings)
    outcome: dict[str, Any] = {"sees": world.sees()}
    if settings["run"]:
        outcome |= world.run()
    print(json.dumps(outcome))


if __name__ == "__main__":
    main()
