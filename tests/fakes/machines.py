"""Docker as `tests/real/setup.sh` installs it, and whether it can be used here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
INSTALLED = Path("/opt/umbra-docker")  # where setup.sh puts it beside a system without Compose
SPACES = ("unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
NEEDED = ("dockerd", "docker", "containerd", "runc", "docker-init", "iptables", "ip", "unshare")

ENVIRON = {
    **os.environ,
    "PATH": f"{INSTALLED}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
    **({"DOCKER_CONFIG": str(INSTALLED)} if INSTALLED.exists() else {}),
}


def python_places() -> list[str]:
    """Folders that hold this machine's Python, its packages and the source: an image's stand-in."""
    places = {sys.prefix, sys.base_prefix, str(ROOT), "/usr", "/bin", "/lib", "/lib64"}
    places |= {path for path in sys.path if path.endswith("site-packages")}
    return sorted(place for place in places if Path(place).exists())


def why_no_docker(*more: str) -> str:
    """Why no daemon can be run here, or what of `more` is missing; empty if all is there."""
    missing = [p for p in (*NEEDED, *more) if shutil.which(p, path=ENVIRON["PATH"]) is None]
    if missing:
        return f"{', '.join(missing)} not installed: tests/real/setup.sh installs Docker"
    if os.geteuid() != 0:
        return "Docker's daemons need root"
    for argv in ((*SPACES, "true"), ("docker", "compose", "version")):
        tried = subprocess.run(argv, env=ENVIRON, capture_output=True, text=True, check=False)
        if tried.returncode:
            return f"{' '.join(argv)}: {tried.stderr.strip()}"
    return ""
