"""Machines made of namespaces, with real SLURM, Docker or neither; what their tests have in common.

`tests/real/setup.sh` installs what they need.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fakes.commands import UMBRA, call
from fakes.slowness import limit
from fakes.whole_runs import sets

from umbra.proto.messages import Status

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "tests" / "programs"
INSTALLED = Path("/opt/umbra-docker")  # where setup.sh puts it beside a system without Compose
SPACES = ("unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
OWN_SPACES = (
    *("unshare", "--user", "--map-root-user", "--net", "--mount", "--uts"),
    *("--kill-child", "--fork"),
)
LIMIT_S = limit(600.0)
NEEDED = {
    "docker": ("dockerd", "docker", "containerd", "runc", "docker-init", "iptables", "ip"),
    "slurm": ("slurmctld", "slurmd", "sbatch", "munged", "ip"),
}
ENVIRON = {
    **os.environ,
    "PATH": f"{INSTALLED}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
    **({"DOCKER_CONFIG": str(INSTALLED)} if INSTALLED.exists() else {}),
}


def skipped(kind: str, *more: str) -> pytest.MarkDecorator:
    """Mark a module whose machines need `kind`; skipped where that or one of `more` is missing."""
    needed = ("unshare", "nsenter", *NEEDED[kind], *more)
    missing = [p for p in needed if shutil.which(p, path=ENVIRON["PATH"]) is None]
    why = f"{', '.join(missing)} not installed: see tests/real/setup.sh" if missing else ""
    compose = ["docker", "compose", "version"] if kind == "docker" else ["true"]
    for argv in () if missing else ([*SPACES, "true"], compose):
        tried = call(argv, env=ENVIRON)
        why = why or (tried.returncode and f"{argv}: {tried.stderr.strip()}") or ""
    return pytest.mark.skipif(bool(why), reason=why)


def needs_hosts() -> None:
    """Skip a test where no hosts can be made of namespaces; it need not be root's."""
    for program in ("unshare", "nsenter", "ip"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    inner = "unshare --net --mount mount -t tmpfs tmpfs /srv && ip link add x type bridge"
    tried = call([*OWN_SPACES, "sh", "-c", inner])
    if tried.returncode:
        pytest.skip(f"no namespaces: {tried.stderr.strip()}")


def on_hosts(program: str, folder: Path, *words: str | Path) -> str:
    """Run one of `tests/programs` as root of namespaces of its own; return what it printed."""
    done = call(
        [*OWN_SPACES, sys.executable, "-m", f"programs.{program}", folder, *words],
        cwd=folder,
        env={"PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(folder), *sys.path])},
        quiet_s=700.0,  # it has a deadline of its own
    )
    assert done.returncode == 0, done.stderr + logs(folder)
    return done.stdout


def run_planned(
    folder: Path,
    cluster: str,
    nodes: Mapping[str, str],
    settings: list[str],
    limit_s: float,
    *events: dict[str, Any],
) -> dict[str, Any]:
    """Plan the run file of `folder`, and run it on hosts that are lost or cut off."""
    needs_hosts()
    listed = [f'[[nodes]]\nname = "{n}"\naddress = "{address}"\n' for n, address in nodes.items()]
    # The namespaces map no user but ours, to whom the keys must belong.
    user = f'[cluster]\nuser = "{os.geteuid()}:{os.getegid()}"\n{cluster}\n'
    plan(folder, user + "".join(listed), "--run-id", "run", *sets(*settings))
    how = json.dumps({"nodes": nodes, "events": events, "limit_s": limit_s})
    return json.loads(on_hosts("planned_run", folder / "plan", how))


def plan(folder: Path, cluster: str, *words: str) -> None:
    """Plan the run file of `folder` on `cluster`."""
    (folder / "cluster.toml").write_text(cluster, encoding="utf-8")
    argv = [*UMBRA, "plan", "cluster.toml", "run.toml", *words]
    call(argv, cwd=folder, check=True, quiet_s=300)


def sort_task(folder: Path) -> None:
    """The sort task with a random base model in `folder`."""
    shutil.copy(ROOT / "examples" / "sort.toml", folder / "run.toml")
    task = ("make-task", "sort", "--out", "sort", "--prompts", "512", "--heldout", "64")
    for words in (("make-model", "sort/base"), task):
        call([*UMBRA, *words], cwd=folder, check=True, quiet_s=300)


def on_machines(
    kind: str,
    folder: Path,
    machines: Mapping[str, int],
    script: str,
    limit_s: float = LIMIT_S,
    **environ: str,
) -> str:
    """Run a shell script with the machines of `programs/launchers.py`; return what it prints."""
    (folder / "script.sh").write_text(script, encoding="utf-8")
    places = (str(folder / "machines"), json.dumps(machines), str(folder / "script.sh"))
    argv = [*SPACES, sys.executable, str(PROGRAMS / "launchers.py"), kind, *places]
    return printed(argv, folder, limit_s, **environ)


def printed(argv: list[str], folder: Path, limit_s: float = LIMIT_S, **environ: str) -> str:
    """Run a program in `folder`; return what it prints."""
    done = subprocess.run(
        argv, cwd=folder, env={**ENVIRON, **environ}, capture_output=True, text=True,
        timeout=limit_s, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-6000:]}{done.stderr[-6000:]}{logs(folder)}"
    return done.stdout


def logs(folder: Path) -> str:
    """The ends of all logs, for a test that fails."""
    found = sorted(path for path in folder.rglob("*.log") if path.is_file())
    return "".join(f"\n== {path}\n{path.read_text(errors='replace')[-2000:]}" for path in found)


def check_ledger(status: Path, trained: int) -> None:
    """Check that so many samples were trained, each once, and none is unaccounted for."""
    ledger = msgspec.json.decode(status.read_bytes(), type=Status).ledger
    assert ledger.balance == 0
    assert ledger.trained == trained
    assert sum(ledger.in_flight.values()) == 0
