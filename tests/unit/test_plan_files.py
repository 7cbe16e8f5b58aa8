"""What is rendered from plans: commands that exist, files that hold to their specifications."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
import yaml
from fakes.clusters import PLANS, RUN_ID, cluster, plan_of, run_config
from hypothesis import given
from hypothesis import strategies as st

from umbra import cli
from umbra.deploy.cluster import invocation
from umbra.deploy.cluster.bundle import Bundle
from umbra.deploy.cluster.compose import container_paths
from umbra.deploy.cluster.invocation import modules_of
from umbra.deploy.cluster.plan import Plan, make_plan
from umbra.deploy.cluster.yaml import to_yaml
from umbra.proto.errors import UsageError
from umbra.services.runtime.config_loader import load_config

ROOT = Path(__file__).parents[2]
SCHEMAS = ROOT / "tests" / "schemas"
RUN_FILE = Path("/home/me/project/run.toml")

plans = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)


def render(plan: Plan, *formats: str, out: Path = Path("/out")) -> dict[str, str]:
    return Bundle(plan, modules_of(plan.config, RUN_FILE), out).render(formats)


def compose_files(plan: Plan) -> dict[str, dict[str, Any]]:
    """The compose file of each node, read back."""
    files = render(plan, "compose")
    return {
        path.split("/")[0]: yaml.safe_load(text)
        for path, text in files.items()
        if path.endswith("compose.yaml")
    }


# -- commands -------------------------------------------------------------------------------------


def parse(arguments: list[str]) -> None:
    """Parse `arguments` by the real commands, without running them; fails on what they refuse."""
    command: click.Command = cli.cli
    context = click.Context(command)
    name, rest = "umbra", arguments
    while True:
        context = command.make_context(name, rest, parent=context, resilient_parsing=False)
        if not isinstance(command, click.Group):
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # click 9 will have them all in args
            left = [*context.protected_args, *context.args]
        if not left:
            return
        name, found, rest = command.resolve_command(context, left)
        assert found is not None
        command = found


@plans
def test_every_planned_command_is_one_that_exists(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = container_paths(plan, "/m")
    for name, value in invocation.environment(plan, paths).items():
        monkeypatch.setenv(name, value)
    for process in plan.processes:
        parse(invocation.command(plan, process, paths))
        parse(invocation.health(plan, process))


def test_a_wrong_flag_is_noticed() -> None:
    with pytest.raises(click.NoSuchOption):
        parse(["weight-hub", "relay", "--hbu", "tcp://h:1"])
    with pytest.raises(click.NoSuchOption):
        parse(["buffer", "--prots", "[1, 2, 3]"])


@plans
def test_the_values_of_planned_flags_are_taken(plan: Plan) -> None:
    """A flag's text fills a key of the configuration; so it must be one that the key allows."""
    paths = container_paths(plan, "/m")
    sections = {"weight-hub": "weight_hub"}
    for process in plan.processes:
        section, *flags = invocation.command(plan, process, paths)
        pairs = list(pairwise(flags))
        overrides = [
            f"{sections.get(section, section)}.{flag[2:].replace('-', '_')}={value}"
            for flag, value in pairs
            if flag in ("--device", "--ranks", "--ports", "--advertise", "--stage", "--store")
            or (flag.endswith("listen") and process.task == "weight_hub")
        ]
        overrides += [value for flag, value in pairs if flag == "--set"]
        assert overrides
        load_config(overrides=overrides, environ={})


def test_ports_are_the_documented_six() -> None:
    for plan in PLANS.values():
        for node in plan.nodes:
            used = [port for p in plan.on(node) for port in invocation.ports(plan, p)]
            assert len(used) == len(set(used))
            assert set(used) <= set(range(5555, 5561))
    moved = plan_of(1, 1, base_port=7000)
    assert invocation.ports(moved, moved.the("buffer")) == [7000, 7001, 7002, 7003]
    assert invocation.environment(moved, container_paths(moved, ""))["UMBRA_BROKER"] == (
        "tcp://10.0.0.1:7000"
    )


