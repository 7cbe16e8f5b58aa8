"""`umbra plan`: files with commands that exist and by their specifications; keys; YAML, TOML."""

import json
import os
import stat
import sys
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from fakes import clusters
from fakes.clusters import PLANS, launched, parse_planned, plan_of, plans, render
from hypothesis import given
from hypothesis import strategies as st

from umbra import cli
from umbra.deploy.cluster.cluster_file import ClusterFile, ClusterSpec, Node, planner
from umbra.deploy.cluster.command import render as render_plan
from umbra.deploy.cluster.command import write
from umbra.deploy.cluster.containers import to_yaml
from umbra.deploy.cluster.launch import KINDS, Launch, container_paths, environment, ports
from umbra.deploy.cluster.plan import Plan, Process, make_plan
from umbra.proto.access import KEY_ROLES
from umbra.proto.net.keys import load_keys
from umbra.services.config.loader import load_config, to_toml


def compose_files(plan: Plan) -> dict[str, dict[str, Any]]:
    files = render(plan, "compose").items()
    return {path.split("/")[0]: yaml.safe_load(text) for path, text in files if "compose" in path}


@plans
def test_every_planned_command_exists(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = container_paths(plan, "/m", keys=False)
    for name, value in environment(plan, paths).items():
        monkeypatch.setenv(name, value)
    for process in plan.processes:
        one = Launch(plan, process, paths)
        parse_planned(one.command)
        parse_planned(one.health)
        settings = [value for flag, value in pairwise(one.command) if flag == "--set"]
        assert settings
        load_config(overrides=settings, environ={})


def test_ports_are_the_documented_ones() -> None:
    for plan in PLANS.values():
        for node in plan.nodes:
            used = [port for p in plan.on(node) for port in ports(plan, p)]
            assert len(used) == len(set(used))
            assert set(used) <= set(range(5555, 5562))
    moved = plan_of(1, 1, base_port=7000)
    assert ports(moved, moved.the("buffer")) == [7000, 7001, 7002]
    assert environment(moved, container_paths(moved, "", keys=False))["UMBRA_BROKER"] == (
        "tcp://10.0.0.1:7000"
    )


@plans
def test_a_compose_file_starts_what_belongs_on_its_node(plan: Plan) -> None:
    """And holds to the specification."""
    schema = json.loads((clusters.SCHEMAS / "compose-spec.json").read_text(encoding="utf-8"))
    files = compose_files(plan)
    assert set(files) == {node.name for node in plan.nodes if plan.on(node)}
    for node in (node for node in plan.nodes if plan.on(node)):
        file = files[node.name]
        jsonschema.Draft7Validator(schema).validate(file)
        assert list(file["services"]) == [process.name for process in plan.on(node)]
        for process in plan.on(node):
            check_service(plan, file["services"][process.name], process, file["volumes"])


def check_service(
    plan: Plan, service: dict[str, Any], process: Process, volumes: dict[str, Any]
) -> None:
    """Everything that a service needs in order to run, and nothing that it should not have."""
    assert service["restart"].startswith("on-failure:")
    assert service["command"] == launched(plan, process).command
    assert "start_interval" not in service["healthcheck"]  # which needs Docker Engine 25
    assert int(service["logging"]["options"]["max-file"]) > 1
    assert service["healthcheck"]["test"][:3] == ["CMD", "umbra", "status"]
    assert service["env_file"] == ["umbra.env"]
    assert service["cap_drop"] == ["ALL"]
    mounted = {volume["target"]: volume for volume in service["volumes"]}
    for volume in service["volumes"]:
        assert volume["type"] == "bind" or volume["source"] in volumes
        assert volume["type"] == "volume" or volume["read_only"]
    assert "/srv/umbra/results" in mounted
    assert ("/srv/umbra/store" in mounted) == (process.task == "buffer")
    assert ("/data/prompts.jsonl" in mounted) == (process.task == "buffer")
    secret = [s["source"] for s in service["secrets"] if s["source"].endswith("_secret")]
    assert secret == sorted({f"{KINDS[process.task].role}.key_secret", "monitor.key_secret"})
    reserved = service.get("deploy", {}).get("resources", {}).get("reservations", {})
    ids = [gpu for device in reserved.get("devices", []) for gpu in device["device_ids"]]
    assert ids == [str(gpu) for gpu in process.gpus]
    if launched(plan, process).host_network:
        assert service["network_mode"] == "host"
        assert "ports" not in service
        assert "hostname" not in service
    else:
        assert service["hostname"] == process.node.name  # its host in `umbra status`
        assert {port["host_ip"] for port in service.get("ports", [])} <= {process.node.address}
        published = [port["published"] for port in service.get("ports", [])]
        assert published == [str(port) for port in ports(plan, process)]
        assert not {"network_mode", "privileged", "pid", "ipc"} & set(service)


def test_nodes_with_dots_and_with_names_for_addresses() -> None:
    addresses = {"gpu-1.example.com": "gpu-1.example.com", "gpu-2.example.com": "10.0.0.2"}
    nodes = [Node(name=name, address=address, gpus=1) for name, address in addresses.items()]
    plan = make_plan(
        ClusterFile(cluster=ClusterSpec(), nodes=nodes), clusters.run_config(), clusters.RUN_ID
    )
    first, second = compose_files(plan).values()
    assert first["name"] == "umbra-gpu-1-example-com"
    ports = first["services"]["buffer"]["ports"]
    assert not any("host_ip" in port for port in ports)  # Docker takes no names there
    assert "generator-gpu-2.example.com-0" in second["services"]


def test_images() -> None:
    def images(plan: Plan) -> dict[str, str]:
        return {p.task: launched(plan, p).image for p in plan.processes}

    kinds = {**dict.fromkeys(("buffer", "weight_hub", "relay"), "broker"), "train": "trainer"}
    assert images(plan_of(1, 1, image="registry.example/umbra", tag="1.2")) == {
        task: f"registry.example/umbra-{kind}:1.2"
        for task, kind in {**kinds, "generate": "generator"}.items()
    }
    assert set(images(plan_of(0, 0)).values()) == {"umbra-broker:latest", "umbra-cpu:latest"}
    # Those that broadcast need CuPy.
    assert images(PLANS["host network"])["relay"] == "umbra-trainer:latest"


def test_what_is_read_is_mounted_where_it_is_read() -> None:
    plan = plan_of(
        *(1, 1, 1),
        stages=("ref_logp",),
        groups=["train", "ref_logp", "generate"],
        overrides=(
            "scorer.model=/models/reference",
            "trainer.objective=ppo_critic",
            "critic.path=/models/critic",
            "eval.prompts=/data/heldout.jsonl",  # which the buffer reads
            "data.prompts=/data/a.jsonl",
        ),
    )
    read = {process.task: launched(plan, process).inputs for process in plan.processes}
    assert read == {
        "buffer": ["/data/a.jsonl", "/data/heldout.jsonl"],
        "weight_hub": ["/models/m"],
        "relay": [],
        "train": ["/models/critic", "/models/m"],
        "ref_logp": ["/models/m", "/models/reference"],
        "generate": ["/models/m"],
    }


def test_own_modules_are_mounted_and_found() -> None:
    plan = PLANS["own modules"]
    files = render(plan, "compose")
    assert "UMBRA_SEARCH=/home/me/project\n" in files["a/umbra.env"]
    services = yaml.safe_load(files["b/compose.yaml"])["services"]
    assert any(v["source"] == "/home/me/project" for v in services["generator-b-0"]["volumes"])
    assert "UMBRA_SEARCH" not in render(PLANS["one GPU"], "compose")["a/umbra.env"]


def test_the_configuration_beside_it_is_the_run_file_s(tmp_path: Path) -> None:
    plan = plan_of(1, 1, overrides=("trainer.learning_rate=3e-4",))
    out = tmp_path / "new" / "out"
    write(render_plan(plan, ["compose"], "", out, None), out)
    read = load_config(tmp_path / "new" / "out" / "b" / "run.toml", environ={})
    assert read == plan.config


def test_what_is_elsewhere_is_fetched_into_a_volume_of_the_node() -> None:
    named = ("model.path=acme/tiny", "data.prompts=datasets:acme/sums")
    plan = plan_of(1, 1, overrides=named)
    (home, other) = compose_files(plan).values()
    assert "cache" in home["volumes"] and "cache" in other["volumes"]
    where = container_paths(plan, "", keys=False).cache
    for name, service in (home["services"] | other["services"]).items():
        mounted = [v["source"] for v in service["volumes"] if v["target"] == where]
        fetches = not name.startswith("relay")
        assert mounted == (["cache"] if fetches else []), name
        assert ("HF_TOKEN" in service.get("environment", ())) == fetches
    assert "-trainer:" in home["services"]["buffer"]["image"]  # which has datasets
    text = render(plan, "compose")["a/umbra.env"]
    assert f"HF_HOME={where}/huggingface\n" in text and "HF_TOKEN" not in text
    documents = list(yaml.safe_load_all(render(plan, "kubernetes")["kubernetes.yaml"]))
    claims = [d["metadata"]["name"] for d in documents if d["kind"] == "PersistentVolumeClaim"]
    assert sum(name.endswith("-cache") for name in claims) == 2


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


def plan_command(tmp_path: Path, *flags: str, project: str = ".", run: str = "") -> int:
    """Plan `run` on CLUSTER into out/; the run file lies in `project`."""
    (tmp_path / "cluster.toml").write_text(CLUSTER, encoding="utf-8")
    run_file = tmp_path / project / "run.toml"
    run_file.parent.mkdir(exist_ok=True)
    run_file.write_text(f'[model]\npath = "m"\n{run}', encoding="utf-8")
    files = [str(tmp_path / "cluster.toml"), str(run_file)]
    return cli.main(["plan", *files, "--out", str(tmp_path / "out"), *flags])


def test_the_table_precedes_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_command(tmp_path) == 0
    out = capsys.readouterr().out
    assert out.startswith("node  address")
    assert f"\n6 files written to {tmp_path / 'out'}\nnext: copy " in out
    written = sorted(str(p.relative_to(tmp_path / "out")) for p in tmp_path.glob("out/[ab]/*"))
    names = ("compose.yaml", "keys", "run.toml", "umbra.env")
    assert written == [f"{node}/{name}" for node in "ab" for name in names]
    assert tomllib.loads((tmp_path / "out" / "a" / "run.toml").read_text())["run"]["name"] == "run"


def test_each_node_gets_the_keys_that_it_needs(tmp_path: Path) -> None:
    assert plan_command(tmp_path) == 0
    out = tmp_path / "out"
    secret = {n: sorted(p.stem for p in (out / n / "keys").glob("*.key_secret")) for n in "ab"}
    assert secret == {
        "a": ["buffer", "monitor", "trainer", "weight_hub"],
        "b": ["generator", "monitor", "relay"],
    }
    for path in out.glob("*/keys/*"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    load_keys(out / "b" / "keys", "generator")
    assert "UMBRA_SECURITY__KEYS=/srv/umbra/keys\n" in (out / "b" / "umbra.env").read_text()
    before = {path.name: path.read_bytes() for path in (out / "keys").iterdir()}
    assert len(before) == 2 * len(KEY_ROLES)
    assert plan_command(tmp_path) == 0  # again: the same keys
    assert {path.name: path.read_bytes() for path in (out / "keys").iterdir()} == before


def test_keys_of_somebody_else_are_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    monkeypatch.setattr(os, "getegid", lambda: 100)
    assert planner() == "1234:100"
    monkeypatch.setattr(sys.modules[__name__], "CLUSTER", CLUSTER.replace("]", "]\nuser = '7'", 1))
    assert plan_command(tmp_path) == 2
    assert "leave it out (then it is you, 1234:100), or plan as root" in capsys.readouterr().err


def test_keys_of_the_user_s_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["keys", str(tmp_path / "mine")]) == 0
    assert plan_command(tmp_path, "--set", f"security.keys={tmp_path / 'mine'}") == 0
    name = "generator.key_secret"
    assert (tmp_path / "out/b/keys" / name).read_bytes() == (tmp_path / "mine" / name).read_bytes()
    assert not (tmp_path / "out" / "keys").exists()
    assert str(tmp_path / "mine") not in (tmp_path / "out" / "a" / "run.toml").read_text()
    (tmp_path / "mine" / name).unlink()
    capsys.readouterr()
    assert plan_command(tmp_path, "--set", f"security.keys={tmp_path / 'mine'}") == 2
    assert f"No such file or directory: {tmp_path / 'mine' / name}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("project", "more", "seen"),
    [
        (".", (), "out/keys"),
        ("project", (), ""),
        (".", ("--set", "environment.kind=exact"), ""),
        (".", ("--format", "slurm"), ""),
    ],
)
def test_keys_that_the_user_s_modules_can_read_are_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    project: str,
    more: tuple[str, ...],
    seen: str,
) -> None:
    own = '[environment]\nkind = "mine:Game"\n'
    assert plan_command(tmp_path, *more, project=project, run=own) == 0
    said = capsys.readouterr().err
    assert (f"keys of other roles in {tmp_path / seen}: set another --out" in said) == bool(seen)


