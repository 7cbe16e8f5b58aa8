"""A run on two machines by the words of docs/cluster.md, with images built on a bare Debian.

`tests/real/setup.sh` installs Docker.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from fakes.machines import ROOT, check_ledger, on_machines, printed, skipped
from fakes.slowness import limit

LIMIT_S = limit(1500.0)
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
PACKAGES = "python3,python3-venv,python3-pip,ca-certificates"
BASE = re.findall(r"^ARG BASE=(.*)", (ROOT / "deploy/images/Dockerfile").read_text(), re.M)[0]
# A daemon that leaves this machine's network as it is; images are built and run on it directly.
DAEMON = """\
mount -t tmpfs tmpfs /run
mkdir /run/exec
dockerd --bridge=none --iptables=false --data-root "$PWD/data" --exec-root /run/exec \\
    --pidfile /run/dockerd.pid -H unix:///run/docker.sock >dockerd.log 2>&1 &
export DOCKER_HOST=unix:///run/docker.sock
until docker info >/dev/null 2>&1; do sleep 0.2; done
tar -C base -c . | docker import - base >/dev/null
docker tag base "$BASE"
"""

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(1800),
    skipped("docker", "debootstrap"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the file system of a minimal Debian that has Python."""
    debootstrap = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", "base"]
    made = subprocess.run(
        debootstrap, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if made.returncode:
        pytest.skip(f"no Debian to build on: {made.stdout.strip()[-300:]}")
    # The index of packages is reached as from here.
    shutil.copy(CERTIFICATES, tmp_path / "base" / CERTIFICATES.relative_to("/"))
    return tmp_path


# Another index of packages may be the one that is reached from here.
BUILD = """\
docker() {
    if [ "$1" != build ]; then command docker "$@"; return; fi
    shift
    command docker build --quiet --network=host "$@" \\
        ${PIP_OPTIONS:+--build-arg "PIP_OPTIONS=$PIP_OPTIONS"}
}
cd umbra
"""
# What the images have; the compiler is needed by torch.compile.
LOOK = """
inside() { command docker run --rm --network=none "$@"; }
inside umbra-broker --version
inside --entrypoint id umbra-broker --user
inside --entrypoint python3 umbra-cpu -c \\
    'import torch; print(torch.compile(torch.sin)(torch.ones(64)).sum())'
base=$(command docker image inspect base --format '{{.Size}}')
image=$(command docker image inspect umbra-broker --format '{{.Size}}')
echo "bytes $((image - base))"
command docker save umbra-broker umbra-cpu >../images.tar
"""
# Commands typed at machine a, by a user in its group docker; both have the same disk, so that
# nothing has to be copied.
AT_A = """\
on a docker load --quiet <images.tar
docker() { on a docker "$@"; }
ssh() { shift; on b bash -c "$*"; }
rsync() { :; }
id() { echo 1000; }
chown -R 1000:1000 umbra
cd umbra
sed -i 's/192.0.2/10.88.0/' examples/cluster/two-cpus.toml
"""


def words() -> tuple[str, str]:
    """The commands of the page: those that build images, and all that follow."""
    page = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    section = page.split("## Two machines, from the beginning\n")[1].split("\n## ")[0]
    (commands,) = re.findall(r"```sh\n(.*?)```", section, re.S)
    building, save, rest = commands.partition("docker save")
    assert save and "docker build" in building and "docker build" not in rest
    return building, save + rest.replace("192.0.2", "10.88.0")


def test_two_machines_by_the_words_of_the_page(folder: Path) -> None:
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in files.stdout.decode().split("\0")[:-1]:
        (folder / "umbra" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / "umbra" / name, follow_symlinks=False)
    building, rest = words()
    spaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    argv = [*spaces, "bash", "-euo", "pipefail", "-c", DAEMON + BUILD + building + LOOK]
    found = printed(argv, folder, LIMIT_S, BASE=BASE)
    assert "torch             not installed" in found, "the broker needs none"
    assert "\n10001\n" in found
    assert int(found.split("bytes ")[1]) < 200e6
    print(on_machines("docker", folder, {"a": 0, "b": 0}, AT_A + rest, LIMIT_S)[-6000:])
    (results,) = (folder / "umbra" / "results").glob("**/buffer.json")
    check_ledger(results, 100 * 8 * 32)
    assert (results.parent / "model" / "model.safetensors").exists()
