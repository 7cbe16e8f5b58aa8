"""`umbra plan`: files with commands that exist and by their specifications; keys; YAML, TOML."""

import json
import os
import stat
import tomllib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from fakes.clusters import PLANS, SCHEMAS, launched, parse_planned, plan_of, plan_on, plans, render
from hypothesis import given
from hypothesis import strategies as st

from umbra import cli
from umbra.deploy.cluster.cluster_file import Node, planner
from umbra.deploy.cluster.containers import to_yaml
from umbra.deploy.cluster.launch import KINDS, Launch, container_paths, environment, ports
from umbra.deploy.cluster.plan import Plan, Process
from umbra.proto.access import KEY_ROLES
from umbra.proto.net.keys import load_keys
from umbra.services.config.loader import load_config, to_toml


def compose_files(plan: Plan) -> dict[str, dict[str, Any]]:
    files = render(plan, "compose").items()
    return {path.split("/")[0]: yaml.safe_load(text) for path, text in files if "compose" in path}


@plans
def test_every_planned_command_exists(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a name of its own, with GPUs that the node has and ports that are documented."""
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
        assert set(process.gpus) <= set(range(process.node.gpus))
    names = {process.name for node in plan.nodes for process in plan.on(node)}
    assert len(plan.processes) == len(names)
    for node in plan.nodes:
        used = [port for process in plan.on(node) for port in ports(plan, process)]
        assert len(used) == len(set(used))
        assert set(used) <= set(range(5555, 5562))


def test_ports_can_be_moved() -> None:
    moved = plan_of(1, 1, base_port=7000)
    assert ports(moved, moved.the("buffer")) == [7000, 7001, 7002]
    variables = environment(moved, container_paths(moved, "", keys=False))
    assert variables["UMBRA_BROKER"] == "tcp://10.0.0.1:7000"


@plans
def test_a_compose_file_starts_what_belongs_on_its_node(plan: Plan) -> None:
    """And holds to the specification."""
    schema = json.loads((SCHEMAS / "compose-spec.json").read_text(encoding="utf-8"))
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
    first, second = compose_files(plan_on(nodes)).values()
    assert first["name"] == "umbra-gpu-1-example-com"
    text = render(plan_of(1, 1, overrides=["model.path=/m/$x"]), "compose")["a/compose.yaml"]
    assert '"/m/$$x"' in text and '"/m/$x"' not in text  # as compose reads it: no variable
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
    for named in ("sandbox=mine:S", 'options.tools=["mine:add"]', "kind=openenv id=http://h:1"):
        plan = plan_of(1, 1, overrides=[f"environment.{setting}" for setting in named.split()])
        text = render(plan, "compose")["a/umbra.env"]
        assert ("UMBRA_SEARCH=" in text) == ("mine:" in named), named


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
Planned = Callable[..., str]


@pytest.fixture
def planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Planned:
    """Plan `run` into out/, with the run file in `project`; what was said, on which stream."""

    def plan(
        *flags: str, code: int = 0, project: str = ".", run: str = "", cluster: str = CLUSTER
    ) -> str:
        (tmp_path / "cluster.toml").write_text(cluster, encoding="utf-8")
        run_file = tmp_path / project / "run.toml"
        run_file.parent.mkdir(exist_ok=True)
        run_file.write_text(f'[model]\npath = "m"\n{run}', encoding="utf-8")
        files = [str(tmp_path / "cluster.toml"), str(run_file)]
        assert cli.main(["plan", *files, "--out", str(tmp_path / "out"), *flags]) == code
        return "".join(capsys.readouterr())

    return plan


def test_the_table_precedes_the_files_if_any(planned: Planned, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "weight-hub" in planned("--dry-run", "--run-id", "r")
    assert not out.exists()
    said = planned("--set", "trainer.learning_rate=3e-4")
    assert said.startswith("node  address")
    assert f"\n6 files written to {out}\nnext: copy " in said
    written = sorted(str(p.relative_to(out)) for p in out.glob("[ab]/*"))
    names = ("compose.yaml", "keys", "run.toml", "umbra.env")
    assert written == [f"{node}/{name}" for node in "ab" for name in names]
    read = load_config(out / "b" / "run.toml", environ={})
    assert (read.run.name, read.trainer.learning_rate) == ("run", 3e-4)


def test_each_node_gets_the_keys_that_it_needs(planned: Planned, tmp_path: Path) -> None:
    planned()
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
    planned()  # again: the same keys
    assert {path.name: path.read_bytes() for path in (out / "keys").iterdir()} == before


def test_keys_of_somebody_else_are_not_made(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    monkeypatch.setattr(os, "getegid", lambda: 100)
    assert planner() == "1234:100"
    said = planned(code=2, cluster=CLUSTER.replace("]", "]\nuser = '7'", 1))
    assert "leave it out (then it is you, 1234:100), or plan as root" in said


def test_keys_of_the_user_s_own(planned: Planned, tmp_path: Path) -> None:
    own, out, name = tmp_path / "mine", tmp_path / "out", "generator.key_secret"
    assert cli.main(["keys", str(own)]) == 0
    planned("--set", f"security.keys={own}")
    assert (out / "b" / "keys" / name).read_bytes() == (own / name).read_bytes()
    assert not (out / "keys").exists()
    assert str(own) not in (out / "a" / "run.toml").read_text()
    (own / name).unlink()
    said = planned("--set", f"security.keys={own}", code=2)
    assert f"No such file or directory: {own / name}" in said


def test_keys_that_the_user_s_modules_can_read_are_named(planned: Planned, tmp_path: Path) -> None:
    own = '[environment]\nkind = "mine:Game"\n'
    for project, more, seen in (
        (".", (), "out/keys"),
        ("project", (), ""),
        (".", ("--set", "environment.kind=exact"), ""),
        (".", ("--format", "slurm"), ""),
    ):
        said = planned(*more, project=project, run=own)
        told = f"keys of other roles in {tmp_path / seen}: set another --out" in said
        assert told == bool(seen), (project, more)


def test_a_run_without_keys_has_to_ask_for_it(planned: Planned, tmp_path: Path) -> None:
    planned("--set", "security.insecure=true")
    assert not list(tmp_path.rglob("keys"))
    assert "secrets" not in yaml.safe_load((tmp_path / "out/a/compose.yaml").read_text())
    assert "UMBRA_SECURITY" not in (tmp_path / "out/a/umbra.env").read_text()
    assert tomllib.loads((tmp_path / "out/a/run.toml").read_text())["security"]["insecure"]


def test_kubernetes_is_told_of_the_keys(planned: Planned, tmp_path: Path) -> None:
    line = f"kubectl create secret generic run-1-keys --from-file={tmp_path / 'out' / 'keys'}\n"
    assert line in planned("--format", "kubernetes", "--run-id", "Run_1")
    documents = list(yaml.safe_load_all((tmp_path / "out/kubernetes.yaml").read_text()))
    pods = [d["spec"]["template"]["spec"] for d in documents if d["kind"] == "Job"]
    secrets = [v["secret"] for pod in pods for v in pod["volumes"] if "secret" in v]
    assert {secret["secretName"] for secret in secrets} == {"run-1-keys"}
    assert not (tmp_path / "out" / "a").exists()


KEYS = st.text(max_size=50)


def values(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        st.booleans() | st.text() | leaves,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
        max_leaves=20,
    )


SECTIONS = st.from_regex("[a-z_]{1,8}", fullmatch=True)
VALUES = values(st.none() | st.integers())
TOML_VALUES = values(st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False))


@given(st.dictionaries(SECTIONS, st.dictionaries(KEYS, TOML_VALUES, max_size=5), max_size=3))
def test_toml_is_read_back(tree: dict[str, dict[str, Any]]) -> None:
    assert tomllib.loads(to_toml(tree)) == tree


@given(st.dictionaries(KEYS, VALUES, max_size=5))
def test_yaml_is_read_back(tree: dict[str, Any]) -> None:
    assert yaml.safe_load(to_yaml(tree) if tree else "{}") == tree


@pytest.mark.parametrize("text", ["1e3", "y", "0o17", "on", "~", "12:30"])
def test_text_that_a_reader_of_yaml_may_take_for_something_else_is_quoted(text: str) -> None:
    """PyYAML reads back what Kubernetes and compose would not: the test looks at the text."""
    assert to_yaml({text: text}) == f'"{text}": "{text}"\n'
