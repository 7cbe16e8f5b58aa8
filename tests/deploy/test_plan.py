"""The cluster planner: who gets what, by which rule, and refusals with their arithmetic."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
from fakes.clusters import BOTH, PLANS, SEPARATE, launched, plan_of
from hypothesis import given
from hypothesis import strategies as st

from umbra.deploy.cluster.cluster_file import load_cluster
from umbra.deploy.cluster.command import table
from umbra.deploy.cluster.plan import Plan, check_ratios, divide
from umbra.proto.errors import UsageError

SERVERS = ("generator.engine=vllm-http", 'generator.urls=["http://127.0.0.1:8001"]')


def by_task(plan: Plan) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
    found: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for process in plan.processes:
        found.setdefault(process.task, []).append((process.node.name, process.gpus))
    return found


@pytest.mark.parametrize(
    ("ratios", "units", "counts"),
    [
        ([0.5, 0.5], 4, [2, 2]),
        ([0.5, 0.25, 0.25], 4, [2, 1, 1]),
        ([0.5, 0.25, 0.25], 5, [3, 1, 1]),  # 2.5 1.25 1.25: the first is furthest below
        ([0.25, 0.25, 0.5], 6, [2, 1, 3]),  # 1.5 1.5 3: of equals the first
        ([0.9, 0.05, 0.05], 4, [2, 1, 1]),  # 3.6 0.2 0.2: everyone gets one
        ([0.4, 0.4, 0.1, 0.1], 4, [1, 1, 1, 1]),
        ([0.45, 0.45, 0.05, 0.05], 5, [2, 1, 1, 1]),  # 2.25 2.25: the last of equals gives
        ([0.333, 0.333, 0.333], 3, [1, 1, 1]),
    ],
)
def test_units_are_divided(ratios: list[float], units: int, counts: list[int]) -> None:
    exact = check_ratios(ratios, len(ratios))
    assert divide(exact, units, [None] * len(ratios)) == counts


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=6).flatmap(
        lambda parts: st.tuples(st.just(parts), st.integers(len(parts), 300))
    )
)
def test_all_units_are_given_and_nobody_is_far_from_its_due(case: tuple[list[int], int]) -> None:
    parts, units = case
    ratios = [Fraction(part, sum(parts)) for part in parts]
    counts = divide(ratios, units, [None] * len(parts))
    assert sum(counts) == units
    assert min(counts) >= 1
    forced = sum(1 for ratio in ratios if ratio * units < 1)
    for ratio, count in zip(ratios, counts, strict=True):
        assert count < ratio * units + 1
        assert count > ratio * units - 1 - forced


@pytest.mark.parametrize(
    ("ratios", "groups", "told"),
    [
        ([0.5, 0.25], 2, "0.5 + 0.25 = 0.75, and not 1"),
        ([0.5, 0.5], 3, "2 numbers for 3 groups"),
    ],
)
def test_bad_ratios(ratios: list[float], groups: int, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_ratios(ratios, groups)
    assert told in str(caught.value)


def test_complete_separation() -> None:
    assert by_task(PLANS["separate"]) == {
        "buffer": [("a", ())],
        "weight_hub": [("c", ())],  # beside the trainer
        "relay": [("a", ()), ("d", ())],  # where new weights are needed
        "train": [("c", tuple(range(8)))],
        "generate": [("d", (gpu,)) for gpu in range(8)],
        "ref_logp": [("b", (gpu,)) for gpu in range(8)],
        "logp": [("a", (gpu,)) for gpu in range(8)],
    }


def test_a_group_shares_its_gpus() -> None:
    plan = PLANS["hybrid"]
    found = by_task(plan)
    assert found["train"] == [("a", (0, 1, 2, 3))]
    assert found["logp"] == [("a", (gpu,)) for gpu in range(4)]
    assert found["generate"] == [(node, (gpu,)) for node in "cd" for gpu in range(4)]
    assert plan.shares_gpus()
    assert not PLANS["separate"].shares_gpus()


def test_fewer_nodes_than_groups_are_divided_by_gpus() -> None:
    plan = PLANS["two nodes, GPUs divided"]  # 16 GPUs: 8, 3.2, 4.8
    found = by_task(plan)
    assert found["train"] == [("a", tuple(range(8)))]
    assert found["ref_logp"] == [("b", (gpu,)) for gpu in (0, 1, 2)]
    assert found["generate"] == [("b", (gpu,)) for gpu in (3, 4, 5, 6, 7)]
    assert "ratio 0.3 x 16 GPUs = 4.8, rounded to 5" in table(plan)


def test_without_gpus_processes_are_dealt() -> None:
    found = by_task(PLANS["no GPUs"])
    assert found["train"] == [("a", ())]
    assert found["ref_logp"] == [("b", ())]
    assert found["generate"] == [("c", ())]
    assert found["reward"] == [("a", ())]
    several = plan_of(0, 0, 0, 0, overrides=("generator.count=4",), ratios=[0.25, 0.75])
    names = [process.name for process in several.processes if process.task == "generate"]
    assert names == ["generator-b-0", "generator-c-0", "generator-d-0", "generator-b-1"]
    assert by_task(plan_of(0))["generate"] == [("a", ())]


def test_fewer_ranks_than_gpus_leave_some_idle() -> None:
    plan = plan_of(8, 8, overrides=("trainer.ranks=4",))
    assert plan.the("train").gpus == (0, 1, 2, 3)
    assert plan.idle(plan.nodes[0]) == [4, 5, 6, 7]
    assert "4-7   -              idle" in table(plan)


def test_names_are_unique_and_gpus_exist() -> None:
    for plan in PLANS.values():
        names = [process.name for process in plan.processes]
        assert len(names) == len(set(names))
        for process in plan.processes:
            assert set(process.gpus) <= set(range(process.node.gpus))
        listed = [process for node in plan.nodes for process in plan.on(node)]
        assert len(listed) == len(names)


@pytest.mark.parametrize(
    ("gpus", "stages", "overrides", "settings", "told"),
    [
        ((2,), BOTH, (), SEPARATE, "4 groups need 4 GPUs at least, and the nodes have 2"),
        (
            (4, 4),
            BOTH,
            (),
            {**SEPARATE, "unit": "node"},
            "4 groups need 4 nodes with GPUs, and there are 2: set cluster.unit to gpu",
        ),
        (
            (8, 8),
            (),
            ("trainer.ranks=16",),
            {},
            "trainer.ranks = 16, but group [train] has 8 GPUs (ratio 0.5 x 2 nodes = 1)",
        ),
        (
            (8,),
            (),
            ("generator.tensor_parallel=4",),
            {"ratios": [0.75, 0.25]},
            "a generator needs 4 GPUs (generator.tensor_parallel), but group [generate] "
            "has at most 2 on one node (ratio 0.25 x 8 GPUs = 2)",
        ),
        ((0,), (), (), {"unit": "gpu"}, "cluster.unit = gpu, but no node has GPUs"),
        ((8,), ("logp",), (), {}, "cluster.groups lacks logp"),
        ((8,), (), (), {"groups": ["train", "generate", "logp"]}, "names logp, but buffer.stages"),
        ((8,), (), (), {"groups": ["actor-train", "generate"]}, "actor-train is called train here"),
        (
            (8,),
            ("reward",),
            (),
            {"groups": ["train", "generate", "reward"]},
            "gives nodes to reward alone, which needs no GPU",
        ),
        ((8,), (), ("weight_hub.plane=nccl",), {}, "set cluster.network to host"),
        ((8,), (), SERVERS, {}, "run `umbra up` with generator.count = 0"),
    ],
)
def test_a_plan_that_cannot_be_met_is_refused_with_the_numbers(
    gpus: tuple[int, ...],
    stages: tuple[str, ...],
    overrides: tuple[str, ...],
    settings: dict[str, object],
    told: str,
) -> None:
    with pytest.raises(UsageError) as caught:
        plan_of(*gpus, stages=stages, overrides=overrides, **settings)
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


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (GOOD.replace("groups", "gruops"), "cluster: unknown key gruops; did you mean groups?"),
        (
            GOOD.replace("groups", "sperated_node_tasks"),
            "cluster.sperated_node_tasks is async-rl's: write groups",
        ),
        (GOOD + "gpu = 3\n", "nodes[0]: unknown key gpu; did you mean gpus?"),
        (GOOD + "gpus = 'x'\n", "nodes[0].gpus: expected `int`, got `str`"),
        (GOOD.replace('"a"', '"A b"'), "nodes[0].name: expected `str` matching regex"),
        (
            GOOD.replace("[cluster]", "[clutser]"),
            "unknown section [clutser]; did you mean cluster?",
        ),
        (GOOD + '[[nodes]]\nname = "a"\naddress = "i"\n', "two nodes have the name a"),
        (GOOD.replace("groups", "broker = 'c'\ngroups"), "cluster.broker = c is no node"),
        ("[cluster]\n", "there are no nodes"),
        (
            GOOD + "[cluster.slurm]\ntimes = '1'\n",
            "cluster.slurm: unknown key times; did you mean time",
        ),
        (
            GOOD.replace("groups", "memory_gib = {generates = 3}\ngroups"),
            "cluster.memory_gib: unknown task generates; did you mean generate",
        ),
        (
            GOOD.replace('"a"', '"a.b"') + '[[nodes]]\nname = "a-b"\naddress = "i"\n',
            "two nodes are a-b where no dots are allowed",
        ),
    ],
)
def test_a_bad_cluster_file(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        load_cluster(path)
    assert told in str(caught.value)
