"""Plans on machines with a Docker daemon each; `tests/real/setup.sh` installs Docker.

The images are light: nothing but an entry point, with this machine's Python, packages and source
mounted. Whether the Dockerfile builds is another test.
"""

import json
import sys
from pathlib import Path

import pytest
from fakes.commands import call
from fakes.machines import ENVIRON, ROOT, check_ledger, on_machines, plan, skipped, sort_task
from fakes.whole_runs import sets

STEPS = 300  # so that a machine that joins on the way is there before the end
BATCH = 8 * 32  # samples of a step of the sort task

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(660),
    skipped("docker"),
]

CLUSTER = """\
[cluster]
groups = ["train", "generate"]
shm_gib = 1

[[nodes]]
name = "a"
address = "10.88.0.1"

[[nodes]]
name = "b"
address = "10.88.0.2"
"""

# A machine that joins the run.
LATE = """\

[[nodes]]
name = "c"
address = "10.88.0.3"
joins = true
"""
SET = sets(f"run.steps={STEPS}", "checkpoint.every=2", "run.broker_grace_s=120")

# What the scripts of all tests begin with.
BEGIN = """\
for node in $MACHINES; do
    for image in broker cpu; do
        tar -C light -c . | on $node docker import --change 'ENTRYPOINT ["umbra"]' \\
            --change "ENV PATH=$BIN:/usr/bin:/bin HOME=/tmp PYTHONDONTWRITEBYTECODE=1" \\
            - umbra-$image:latest >/dev/null
    done
done
compose() { local node=$1; shift; (cd plan/$node && on $node docker compose "$@"); }
status() { umbra status --broker tcp://10.88.0.1:5555 --keys plan/keys --json; }
steps() {
    status | python -c 'import json, sys; print(json.load(sys.stdin)["version"])'
}
reach() { # STEP
    until [ "$(steps 2>/dev/null || echo 0)" -ge "$1" ]; do
        if ! on a docker ps --quiet | grep -q .; then echo "the run ended before $1" >&2; exit 1; fi
        sleep 0.5
    done
}
ended() { # NODE: until none of its containers runs, what each ended with
    while on $1 docker ps --quiet | grep -q .; do sleep 0.5; done
    on $1 docker ps --all --format '{{.Names}} {{.Status}}' | sed 's/ ([0-9]*).*/&/'
}
finish() {
    ended a; ended b
    results=$(on a docker volume inspect umbra-a_results --format '{{.Mountpoint}}')
    cp "$results"/*/buffer.json "$results"/*/metrics.jsonl .
}
compose a up -d
compose b up -d
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The sort task, its plan on two nodes, and the mounts of the light images."""
    sort_task(tmp_path)
    plan(tmp_path, CLUSTER, "--run-id", "real", *SET)
    for name in ("tmp", "etc", "srv/umbra/results", "srv/umbra/store"):
        (tmp_path / "light" / name).mkdir(parents=True)
        (tmp_path / "light" / name).chmod(0o1777)  # as in the Dockerfile, which volumes begin as
    for node in ("a", "b"):
        folder, listing = tmp_path / "plan" / node, ("docker", "compose", "config", "--services")
        mount_python(folder, call(listing, cwd=folder, env=ENVIRON, check=True).stdout.split())
    return tmp_path


def mount_python(node: Path, services: list[str]) -> None:
    """Mount what the light images lack into the `services` of the node's folder."""
    places = {sys.prefix, sys.base_prefix, str(ROOT), "/usr", "/bin", "/lib", "/lib64"}
    places |= {path for path in sys.path if path.endswith("site-packages")}
    mounts = [f"{place}:{place}:ro" for place in sorted(places) if Path(place).exists()]
    node.mkdir(exist_ok=True)
    (node / "compose.override.yaml").write_text(
        json.dumps({"services": {name: {"volumes": mounts} for name in services}}),
        encoding="utf-8",
    )