# -- compose --------------------------------------------------------------------------------------


@plans
def test_compose_files_hold_to_the_specification(plan: Plan) -> None:
    schema = json.loads((SCHEMAS / "compose-spec.json").read_text(encoding="utf-8"))
    files = compose_files(plan)
    assert set(files) == {node.name for node in plan.nodes if plan.on(node)}
    for file in files.values():
        jsonschema.Draft7Validator(schema).validate(file)


def test_the_specification_is_really_checked() -> None:
    schema = json.loads((SCHEMAS / "compose-spec.json").read_text(encoding="utf-8"))
    file = compose_files(PLANS["one node"])["a"]
    file["services"]["buffer"]["helthcheck"] = {}
    with pytest.raises(jsonschema.ValidationError, match="helthcheck"):
        jsonschema.Draft7Validator(schema).validate(file)


@plans
def test_a_compose_file_starts_what_belongs_on_its_node(plan: Plan) -> None:
    files = compose_files(plan)
    for node in plan.nodes:
        services = files[node.name]["services"] if plan.on(node) else {}
        assert list(services) == [process.name for process in plan.on(node)]
        for process in plan.on(node):
            check_service(plan, services[process.name], process.name, files[node.name]["volumes"])


def check_service(plan: Plan, service: dict[str, Any], name: str, volumes: dict[str, Any]) -> None:
    """Everything that a service needs in order to run, and nothing that it should not have."""
    process = next(p for p in plan.processes if p.name == name)
    assert service["restart"].startswith("on-failure:")
    assert service["healthcheck"]["test"][:3] == ["CMD", "umbra", "ping"]
    assert service["env_file"] == ["umbra.env"]
    assert service["cap_drop"] == ["ALL"]
    mounted = {volume["target"]: volume for volume in service["volumes"]}
    for volume in service["volumes"]:
        assert volume["type"] == "bind" or volume["source"] in volumes
        assert volume["type"] == "volume" or volume["read_only"]
    assert "/srv/umbra/results" in mounted
    assert ("/srv/umbra/store" in mounted) == (process.task == "buffer")
    assert ("/data/prompts.jsonl" in mounted) == (process.task == "buffer")
    reserved = service.get("deploy", {}).get("resources", {}).get("reservations", {})
    ids = [gpu for device in reserved.get("devices", []) for gpu in device["device_ids"]]
    assert ids == [str(gpu) for gpu in process.gpus]
    if plan.cluster.network == "host":
        assert service["network_mode"] == "host"
        assert "ports" not in service
    else:
        published = [port["published"] for port in service.get("ports", [])]
        assert published == [str(port) for port in invocation.ports(plan, process)]
        assert not {"network_mode", "privileged", "pid", "ipc"} & set(service)


def test_others_on_the_node_wait_for_the_buffer() -> None:
    services = compose_files(PLANS["separate"])["a"]["services"]
    assert services["logp-a-0"]["depends_on"] == {"buffer": {"condition": "service_healthy"}}
    assert "depends_on" not in services["buffer"]
    assert "depends_on" not in compose_files(PLANS["separate"])["b"]["services"]["ref-logp-b-0"]


def test_images() -> None:
    def images(plan: Plan) -> dict[str, str]:
        return {p.task: invocation.image(plan, p) for p in plan.processes}

    assert images(plan_of(1, 1, image="registry.example/umbra", tag="1.2")) == {
        "buffer": "registry.example/umbra-broker:1.2",
        "weight_hub": "registry.example/umbra-broker:1.2",
        "relay": "registry.example/umbra-broker:1.2",
        "train": "registry.example/umbra-trainer:1.2",
        "generate": "registry.example/umbra-generator:1.2",
    }
    assert set(images(plan_of(0, 0)).values()) == {"umbra-broker:latest", "umbra-cpu:latest"}
    # Those that broadcast need CuPy.
    assert images(PLANS["host network"])["relay"] == "umbra-trainer:latest"


