"""The cluster planner: who gets what, by which rule, and refusals with their arithmetic."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from fakes.clusters import BOTH, PLANS, SEPARATE, launched, plan_of, render
from hypothesis import given
from hypothesis import strategies as st

from umbra.deploy.cluster.cluster_file import load_cluster
from umbra.deploy.cluster.command import table
from umbra.deploy.cluster.launch import ports
from umbra.deploy.cluster.plan import Plan, check_ratios, whole_shares
from umbra.proto.errors import UsageError

EIGHT = tuple(range(8))


def places(plan: Plan, task: str) -> list[tuple[str, tuple[int, ...]]]:
    return [(p.node.name, p.gpus) for p in plan.processes if p.task == task]


def test_only_whole_units_are_shares() -> None:
    for ratios, units, counts in (
        ([0.5, 0.25, 0.25], 5, []),
        ([0.34, 0.66], 3, [1, 2]),
        ([0.333, 0.667], 9, [3, 6]),  # 2.997, as ratios are written
        ([0.4, 0.6], 3, []),  # 1.2 1.8
        ([0.99, 0.01], 4, []),  # nothing for the second
    ):
        assert whole_shares(check_ratios(ratios, len(ratios)), units) == counts


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(1, 7))
def test_a_multiple_of_the_ratios_denominator_is_divided(parts: list[int], times: int) -> None:
    ratios = [Fraction(part, sum(parts)) for part in parts]
    assert whole_shares(ratios, times * sum(parts)) == [times * part for part in parts]


PLACES: dict[str, dict[str, list[tuple[str, tuple[int, ...]]]]] = {
    "separate": {
        "buffer": [("a", ())],
        "weight_hub": [("c", ())],  # beside the trainer
        "relay": [("a", ()), ("d", ())],  # where new weights are needed
        "train": [("c", EIGHT)],
        "generate": [("d", (gpu,)) for gpu in EIGHT],
        "ref_logp": [("b", (gpu,)) for gpu in EIGHT],
        "logp": [("a", (gpu,)) for gpu in EIGHT],
    },
    "hybrid": {  # a group shares its GPUs
        "train": [("a", (0, 1, 2, 3))],
        "logp": [("a", (gpu,)) for gpu in range(4)],
        "generate": [(node, (gpu,)) for node in "cd" for gpu in range(4)],
    },
    "two nodes, GPUs divided": {  # 16: 8, 3, 5
        "train": [("a", EIGHT)],
        "ref_logp": [("b", (gpu,)) for gpu in (0, 1, 2)],
        "generate": [("b", (gpu,)) for gpu in (3, 4, 5, 6, 7)],
    },
    "no GPUs": {  # processes are dealt
        "train": [("a", ())],
        "ref_logp": [("b", ())],
        "generate": [("c", ())],
        "reward": [("a", ())],
    },
}


@pytest.mark.parametrize("name", PLACES)
def test_who_is_where(name: str) -> None:
    for task, expected in PLACES[name].items():
        assert places(PLANS[name], task) == expected, task
    assert PLANS[name].shares_gpus() == (name == "hybrid")
    assert "ratio 0.312 x 16 GPUs = 5" in table(PLANS["two nodes, GPUs divided"])


def test_without_gpus_generators_are_as_many_as_asked_for() -> None:
    several = plan_of(0, 0, 0, 0, overrides=("generator.count=4",), ratios=[0.25, 0.75])
    names = [process.name for process in several.processes if process.task == "generate"]
    assert names == ["generator-b-0", "generator-c-0", "generator-d-0", "generator-b-1"]
    assert places(plan_of(0), "generate") == [("a", ())]


def test_fewer_ranks_than_gpus_leave_some_idle() -> None:
    plan = plan_of(8, 8, overrides=("trainer.ranks=4",))
    assert plan.the("train").gpus == (0, 1, 2, 3)
    assert plan.idle(plan.nodes[0]) == [4, 5, 6, 7]
    assert " 4,5,6,7  -              idle " in table(plan)


def run(*overrides: str, **settings: object) -> dict[str, Any]:
    return {"overrides": overrides, **settings}


FOUR, THIRD = (8, 8, 8, 8), ("ref_logp",)
THIRDS = {"groups": ["train", "ref_logp", "generate"], "ratios": [0.75, 0.125, 0.125]}
SERVERS = ("generator.engine=vllm-http", 'generator.urls=["http://127.0.0.1:8001"]')
REFUSED: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
    ("0.5 + 0.25 = 0.75, and not 1", (8, 8), run(ratios=[0.5, 0.25])),
    ("3 numbers for 2 groups", (8, 8), run(ratios=[0.5, 0.25, 0.25])),
    (
        "the groups would get 0.5, 0.5, 0.5, 0.5 of 2 GPUs: set ratios that give each a whole "
        "number, at least 1 (a ratio is that number / 2), or join groups in one list",
        (2,), {"stages": BOTH, **SEPARATE},
    ),
    ("the groups would get 2.5, 2.5 of 5 nodes", (0,) * 5, {}),
    (
        "trainer.ranks = 16, but group [train] has 8 GPUs (ratio 0.5 x 2 nodes = 1)",
        (8, 8), run("trainer.ranks=16"),
    ),
    (
        "a generator needs 4 GPUs (generator.tensor_parallel), but group [generate] has at most 2 "
        "on one node (ratio 0.25 x 8 GPUs = 2)",
        (8,), run("generator.tensor_parallel=4", ratios=[0.75, 0.25]),
    ),
    ("cluster.groups lacks logp", (8,), run(stages=("logp",))),
    ("names logp, but buffer.stages", (8,), run(groups=["train", "generate", "logp"])),
    ("actor-train is called train here", (8,), run(groups=["actor-train", "generate"])),
    (
        "gives nodes to reward alone, which needs no GPU",
        (8,), run(stages=("reward",), groups=["train", "generate", "reward"]),
    ),
    ("set cluster.network to host", (8,), run("weight_hub.plane=nccl")),
    ("run `umbra up` with generator.count = 0", (8,), run(*SERVERS)),
    (
        "trainer.nodes = 2, but group [train] gets 1 (node a, as there are no GPUs to divide)",
        (0, 0), run("trainer.nodes=2", stages=THIRD, groups=["train", "generate", "ref_logp"]),
    ),
    (
        "trainer.ranks = 5 cannot be divided equally over the 2 nodes of group [train] (ratio "
        "0.5 x 4 nodes = 2): set it to a multiple of 2",
        FOUR, run("trainer.ranks=5"),
    ),
    ("numbers of GPUs (a 8, b 4): set trainer.ranks to 8, or list nodes", (8, 4, 8, 8), {}),
    (
        "group [train] gets 5 GPUs (ratio 0.625 x 8 GPUs = 5), which cannot be divided in equal "
        "parts, as a trainer's must be; the nodes have 4, 4: change its ratio",
        (4, 4), run(stages=THIRD, **{**THIRDS, "ratios": [0.625, 0.25, 0.125]}),
    ),
    (
        "which cannot be divided over 2 nodes (trainer.nodes) in equal parts",
        (4, 4, 4), run("trainer.nodes=2", ratios=[0.75, 0.25]),
    ),
    (
        "trainer.sequence_parallel = 4 does not divide the 6 ranks of each host",
        (6, 6, 6, 6), run("trainer.sequence_parallel=4"),
    ),
    (
        "weight_hub.plane = nccl sends from one host, and the trainer's weights are on 2",
        FOUR, run("weight_hub.plane=nccl", network="host"),
    ),
    ("trainer.rendezvous = h:1, but the plan chooses", FOUR, run("trainer.rendezvous=h:1")),
]  # fmt: skip


@pytest.mark.parametrize(("told", "gpus", "arguments"), REFUSED)
def test_a_plan_that_cannot_be_met_is_refused_with_the_numbers(
    told: str, gpus: tuple[int, ...], arguments: dict[str, Any]
) -> None:
    with pytest.raises(UsageError) as caught:
        plan_of(*gpus, **arguments)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("gpus", "plane", "network", "found"),
    [
        ((8, 8), "auto", "host", (0,)),
        ((8, 8), "auto", "bridge", ()),
        ((8, 8), "tcp", "host", ()),
        ((8, 8), "nccl", "host", (0,)),
        ((8,), "auto", "host", ()),
        ((0, 0), "auto", "host", ()),
    ],
)
def test_hub_and_relays_have_a_gpu_where_they_may_broadcast(
    gpus: tuple[int, ...], plane: str, network: str, found: tuple[int, ...]
) -> None:
    plan = plan_of(*gpus, overrides=(f"weight_hub.plane={plane}",), network=network)
    passing = [p for p in plan.processes if p.task in ("weight_hub", "relay")]
    assert len(passing) == len(gpus)
    assert {process.gpus for process in passing} == {found}
    images = {launched(plan, process).image.rpartition("-")[2] for process in passing}
    assert images == {"trainer:latest" if found else "broker:latest"}


GOOD = '[cluster]\ngroups = ["train", "generate"]\n[[nodes]]\nname = "a"\naddress = "h"\n'
ANOTHER = '[[nodes]]\nname = "a-b"\naddress = "i"\n'


@pytest.mark.parametrize(
    ("told", "text"),
    [
        ("cluster: unknown key gruops; did you mean groups?", GOOD.replace("groups", "gruops")),
        ("is async-rl's: write groups", GOOD.replace("groups", "sperated_node_tasks")),
        ("nodes[0].name: expected `str` matching regex", GOOD.replace('"a"', '"A b"')),
        ("two nodes have the name a", GOOD + ANOTHER.replace("-b", "")),
        ("cluster.broker = c is no node", GOOD.replace("groups", "broker = 'c'\ngroups")),
        ("unknown section [clutser]; did you mean cluster?", GOOD.replace("cluster", "clutser")),
        ("there are no nodes", "[cluster]\n"),
        ("two nodes are a-b where no dots are allowed", GOOD.replace('"a"', '"a.b"') + ANOTHER),
    ],
)
def test_a_bad_cluster_file(told: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        load_cluster(path)
    assert told in str(caught.value)


# -- a trainer over several nodes -----------------------------------------------------------------

TWO = PLANS["trainer on two nodes"]  # and two that generate


def flags(plan: Plan, name: str) -> dict[str, str]:
    """The flags of the process `name`, by their names; --set by its keys."""
    (process,) = (process for process in plan.processes if process.name == name)
    words = launched(plan, process).command
    start = next(index for index, word in enumerate(words) if word.startswith("--"))
    pairs = zip(words[start::2], words[start + 1 :: 2], strict=True)
    split = ((flag, value, value.partition("=")) for flag, value in pairs)
    return dict((key, word) if flag == "--set" else (flag, v) for flag, v, (key, _, word) in split)


def test_a_share_of_two_nodes_is_two_nodes() -> None:
    assert places(TWO, "train") == [("a", EIGHT), ("b", EIGHT)]
    assert [process.node_rank for process in TWO.trainers()] == [0, 1]
    assert (TWO.config.trainer.nodes, TWO.config.trainer.ranks) == (2, 16)
    assert TWO.config.trainer.rendezvous == "10.0.0.1:5561"
    parts = [(p.name, p.node.name, p.node_rank) for p in TWO.processes if p.task == "part"]
    assert parts == [("part-b", "b", 1)]  # the hub has the part of its own node
    assert TWO.the("weight_hub").node.name == "a"


@pytest.mark.parametrize(
    ("gpus", "ratios", "nodes", "each"),
    [
        ((8,) * 9, [0.333, 0.667], 3, 8),
        ((8, 8, 8), [0.5, 0.5], 2, 6),  # no whole nodes: 12 of 24 GPUs
        ((8, 8), [0.25, 0.75], 1, 4),
    ],
)
def test_nodes_are_divided_or_else_gpus(
    gpus: tuple[int, ...], ratios: list[float], nodes: int, each: int
) -> None:
    plan = plan_of(*gpus, ratios=ratios)
    assert len(plan.trainers()) == plan.config.trainer.nodes == nodes
    assert {len(process.gpus) for process in plan.trainers()} == {each}
    assert {process.node.name for process in plan.processes} == {node.name for node in plan.nodes}
    assert not any(plan.idle(node) for node in plan.nodes)


def test_gpus_of_several_nodes_in_equal_parts() -> None:
    plan = plan_of(4, 4, stages=THIRD, **THIRDS)  # 6 GPUs of 8
    assert places(plan, "train") == [("a", (0, 1, 2)), ("b", (0, 1, 2))]
    assert plan.config.trainer.ranks == 6
    assert {*places(plan, "ref_logp"), *places(plan, "generate")} == {("a", (3,)), ("b", (3,))}
    one = plan_of(4, 8, stages=THIRD, **{**THIRDS, "ratios": [0.5, 0.25, 0.25]})
    assert places(one, "train") == [("b", tuple(range(6)))]  # one node, where one has as many


def test_a_group_that_shares_the_trainer_s_nodes() -> None:
    """Relay and part of a node bind ports of their own."""
    plan = PLANS["trainer and logp on two nodes"]
    on_b = plan.on(plan.nodes[1])
    assert [process.task for process in on_b] == ["relay", "part", "train", *["logp"] * 4]
    assert [port for process in on_b for port in ports(plan, process)] == [5558, 5559, 5560]


def test_every_node_s_ranks_know_where_they_meet_and_a_part_its_hub() -> None:
    for rank, name in enumerate(("trainer", "trainer-b")):
        found = flags(TWO, name)
        assert found["--node-rank"] == str(rank)
        assert (found["trainer.nodes"], found["trainer.ranks"]) == ("2", "16")
        assert found["trainer.rendezvous"] == "10.0.0.1:5561"
    assert "--node-rank" not in flags(plan_of(8, 8), "trainer")
    moved = plan_of(*FOUR, base_port=7000)
    assert flags(moved, "trainer-b")["trainer.rendezvous"] == "10.0.0.1:7006"
    # Only rank 0 is a member, whose health is asked for.
    health = {tuple(launched(TWO, process).health) for process in TWO.trainers()}
    assert health == {("status", "--member", "trainer")}
    part = flags(TWO, "part-b")
    assert part["--upstream"] == "tcp://10.0.0.1:5558"
    assert part["weight_hub.listen"] == "tcp://0.0.0.0:5560"
    assert (part["--owner"], part["--advertise"]) == ("1", "10.0.0.2")


def test_a_script_for_slurm_ends_with_rank_0_and_meets_on_its_host() -> None:
    lines = render(TWO, "slurm")["run.sbatch"].splitlines()
    steps = {line.split()[3].strip("'"): line for line in lines if line.startswith("step ")}
    for rank, name in enumerate(("trainer", "trainer-b")):
        assert steps[name].startswith(f"step {rank} 0,1,2,3,4,5,6,7 {name} 20 umbra trainer ")
        assert '--set "trainer.rendezvous=${addresses[0]}:5561" ' in steps[name]
    assert lines.count("trainer=$!") == 1
    assert lines[lines.index("trainer=$!") - 1] == steps["trainer"]
    assert '--advertise "${addresses[1]}"' in steps["part-b"]
