"""Nodes that join a run under way: what they get, and that nothing else changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from fakes.clusters import RUN_ID, run_config

from umbra import cli
from umbra.deploy.cluster.cluster_file import ClusterFile, ClusterSpec, Node, load_cluster
from umbra.deploy.cluster.plan import Plan, make_plan
from umbra.proto.errors import UsageError


def planned(gpus: int, joining: int, *overrides: str) -> Plan:
    """Two nodes with `gpus`, and one with `joining` that joins."""
    nodes = [
        Node(name="a", address="10.0.0.1", gpus=gpus),
        Node(name="b", address="10.0.0.2", gpus=gpus),
        Node(name="late", address="10.0.0.9", gpus=joining, joins=True),
    ]
    file = ClusterFile(cluster=ClusterSpec(), nodes=nodes)
    return make_plan(file, run_config(*overrides), RUN_ID)


def test_a_node_that_joins_generates_and_changes_nothing_else() -> None:
    plan = planned(4, 5, "generator.tensor_parallel=2")
    late = [(process.name, process.gpus) for process in plan.on(plan.nodes[2])]
    assert late == [
        ("relay-late", ()), ("generator-late-0", (0, 1)), ("generator-late-1", (2, 3)),
    ]  # fmt: skip
    assert plan.idle(plan.nodes[2]) == [4]
    others = [p for p in plan.processes if p.node.name != "late"]
    file = ClusterFile(cluster=ClusterSpec(), nodes=list(plan.nodes[:2]))
    without = make_plan(file, run_config("generator.tensor_parallel=2"), RUN_ID)
    assert tuple(others) == without.processes
    assert plan.groups == without.groups


def test_without_gpus_it_has_one_generator() -> None:
    plan = planned(0, 0)
    assert [p.task for p in plan.on(plan.nodes[2])] == ["relay", "generate"]
    with pytest.raises(UsageError, match=r"node late joins .* needs 1 GPUs .* it has 0"):
        planned(4, 0)


CLUSTER = """\
[cluster]
{cluster}
[[nodes]]
name = "a"
address = "10.0.0.1"
[[nodes]]
name = "b"
address = "10.0.0.2"
"""
LATE = '[[nodes]]\nname = "late"\naddress = "10.0.0.9"\njoins = true\n'
LATER = '[[nodes]]\nname = "later"\naddress = "10.0.0.10"\njoins = true\n'


class Planned:
    """The command on files of its own."""

    def __init__(self, folder: Path) -> None:
        self.out = folder / "out"
        self._cluster, self._run = folder / "cluster.toml", folder / "run.toml"
        self.write()

    def write(self, nodes: str = "", cluster: str = "", run: str = "") -> None:
        self._cluster.write_text(CLUSTER.format(cluster=cluster) + nodes, encoding="utf-8")
        self._run.write_text(f'[model]\npath = "m"\n{run}', encoding="utf-8")

    def __call__(self, *flags: str) -> int:
        files = [str(self._cluster), str(self._run), "--out", str(self.out)]
        return cli.main(["plan", *files, *flags])

    def written(self) -> dict[str, bytes]:
        return {
            str(path.relative_to(self.out)): path.read_bytes()
            for path in self.out.rglob("*")
            if path.is_file()
        }


@pytest.fixture
def plan(tmp_path: Path) -> Planned:
    return Planned(tmp_path)


def test_its_files_are_of_the_run_under_way(plan: Planned) -> None:
    assert plan() == 0
    before = plan.written()
    run_id = json.loads(before["plan.json"])["run"]
    plan.write(LATE)
    assert plan("--add", "late") == 0
    after = plan.written()
    new = {name for name in after if after[name] != before.get(name)}
    folder = {name for name in new if name.startswith("late/")}
    assert new - folder == {"plan.json"}
    assert {"late/compose.yaml", "late/run.toml", "late/umbra.env"} <= folder
    assert after["late/run.toml"] == before["a/run.toml"]
    assert after["late/keys/relay.key_secret"] == before["keys/relay.key_secret"]
    services = yaml.safe_load(after["late/compose.yaml"])["services"]
    assert set(services) == {"relay-late", "generator-late-0"}
    command = services["generator-late-0"]["command"]
    assert command[command.index("--run-dir") + 1].endswith(run_id)
    # A second one later, when the first is gone.
    plan.write(LATER)
    assert plan("--add", "later") == 0
    assert json.loads(plan.written()["plan.json"])["run"] == run_id
    assert "later/compose.yaml" in plan.written()


def test_kubernetes_gets_the_objects_of_the_node(plan: Planned) -> None:
    assert plan("--format", "kubernetes") == 0
    plan.write(LATE)
    assert plan("--format", "kubernetes", "--add", "late") == 0
    whole = list(yaml.safe_load_all(plan.written()["kubernetes.yaml"]))
    added = list(yaml.safe_load_all(plan.written()["kubernetes-late.yaml"]))
    assert {document["kind"] for document in added} == {"Service", "PersistentVolumeClaim", "Job"}
    (name,) = {d["metadata"]["name"] for d in whole if d["kind"] == "ConfigMap"}
    (pod,) = (d["spec"]["template"]["spec"] for d in added if d["kind"] == "Job")
    assert {"name": "config", "configMap": {"name": name}} in pod["volumes"]


@pytest.mark.parametrize(
    ("nodes", "cluster", "run", "flags", "told"),
    [
        (LATE, "", "", ("--add", "lat"), "--add lat is no node; did you mean late?"),
        (LATE, "", "", ("--add", "a"), "write joins = true in its [[nodes]]"),
        (
            LATE,
            "",
            "[trainer]\nlearning_rate = 1e-3\n",
            ("--add", "late"),
            "another configuration than that of the run",
        ),
        (
            LATE,
            'broker = "b"',
            "",
            ("--add", "late"),
            "node a would get other processes than it has in the run",
        ),
        (LATE, "", "", ("--add", "late", "--format", "slurm"), "--add is not rendered for SLURM"),
        (LATE, "", "", ("--add", "late", "--run-id", "x"), "--run-id has no effect with --add"),
        (LATE, 'broker = "late"', "", (), "cluster.broker = late has joins = true"),
    ],
)
def test_what_would_be_another_run_is_refused(
    plan: Planned,
    nodes: str,
    cluster: str,
    run: str,
    flags: tuple[str, ...],
    told: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert plan() == 0
    before = plan.written()
    plan.write(nodes, cluster, run)
    capsys.readouterr()
    assert plan(*flags) == 2
    assert told in capsys.readouterr().err
    assert plan.written() == before


def test_there_has_to_be_a_plan(plan: Planned, capsys: pytest.CaptureFixture[str]) -> None:
    plan.write(LATE)
    assert plan("--add", "late") == 2
    assert "plan.json is no plan" in capsys.readouterr().err


def test_some_nodes_have_to_stay(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(f"[cluster]\n{LATE}", encoding="utf-8")
    with pytest.raises(UsageError, match="all nodes have joins = true"):
        load_cluster(path)