def on_docker(folder: Path, script: str, machines: str = "a b") -> str:
    """Run `script` beside `machines`; on a and b the run is started before. What it prints."""
    return on_machines(
        "docker", folder, dict.fromkeys(machines.split(), 0), BEGIN + script,
        BIN=str(Path(sys.executable).parent), MACHINES=machines, SET=" ".join(SET),
    )  # fmt: skip


def check(project: Path, ended: str) -> list[int]:
    """That all containers ended with 0 and every sample was trained once; the steps made."""
    containers = [line for line in ended.splitlines() if " Exited (" in line]
    assert len(containers) >= 5, ended
    assert all(" Exited (0)" in line for line in containers), ended
    check_ledger(project / "buffer.json", STEPS * BATCH)
    lines = (project / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row["step"] for row in map(json.loads, lines) if row["kind"] == "step"]


@pytest.mark.cluster
def test_two_machines_start_by_compose_and_end_by_themselves(project: Path) -> None:
    watch = """
    reach 3
    # Health as Docker sees it, by the checks of the plan.
    for node in a b; do
        until ! on $node docker ps --format '{{.Status}}' | grep -qv '(healthy)'; do sleep 1; done
    done
    echo healthy
    # Only the ports of the table are open, on the machine's address alone.
    on a ss --listening --tcp --numeric --no-header | awk '{print "open", $4}' | sort -u
    if umbra status --broker tcp://10.88.0.1:5555 --json >/dev/null 2>&1; then
        echo "answered without keys"
    fi
    # A machine that is taken away and brought back by hand.
    compose b down
    compose b up -d
    at=$(steps); reach $((at + 3))
    finish
    """
    printed = on_docker(project, watch)
    assert "healthy\n" in printed
    assert "answered without keys" not in printed
    open_ports = {line.split()[1] for line in printed.splitlines() if line.startswith("open ")}
    assert open_ports == {f"10.88.0.1:{port}" for port in range(5555, 5560)}
    assert check(project, printed) == list(range(1, STEPS + 1))


@pytest.mark.parametrize("machine", ["a", "b"])  # buffer and trainer are on the first
def test_a_machine_that_is_lost_comes_back(project: Path, machine: str) -> None:
    lose = f"""
    reach 5
    daemon_down {machine}
    daemon_up {machine}
    reach 10
    finish
    """
    steps = check(project, on_docker(project, lose))
    assert steps[-1] == STEPS and steps.count(1) == 1, "it began again"
    assert machine == "a" or steps == list(range(1, STEPS + 1))


def test_a_machine_joins_the_run_and_is_drained(project: Path) -> None:
    mount_python(project / "plan" / "c", ["relay-c", "generator-c-0"])
    (project / "late.toml").write_text(LATE, encoding="utf-8")
    grow = """
    reach 3
    operate() { umbra "$@" --broker tcp://10.88.0.1:5555 --keys plan/keys; }
    cat late.toml >> cluster.toml
    umbra plan cluster.toml run.toml --run-id real $SET
    compose c up -d
    until [ "$(on c docker ps --format '{{.Status}}' | grep -c '(healthy)')" = 2 ]; do
        if ! on a docker ps --quiet | grep -q .; then echo "the run ended" >&2; exit 1; fi
        sleep 0.5
    done
    at=$(steps); reach $((at + 3))
    operate drain --member generator-c-0 --member relay-c
    ended c
    compose c down
    echo "left at $(steps)"
    cp "$(on c docker volume inspect umbra-c_results --format '{{.Mountpoint}}')"/*/metrics.jsonl \\
        joined.jsonl
    finish
    """
    printed = on_docker(project, grow, "a b c")
    assert check(project, printed) == list(range(1, STEPS + 1))
    assert int(printed.split("left at ")[1].split()[0]) < STEPS, "it was there to the run's end"
    rows = [json.loads(line) for line in (project / "joined.jsonl").read_text().splitlines()]
    assert {row["receiver"] for row in rows if row["kind"] == "push"} == {"generator-c-0"}
