"""A trainer over several nodes: the share of each, under every launcher, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fakes.clusters import PLANS, launched, plan_of, render

from umbra import cli
from umbra.deploy.cluster.launch import ports
from umbra.deploy.cluster.plan import Plan
from umbra.proto.errors import UsageError
from umbra.services.config.rules import check_feasible

TWO = PLANS["trainer on two nodes"]  # and two that generate
SHARED = PLANS["trainer and logp on two nodes"]
THIRDS = {"groups": ["train", "ref_logp", "generate"], "ratios": [0.75, 0.125, 0.125]}


def trainers(plan: Plan) -> list[tuple[str, tuple[int, ...]]]:
    assert [process.node_rank for process in plan.trainers()] == list(range(len(plan.trainers())))
    return [(process.node.name, process.gpus) for process in plan.trainers()]


def flags(plan: Plan, name: str) -> dict[str, str]:
    """The flags of the process `name`, by their names; --set by its keys."""
    (process,) = (process for process in plan.processes if process.name == name)
    words = launched(plan, process).command
    start = next(index for index, word in enumerate(words) if word.startswith("--"))
    pairs = zip(words[start::2], words[start + 1 :: 2], strict=True)
    return dict(
        (key, word) if flag == "--set" else (flag, value)
        for flag, value in pairs
        for key, _, word in [value.partition("=")]
    )


def test_a_share_of_two_nodes_is_two_nodes() -> None:
    assert trainers(TWO) == [("a", tuple(range(8))), ("b", tuple(range(8)))]
    assert (TWO.config.trainer.nodes, TWO.config.trainer.ranks) == (2, 16)
    assert TWO.config.trainer.rendezvous == "10.0.0.1:5561"
    parts = [(p.name, p.node.name, p.node_rank) for p in TWO.processes if p.task == "part"]
    assert parts == [("part-b", "b", 1)]  # the hub has the part of its own node
    assert TWO.the("weight_hub").node.name == "a"
    check_feasible(TWO.config)


@pytest.mark.parametrize(
    ("gpus", "ratios", "nodes"),
    [
        ((8, 8, 8), [0.5, 0.5], 1),  # due 1.5: other nodes are not trained on unasked
        ((8,) * 9, [0.333, 0.667], 3),  # due 2.997, as ratios are written
        ((8,) * 5, [0.7, 0.3], 3),
    ],
)
def test_the_share_is_not_rounded_up(
    gpus: tuple[int, ...], ratios: list[float], nodes: int
) -> None:
    plan = plan_of(*gpus, ratios=ratios)
    assert len(plan.trainers()) == plan.config.trainer.nodes == nodes
    assert {process.node.name for process in plan.processes} == {node.name for node in plan.nodes}


def test_gpus_of_several_nodes_in_equal_parts() -> None:
    plan = plan_of(4, 4, stages=("ref_logp",), **THIRDS)  # 6 GPUs of 8
    assert trainers(plan) == [("a", (0, 1, 2)), ("b", (0, 1, 2))]
    assert plan.config.trainer.ranks == 6
    others = {(p.node.name, p.gpus) for p in plan.processes if p.task in ("ref_logp", "generate")}
    assert others == {("a", (3,)), ("b", (3,))}
    one = plan_of(4, 8, stages=("ref_logp",), **{**THIRDS, "ratios": [0.5, 0.25, 0.25]})
    assert trainers(one) == [("b", tuple(range(6)))]  # one node, where one has as many


def test_a_group_that_shares_the_trainer_s_nodes() -> None:
    """Relay and part of a node bind ports of their own."""
    on_b = [process.task for process in SHARED.on(SHARED.nodes[1])]
    assert on_b == ["relay", "part", "train", *["logp"] * 4]
    used = [port for p in SHARED.on(SHARED.nodes[1]) for port in ports(SHARED, p)]
    assert used == [5558, 5559, 5560]


@pytest.mark.parametrize(
    ("gpus", "overrides", "settings", "told"),
    [
        (
            (8, 8, 8, 8),
            ("trainer.nodes=3",),
            {},
            "trainer.nodes = 3, but group [train] gets 2 (ratio 0.5 x 4 nodes = 2): change its",
        ),
        (
            (0, 0),
            ("trainer.nodes=2", "buffer.stages=['ref_logp']"),
            {"groups": ["train", "generate", "ref_logp"]},
            "trainer.nodes = 2, but group [train] gets 1 (node a, as there are no GPUs to divide)",
        ),
        (
            (8, 8, 8, 8),
            ("trainer.ranks=5",),
            {},
            "trainer.ranks = 5 cannot be divided equally over the 2 nodes of group [train] (ratio "
            "0.5 x 4 nodes = 2): set it to a multiple of 2",
        ),
        ((0, 0, 0, 0), (), {}, "trainer.ranks = 1 cannot be divided equally over the 2 nodes"),
        (
            (8, 4, 8, 8),
            (),
            {},
            "have different numbers of GPUs (a 8, b 4): set trainer.ranks to 8, or list nodes of "
            "one kind first",
        ),
        (
            (8, 4, 8, 8),
            ("trainer.ranks=16",),
            {},
            "trainer.ranks = 16, but group [train] has 8 GPUs",
        ),
        (
            (4, 4),
            ("buffer.stages=['ref_logp']",),
            {**THIRDS, "ratios": [0.625, 0.25, 0.125]},
            "group [train] gets 5 GPUs (ratio 0.625 x 8 GPUs = 5), which cannot be divided in "
            "equal parts, as a trainer's must be; the nodes have 4, 4: change its ratio",
        ),
        (
            (4, 4, 4),
            ("trainer.nodes=2",),
            {"unit": "gpu", "ratios": [0.75, 0.25]},
            "which cannot be divided over 2 nodes (trainer.nodes) in equal parts",
        ),
        (
            (6, 6, 6, 6),
            ("trainer.sequence_parallel=4",),
            {},
            "trainer.sequence_parallel = 4 does not divide the 6 ranks on each node of group "
            "[train]: ranks that share the tokens of a row have to be on one node",
        ),
        (
            (8, 8, 8, 8),
            ("weight_hub.plane=nccl",),
            {"network": "host"},
            "weight_hub.plane = nccl sends from one host, and the trainer's weights are on 2",
        ),
        (
            (8, 8, 8, 8),
            ("trainer.rendezvous=h:1",),
            {},
            "trainer.rendezvous = h:1, but the plan chooses where a trainer's ranks meet",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    gpus: tuple[int, ...], overrides: tuple[str, ...], settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(UsageError) as caught:
        plan_of(*gpus, overrides=overrides, **settings)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_node_s_ranks_know_where_they_meet() -> None:
    for rank, name in enumerate(("trainer", "trainer-b")):
        found = flags(TWO, name)
        assert found["--node-rank"] == str(rank)
        assert (found["trainer.nodes"], found["trainer.ranks"]) == ("2", "16")
        assert found["trainer.rendezvous"] == "10.0.0.1:5561"
    assert "--node-rank" not in flags(plan_of(8, 8), "trainer")
    moved = plan_of(8, 8, 8, 8, base_port=7000)
    assert flags(moved, "trainer-b")["trainer.rendezvous"] == "10.0.0.1:7006"
    assert moved.config.trainer.rendezvous == "10.0.0.1:7006"


def test_a_part_finds_the_hub_and_says_where_it_is_found() -> None:
    found = flags(TWO, "part-b")
    assert found["--upstream"] == "tcp://10.0.0.1:5558"
    assert found["weight_hub.listen"] == "tcp://0.0.0.0:5560"
    assert found["--owner"] == "1"
    assert found["--advertise"] == "10.0.0.2"


def test_only_rank_0_is_a_member_whose_health_is_asked() -> None:
    for process in TWO.trainers():
        assert launched(TWO, process).health == ["status", "--member", "trainer"]


def test_a_script_for_slurm_ends_with_rank_0_and_meets_on_its_host() -> None:
    script = render(TWO, "slurm")["run.sbatch"]
    lines = script.splitlines()
    steps = {line.split()[3].strip("'"): line for line in lines if line.startswith("step ")}
    for rank, name in enumerate(("trainer", "trainer-b")):
        assert steps[name].startswith(f"step {rank} 0,1,2,3,4,5,6,7 {name} 20 umbra trainer ")
        assert '--set "trainer.rendezvous=${addresses[0]}:5561" ' in steps[name]
    assert lines.count("trainer=$!") == 1
    assert lines[lines.index("trainer=$!") - 1] == steps["trainer"]
    assert '--advertise "${addresses[1]}"' in steps["part-b"]


def test_one_machine_is_not_several(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text("[trainer]\nranks = 4\nnodes = 2\nrendezvous = 'h:1'\n", encoding="utf-8")
    assert cli.main(["up", str(run_file)]) == 2
    assert "trainer.nodes = 2: `umbra up` runs everything on this" in capsys.readouterr().err