def test_own_modules_are_mounted_and_found() -> None:
    plan = PLANS["own modules"]
    files = render(plan, "compose")
    assert "PYTHONPATH=/home/me/project\n" in files["a/umbra.env"]
    services = yaml.safe_load(files["b/compose.yaml"])["services"]
    assert any(v["source"] == "/home/me/project" for v in services["generator-b-0"]["volumes"])
    assert "PYTHONPATH" not in render(PLANS["one GPU"], "compose")["a/umbra.env"]


def test_the_configuration_beside_it_is_the_run_file_s(tmp_path: Path) -> None:
    plan = plan_of(1, 1, overrides=("trainer.learning_rate=3e-4",))
    bundle = Bundle(plan, "", tmp_path / "new" / "out")
    bundle.write(bundle.render(["compose"]))
    read = load_config(tmp_path / "new" / "out" / "b" / "run.toml", environ={})
    assert read == plan.config


def test_the_same_plan_gives_the_same_files() -> None:
    formats = ("compose", "slurm", "kubernetes")
    first = make_plan(cluster(1, 1), run_config(), RUN_ID)
    assert render(first, *formats) == render(plan_of(1, 1), *formats)


# -- Kubernetes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["separate", "one node", "head without GPUs", "no GPUs", "own modules"]
)
def test_manifests_hold_to_the_schema(name: str) -> None:
    schema = json.loads((SCHEMAS / "kubernetes.json").read_text(encoding="utf-8"))
    plan = PLANS[name]
    documents = list(yaml.safe_load_all(render(plan, "kubernetes")["kubernetes.yaml"]))
    for document in documents:
        reference = f"#/definitions/{schema['kinds'][document['kind']]}"
        jsonschema.Draft7Validator({**schema, "$ref": reference}).validate(document)
    check_manifests(plan, documents)