def test_a_run_without_keys_has_to_ask_for_it(tmp_path: Path) -> None:
    assert plan_command(tmp_path, "--set", "security.insecure=true") == 0
    assert not list(tmp_path.rglob("keys"))
    assert "secrets" not in yaml.safe_load((tmp_path / "out/a/compose.yaml").read_text())
    assert "UMBRA_SECURITY" not in (tmp_path / "out/a/umbra.env").read_text()
    assert tomllib.loads((tmp_path / "out/a/run.toml").read_text())["security"]["insecure"]


def test_kubernetes_is_told_of_the_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_command(tmp_path, "--format", "kubernetes", "--run-id", "Run_1") == 0
    keys = tmp_path / "out" / "keys"
    line = f"kubectl create secret generic run-1-keys --from-file={keys}\n"
    assert line in capsys.readouterr().out
    documents = list(yaml.safe_load_all((tmp_path / "out/kubernetes.yaml").read_text()))
    pods = [d["spec"]["template"]["spec"] for d in documents if d["kind"] == "Job"]
    secrets = [v["secret"] for pod in pods for v in pod["volumes"] if "secret" in v]
    assert {secret["secretName"] for secret in secrets} == {"run-1-keys"}
    assert not (tmp_path / "out" / "a").exists()


def test_a_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_command(tmp_path, "--dry-run", "--run-id", "r") == 0
    assert "weight-hub" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


KEYS = st.text(max_size=50)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=20,
)
SECTIONS = st.from_regex("[a-z_]{1,8}", fullmatch=True)
TOML_VALUES = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(SECTIONS, st.dictionaries(KEYS, TOML_VALUES, max_size=5), max_size=3))
def test_toml_is_read_back(tree: dict[str, dict[str, Any]]) -> None:
    assert tomllib.loads(to_toml(tree)) == tree


@given(st.dictionaries(KEYS, VALUES, max_size=5))
def test_yaml_is_read_back(tree: dict[str, Any]) -> None:
    assert yaml.safe_load(to_yaml(tree) if tree else "{}") == tree


@pytest.mark.parametrize("text", ["1e3", "y", "N", "0o17", "1_000", "on", "~", "0x1f", "12:30"])
def test_text_that_a_reader_of_yaml_may_take_for_something_else_is_quoted(text: str) -> None:
    """PyYAML reads back what Kubernetes and compose would not: the test looks at the text."""
    assert to_yaml({text: text}) == f'"{text}": "{text}"\n'
