"""Manifests of a plan in pods made of namespaces: what each container sees, and a whole run.

There is no Kubernetes here: `tests/programs/pods.py` does as its nodes would.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fakes.machines import (
    PROGRAMS,
    SPACES,
    check_ledger,
    logs,
    python_places,
    sort_task,
    umbra,
    why_not,
)
from fakes.slowness import limit

from umbra.proto.access import KEY_ROLES

NEEDED = ("unshare", "nsenter", "setpriv", "chroot", "ip")
STEPS = 40
PLACE = "/srv/umbra"  # of all files in the containers
WHY_NOT = why_not("pods with users of their own", *NEEDED)

pytestmark = [
    pytest.mark.real,
    pytest.mark.cluster,
    pytest.mark.timeout(660),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]

CLUSTER = """\
[cluster]
groups = ["train", "generate"]
shm_gib = 1
[[nodes]]
name = "a.rack-1"
address = "10.0.0.1"
[[nodes]]
name = "b.rack-1"
address = "10.0.0.2"
"""
# The role of each container, whose secret key it has, and what it reads and writes.
CONTAINERS = {
    "buffer": ("buffer", ["heldout.jsonl", "prompts.jsonl"]),
    "weight-hub": ("weight_hub", ["base"]),
    "trainer": ("trainer", ["base"]),
    "relay-b-rack-1": ("relay", []),
    "generator-b-rack-1-0": ("generator", ["base"]),
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sort task, with a file that is nobody's."""
    folder = tmp_path_factory.mktemp("project")
    sort_task(folder, "")
    (folder / "sort" / "secrets.txt").write_text("nobody's", encoding="utf-8")
    return folder


def pods(project: Path, folder: Path, settings: str, *, run: bool) -> dict[str, Any]:
    """Plan the run with `settings` of [cluster], and do as the nodes would with it."""
    folder.mkdir(exist_ok=True)
    text = CLUSTER.replace("[[nodes]]", f"{settings}[[nodes]]", 1)
    (folder / "cluster.toml").write_text(text, encoding="utf-8")
    overrides = (f"run.steps={STEPS}", "run.broker_grace_s=120")
    umbra(
        project,
        *("plan", str(folder / "cluster.toml"), "run.toml", "--format", "kubernetes"),
        *("--out", str(folder / "plan"), "--run-id", "pods"),
        *(part for override in overrides for part in ("--set", override)),
    )
    wanted = {"keys": str(folder / "plan" / "keys"), "image": python_places(), "run": run}
    manifests = folder / "plan" / "kubernetes.yaml"
    done = subprocess.run(
        [*SPACES, sys.executable, PROGRAMS / "pods.py", manifests, folder, json.dumps(wanted)],
        capture_output=True,
        text=True,
        timeout=limit(300.0),
        check=False,
    )
    assert done.returncode == 0, done.stderr + logs(folder)
    return json.loads(done.stdout) | {"claims": folder / "claims"}


def expected(project: Path) -> dict[str, list[str]]:
    """Return the paths of each container before it is started, with `r` or `w`."""
    found: dict[str, list[str]] = {}
    for name, (role, inputs) in CONTAINERS.items():
        keys = {f"{role}.key_secret", "monitor.key_secret", *(f"{one}.key" for one in KEY_ROLES)}
        files = {f"{PLACE}/keys/{key}" for key in keys} | {f"{PLACE}/run.toml"}
        for entry in (project / "sort" / one for one in inputs):
            files |= {str(p) for p in ([entry] if entry.is_file() else entry.rglob("*"))}
        found[name] = sorted(f"{file} r" for file in files)
    return found


@pytest.fixture(scope="module")
def outcome(project: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A whole run, with model and prompts from the nodes' own paths."""
    return pods(project, tmp_path_factory.mktemp("pods"), "", run=True)


def test_each_container_sees_its_files_and_no_others(
    project: Path, outcome: dict[str, Any]
) -> None:
    assert outcome["sees"] == expected(project)


def test_the_same_from_a_claim(project: Path, tmp_path: Path) -> None:
    claim = tmp_path / "claims" / "lake"
    shutil.copytree(project / "sort", claim / str(project / "sort").lstrip("/"))
    settings = 'inputs_claim = "lake"\n'
    assert pods(project, tmp_path, settings, run=False)["sees"] == expected(project)


def test_the_run_ends_with_every_sample_trained_once(outcome: dict[str, Any]) -> None:
    assert outcome["probes"] == dict.fromkeys(CONTAINERS, "")
    assert outcome["codes"] == dict.fromkeys(CONTAINERS, 0)
    (file,) = outcome["claims"].glob("*/pods/buffer.json")
    check_ledger(file, STEPS * 8 * 32)