def check_manifests(plan: Plan, documents: list[dict[str, Any]]) -> None:
    """What a schema cannot see: names that fit together, and every process once."""
    names = [(document["kind"], document["metadata"]["name"]) for document in documents]
    assert len(names) == len(set(names))
    for _, name in names:
        assert re.fullmatch(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", name)
    of_kind = {
        kind: {d["metadata"]["name"]: d for d in documents if d["kind"] == kind}
        for kind in ("Job", "Service", "PersistentVolumeClaim", "ConfigMap")
    }
    containers: list[str] = []
    for job in of_kind["Job"].values():
        template = job["spec"]["template"]
        pod = template["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for volume in volumes.values():
            if "persistentVolumeClaim" in volume:
                claim = volume["persistentVolumeClaim"]["claimName"]
                assert claim in of_kind["PersistentVolumeClaim"]
            if "configMap" in volume:
                assert volume["configMap"]["name"] in of_kind["ConfigMap"]
        for container in pod["containers"]:
            containers.append(container["name"])
            parse(container["args"])
            assert {mount["name"] for mount in container["volumeMounts"]} <= set(volumes)
            broker = {e["name"]: e["value"] for e in container["env"]}["UMBRA_BROKER"]
            host = broker.removeprefix("tcp://").rpartition(":")[0]
            selector = of_kind["Service"][host]["spec"]["selector"]
            targets = [
                j for j in of_kind["Job"].values()
                if selector.items() <= j["spec"]["template"]["metadata"]["labels"].items()
            ]  # fmt: skip
            assert len(targets) == 1
    assert sorted(containers) == sorted(process.name for process in plan.processes)


@pytest.mark.parametrize(
    ("name", "told"),
    [("hybrid", "gives a GPU to one container"), ("host network", "cluster.network = host")],
)
def test_what_kubernetes_cannot_do_is_refused(name: str, told: str) -> None:
    plan = PLANS[name]
    with pytest.raises(UsageError, match=told):
        render(plan, "kubernetes")


# -- SLURM ----------------------------------------------------------------------------------------

FAKE_SRUN = """\
#!/bin/sh
# Notes what it was asked for, and fails twice for the generator.
printf '%s\\n' "$*" >> "$CALLS"
case "$*" in
    *"umbra generator"*) [ "$(grep -c 'umbra generator' "$CALLS")" -gt 2 ] || exit 5 ;;
    *"umbra trainer"*) exit "${TRAINER_EXIT:-0}" ;;
esac
"""


@pytest.mark.parametrize("code", [0, 2])
def test_the_script_starts_every_step_and_ends_as_the_trainer(tmp_path: Path, code: int) -> None:
    plan = plan_of(2, 1, overrides=(f"run.dir={tmp_path}/runs",))
    text = render(plan, "slurm", out=tmp_path)["run.sbatch"]
    script, srun, calls = tmp_path / "run.sbatch", tmp_path / "srun", tmp_path / "calls"
    script.write_text(text, encoding="utf-8")
    srun.write_text(FAKE_SRUN, encoding="utf-8")
    srun.chmod(0o755)
    (tmp_path / "sleep").symlink_to("/bin/true")  # between restarts
    environ = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "CALLS": str(calls),
        "TRAINER_EXIT": str(code),
    }
    done = subprocess.run(["bash", script], env=environ, timeout=30, check=False)
    assert done.returncode == code
    lines = calls.read_text(encoding="utf-8").splitlines()
    started = {line.split("--name ")[1].split()[0] for line in lines}
    assert started <= {process.name for process in plan.processes}
    if code == 0:  # a failure of the trainer ends the others at once
        assert started == {process.name for process in plan.processes}
        assert sum("umbra generator" in line for line in lines) == 3
    (trainer,) = [line for line in lines if "umbra trainer" in line]
    assert "--nodelist=a" in trainer
    assert "CUDA_VISIBLE_DEVICES=0,1 umbra trainer" in trainer


@plans
def test_scripts_are_valid_shell_and_name_all_nodes(plan: Plan, tmp_path: Path) -> None:
    text = render(plan, "slurm", out=tmp_path)["run.sbatch"]
    checked = subprocess.run(["bash", "-n"], input=text, text=True, timeout=30, check=False)
    assert checked.returncode == 0
    used = [node.name for node in plan.nodes if plan.on(node)]
    assert f"#SBATCH --nodes={len(used)}\n#SBATCH --nodelist={','.join(used)}\n" in text


# -- the command ----------------------------------------------------------------------------------

CLUSTER = """\
[cluster]
groups = ["train", "generate"]
[[nodes]]
name = "a"
address = "10.0.0.1"
[[nodes]]
name = "b"
address = "10.0.0.2"
"""


def plan_command(tmp_path: Path, *flags: str) -> int:
    (tmp_path / "cluster.toml").write_text(CLUSTER, encoding="utf-8")
    (tmp_path / "run.toml").write_text('[model]\npath = "m"\n', encoding="utf-8")
    files = [str(tmp_path / "cluster.toml"), str(tmp_path / "run.toml")]
    return cli.main(["plan", *files, "--out", str(tmp_path / "out"), *flags])


def test_the_table_comes_first_and_then_the_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan_command(tmp_path) == 0
    out = capsys.readouterr().out
    assert out.startswith("node  address")
    assert out.endswith(f"6 files written to {tmp_path / 'out'}\n")
    written = sorted(str(p.relative_to(tmp_path / "out")) for p in tmp_path.rglob("out/*/*"))
    names = ("compose.yaml", "run.toml", "umbra.env")
    assert written == [f"{node}/{name}" for node in "ab" for name in names]
    assert tomllib.loads((tmp_path / "out" / "a" / "run.toml").read_text())["run"]["name"] == "run"


def test_a_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_command(tmp_path, "--dry-run", "--json", "--run-id", "r") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["run"] == "r"
    assert [node["name"] for node in plan["nodes"]] == ["a", "b"]
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").write_text("a file")
    assert plan_command(tmp_path) == 2
    assert "choose another --out" in capsys.readouterr().err


def test_planning_needs_no_torch() -> None:
    code = "import sys, umbra.deploy.cluster.command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=50, check=False).returncode == 0


# -- YAML -----------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), VALUES, max_size=5))
def test_yaml_is_read_back(tree: dict[str, Any]) -> None:
    assert yaml.safe_load(to_yaml(tree) if tree else "{}") == tree
