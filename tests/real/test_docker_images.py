"""Images built from the Dockerfile on a bare Debian; `tests/real/setup.sh` installs Docker."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from fakes.docker import ENVIRON, why_no_docker
from fakes.slowness import seconds

ROOT = Path(__file__).parents[2]
LIMIT_S = seconds(1500.0)
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
PACKAGES = "python3,python3-venv,python3-pip,ca-certificates"
# A daemon that leaves this machine's network as it is; images are built and run on it directly.
DAEMON = """\
mount -t tmpfs tmpfs /run
mkdir /run/exec
dockerd --bridge=none --iptables=false --data-root "$PWD/data" --exec-root /run/exec \\
    --pidfile /run/dockerd.pid -H unix:///run/docker.sock >dockerd.log 2>&1 &
export DOCKER_HOST=unix:///run/docker.sock
until docker info >/dev/null 2>&1; do sleep 0.2; done
tar -C base -c . | docker import - base >/dev/null
build() { docker build --quiet --network=host --build-arg BASE=base \\
    --file "$SOURCE/deploy/images/Dockerfile" --target "$1" --tag "umbra-$1" "$SOURCE" >/dev/null; }
"""

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(why_no_docker("debootstrap")), reason=why_no_docker("debootstrap")),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the file system of a minimal Debian that has Python."""
    path = tmp_path_factory.mktemp("images")
    made = subprocess.run(
        ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", path / "base"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"no Debian to build on: {made.stdout.strip()[-300:]}")
    # The index of packages is reached as from here.
    shutil.copy(CERTIFICATES, path / "base" / CERTIFICATES.relative_to("/"))
    return path


def docker(folder: Path, script: str) -> str:
    """Run `script` beside a daemon; what it prints."""
    spaces = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
    done = subprocess.run(
        [*spaces, "bash", "-euo", "pipefail", "-c", DAEMON + script],
        cwd=folder,
        env={**ENVIRON, "SOURCE": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


def test_the_broker_image_has_what_it_runs_and_no_torch(folder: Path) -> None:
    printed = docker(
        folder,
        """
        build broker
        docker run --rm --network=none umbra-broker --version
        docker run --rm --network=none umbra-broker env
        docker run --rm --network=none umbra-broker buffer --help >/dev/null
        docker run --rm --network=none --entrypoint id umbra-broker --user
        base=$(docker image inspect base --format '{{.Size}}')
        image=$(docker image inspect umbra-broker --format '{{.Size}}')
        echo "bytes $((image - base))"
        """,
    )
    assert "torch             not installed" in printed
    assert "\n10001\n" in printed
    assert int(printed.split("bytes ")[1]) < 200e6
