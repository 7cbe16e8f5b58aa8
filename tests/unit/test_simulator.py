"""The cluster simulator: production code in simulated time, whose figures can be worked out."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from fakes.simulated import BASE, merged, scenario

from umbra.deploy.simulator.compare import modes, simulate, splits, sweep
from umbra.deploy.simulator.simulation import Simulation
from umbra.proto.errors import DeadlineError
from umbra.services.buffer.broker import Broker
from umbra.services.buffer.policy.leases import Leases
from umbra.services.buffer.policy.staleness import StalenessPolicy
from umbra.services.buffer.samples.submissions import Submissions
from umbra.services.weight_hub.push import PushProtocol

TAIL = {"kind": "long-tail", "least": 50, "most": 100, "longest": 800, "share": 0.05}

# -- figures that can be worked out ---------------------------------------------------------------


def test_a_synchronous_step_takes_what_its_parts_take_together() -> None:
    """4 sequences of 100 tokens: 100 * (0.01 + 4 * 0.001) + 4 * 50 * 0.0005 for the prompts."""
    decode = {"prompt_token_s": 0.0005, "pause_s": 0.25}
    network = {"weight_bytes": 1e9, "local_bytes_per_s": 2e9}
    one = simulate(
        scenario(
            speed={"decode": decode, "training": {"snapshot_s": 0.125}, "network": network},
            samples={"prompt_tokens": 50},
        )
    )
    generation, training, push = 1.4 + 0.1, 1.4, 0.125 + 0.5 + 0.25
    assert one.step_s == pytest.approx(generation + training + push, rel=1e-6)
    assert one.samples_per_s == pytest.approx(4 / one.step_s)
    assert one.trainer["train"] == pytest.approx(training / one.step_s)
    assert one.generator["decoding"] == pytest.approx(generation / one.step_s)
    assert one.generator["loading weights"] == pytest.approx(0.25 / one.step_s)
    assert one.staleness_counts == [24]  # steps 3 to 8: the first two are left out
    assert one.ledger.trained == one.ledger.issued == 32


def test_tokens_prompts_and_gpus_are_in_the_time_of_a_training_step() -> None:
    training = {"step_s": 0.5, "tokens_per_s": 200.0}
    one = simulate(
        scenario(
            cluster={"gpus": 5, "trainer_gpus": 4},
            speed={"training": training},
            samples={"prompt_tokens": 25},
        )
    )
    assert one.step_s == pytest.approx(1.4 + 0.5 + 4 * 125 / 800, rel=1e-6)


def test_running_ahead_hides_the_shorter_of_both() -> None:
    synchronous = simulate(scenario())
    ahead = simulate(scenario(buffer={"run_ahead": 1}, run={"steps": 20}))
    assert synchronous.step_s == pytest.approx(2.8, rel=1e-6)
    assert ahead.step_s == pytest.approx(1.4, rel=0.02)
    assert ahead.staleness["mean"] == 1.0
    training = simulate(
        scenario(buffer={"run_ahead": 1}, speed={"training": {"step_s": 3.0}}, run={"steps": 20})
    )
    assert training.step_s == pytest.approx(3.0, rel=0.02)
    assert training.trainer["train"] > 0.98 and training.generator["work"] > 0.4


def test_new_weights_hold_up_what_is_being_decoded() -> None:
    """Training is quick, so generation is all there is: 100 * 0.014, and 1 s for each version."""
    changes: dict[str, Any] = {"buffer": {"run_ahead": 1}, "run": {"steps": 20}}
    decode = {"step_s": 0.01, "token_s": 0.001}
    for pause_s, expected in ((0.0, 1.4), (1.0, 2.4)):
        speed = {"decode": {**decode, "pause_s": pause_s}, "training": {"step_s": 0.2}}
        assert simulate(scenario(**changes, speed=speed)).step_s == pytest.approx(expected)


def test_colocated_roles_take_turns_on_all_gpus_and_switch_twice_a_step() -> None:
    """8 samples on 2 engines: 100 * 0.014; 8 * 100 tokens trained on 2 GPUs."""
    one = simulate(
        scenario(
            cluster={"trainer_gpus": 0},
            buffer={"batch_groups": 4},
            speed={"training": {"step_s": 0.0, "tokens_per_s": 400.0, "switch_s": 0.3}},
        )
    )
    assert (one.generators, one.trainer_gpus) == (2, 2)
    assert one.step_s == pytest.approx(1.4 + 1.0 + 2 * 0.3, rel=1e-6)


def test_long_tails_cost_the_synchronous_mode_more() -> None:
    changes: dict[str, Any] = {
        "run": {"steps": 16},
        "buffer": {"batch_groups": 8, "run_ahead": 3, "max_staleness": 6},
        "generator": {"slots": 16},
    }
    speed_ups: list[float] = []
    for lengths in (BASE["samples"]["lengths"], TAIL):
        outcomes = dict(modes(scenario(**changes, samples={"lengths": lengths})))
        rate = {name: one.samples_per_s for name, one in outcomes.items()}
        assert rate["one step off"] > rate["synchronous, fixed split"]
        assert rate["asynchronous"] > 0.99 * rate["one step off"]
        speed_ups.append(rate["asynchronous"] / rate["synchronous, fixed split"])
    assert speed_ups[1] > 1.25 * speed_ups[0]


def test_the_sweep_finds_the_split_that_keeps_both_busy() -> None:
    """A GPU trains 4 times as fast as one generates, so one of five should train."""
    base = scenario(
        cluster={"gpus": 10},
        run={"steps": 12},
        buffer={"batch_groups": 32, "run_ahead": 2, "max_staleness": 4},
        speed={"training": {"step_s": 0.0, "tokens_per_s": 4 * 4 / 0.014}},
    )
    assert splits(base) == list(range(1, 10))
    rates = {gpus: one.samples_per_s for gpus, one in sweep(base)}
    assert max(rates, key=lambda gpus: rates[gpus]) == 2


def test_splits_are_whole_nodes_of_large_clusters() -> None:
    large = scenario(cluster={"gpus": 4096, "trainer_gpus": 512}, buffer={"run_ahead": 1})
    found = splits(large)
    assert len(found) == 15 and all(gpus % 8 == 0 for gpus in found) and found[-1] == 4088


def test_a_slow_stage_is_the_bottleneck() -> None:
    one = simulate(
        scenario(
            cluster={"gpus": 3, "scorer_gpus": 1},
            buffer={"stages": ["reward", "ref_logp"], "run_ahead": 2},
            run={"steps": 12},
            speed={"scoring": {"reward": {"seconds": 0.1}, "ref_logp": {"seconds": 8.0}}},
            scorer={"capacity": 4},
        )
    )
    assert one.step_s == pytest.approx(8.0, rel=0.05)
    assert one.scorer["scoring"] > 0.4


def test_a_stage_that_rewards_groups_of_one_environment_is_passed_by_the_others() -> None:
    busy: list[float] = []
    for weight in (1.0, 3.0):
        one = simulate(
            scenario(
                buffer={"stages": ["reward"], "run_ahead": 2},
                environments=[
                    {"name": "ranked", "kind": "reward", "reward": "mine:rank"}
                    | {"reward_scope": "group", "weight": weight},
                    {"name": "alone", "weight": 4.0 - weight},
                ],
                run={"steps": 40},
                speed={"scoring": {"reward": {"seconds": 0.1}}},
                scorer={"capacity": 2},
            )
        )
        busy.append(one.scorer["scoring"])
    assert busy[1] == pytest.approx(3 * busy[0], rel=0.2)


def test_a_chain_of_relays_is_hardly_slower_than_one() -> None:
    lags: list[float] = []
    for nodes in (2, 33):
        one = simulate(
            scenario(
                cluster={"gpus": nodes, "gpus_per_node": 1},
                run={"steps": 3},
                buffer={"batch_groups": 66},
                speed={"network": {"weight_bytes": 4e9, "bytes_per_s": 1e9}},
            )
        )
        lags.append(one.lag_s)
    assert 4.0 < lags[0] < lags[1] < 1.1 * lags[0]


def test_a_broker_that_is_too_slow_is_the_bottleneck() -> None:
    broker = {"message_s": 0.0, "trajectory_s": 1.0}
    one = simulate(
        scenario(
            cluster={"gpus": 5},
            buffer={"run_ahead": 3, "max_staleness": 9, "lease_s": 1e4, "dead_after_s": 1e4},
            run={"steps": 20},
            speed={"broker": broker},
        )
    )
    assert 4.0 <= one.step_s < 6.0 and one.broker_busy > 0.7
    assert one.broker_wait_s > 1.0  # the trainer's own requests wait in the same line


# -- what must always hold ------------------------------------------------------------------------

BUSY: dict[str, Any] = {
    "cluster": {"gpus": 12, "trainer_gpus": 4, "gpus_per_node": 4},
    "run": {"steps": 20},
    "buffer": {
        "group_size": 4, "batch_groups": 8, "run_ahead": 3, "max_staleness": 3, "lease_s": 6.0,
        "dead_after_s": 5.0,
    },
    "generator": {"slots": 8, "prefetch": 2, "partial_flush_tokens": 50},
    "speed": {
        "decode": {"pause_s": 0.05},
        "training": {"checkpoint_s": 0.1},
        "network": {"weight_bytes": 1e9, "latency_s": 1e-3},
        "broker": {"message_s": 1e-4, "trajectory_s": 1e-4, "bytes_per_s": 1e8},
    },
    "checkpoint": {"every": 3},
    "samples": {"prompt_tokens": 20, "lengths": TAIL, "environment_s": 0.5, "level_share": 0.3},
}  # fmt: skip
DYING = {
    "generator": {"mtbf_s": 60.0, "recovery_s": 4.0},
    "node": {"mtbf_s": 200.0, "recovery_s": 10.0},
    "trainer": {"mtbf_s": 40.0, "recovery_s": 5.0},
    "buffer": {"mtbf_s": 40.0, "recovery_s": 2.0},
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"generator": {"kv_policy": "abort"}, "buffer": {"on_batch": "interrupt"}},
        {"generator": {"kv_policy": "recompute"}, "buffer": {"oversample": 4, "on_batch": "cut"}},
        {"buffer": {"dynamic_sampling": True, "stale_policy": "restart", "max_staleness": 1}},
        {"buffer": {"straggler": "survivors", "straggler_s": 3.0, "stale_policy": "wait"}},
        {"buffer": {"stages": ["reward"]}, "speed": {"scoring": {"reward": {"seconds": 0.2}}}},
        {"failures": DYING},
        {"failures": DYING, "generator": {"partial_flush_tokens": 0}, "checkpoint": {"every": 0}},
    ],
    ids=["plain", "abort", "cut", "dynamic", "survivors", "reward", "dying", "no-checkpoints"],
)
def test_every_sample_is_accounted_for_and_staleness_bounded(changes: dict[str, Any]) -> None:
    busy = scenario(**merged(BUSY, changes))
    one = simulate(busy)
    assert one.ledger.balance == 0 and not any(one.ledger.in_flight.values())
    assert one.steps == 20
    trained = one.ledger.trained
    assert trained == 20 * 32 if busy.config.buffer.straggler == "wait" else trained <= 20 * 32
    assert one.staleness["max"] <= busy.config.buffer.max_staleness
    for shares in (one.generator, one.trainer):
        assert sum(shares.values()) == pytest.approx(1.0)
    assert 0 < one.slots <= 1


def test_a_seed_gives_one_outcome() -> None:
    first, again, other = (
        msgspec.to_builtins(simulate(scenario(**merged(BUSY, {"failures": DYING, "run": run}))))
        for run in ({"seed": 1}, {"seed": 1}, {"seed": 2})
    )
    assert first == again
    assert first != other


def test_failures_are_counted_and_cost_time() -> None:
    dying = scenario(**merged(BUSY, {"failures": DYING}))
    one, calm = simulate(dying), simulate(dying.without_failures())
    assert all(one.failures[kind] for kind in ("generator", "trainer", "buffer"))
    assert one.samples_per_s < calm.samples_per_s
    assert one.counters["steps_repeated"] > 0 and one.counters["restarts"] == one.failures["buffer"]
    assert one.generator["down"] > 0 and one.lost_tokens > 0
    assert calm.failures == {} and calm.lost_tokens == 0


def test_flushed_partials_save_what_a_generator_loses() -> None:
    def lost(flush: int) -> int:
        changes = {
            "failures": {"generator": DYING["generator"]},
            "generator": {"partial_flush_tokens": flush},
        }
        return simulate(scenario(**merged(BUSY, changes))).lost_tokens

    assert lost(10) < lost(0) / 2


# -- production code ------------------------------------------------------------------------------


def test_the_broker_and_the_push_protocol_are_those_of_production() -> None:
    simulation = Simulation(scenario())
    assert type(simulation.desk.broker) is Broker
    assert type(simulation.hub.protocol) is PushProtocol


@pytest.mark.parametrize(
    ("owner", "decision", "otherwise", "waits"),
    [
        (StalenessPolicy, "room", lambda *_: 0, "no generator has asked for"),
        (StalenessPolicy, "is_stale", lambda *_: True, "0 of 2 groups complete"),
        (StalenessPolicy, "required_version", lambda _, due, now: now + 1, "no generator has"),
        (Leases, "take", lambda *_, **__: [], "no generator has asked for"),
        (Submissions, "submit", lambda *_: "refused", "waiting for sample s-0 held by generator"),
    ],
)
def test_each_decision_is_productions(
    owner: type, decision: str, otherwise: Any, waits: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is copied: if production decides otherwise, the simulated run stands still."""
    still = scenario(trainer={"batch_wait_s": 60.0})
    assert simulate(still).step_s > 0
    monkeypatch.setattr(owner, decision, otherwise)
    with pytest.raises(DeadlineError, match=rf"trainer\.batch_wait_s.*waiting for.*{waits}"):
        simulate(still)


def test_every_push_is_started_by_the_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated hub carries out what production's protocol tells it."""
    started: list[int] = []
    start = PushProtocol._start  # pyright: ignore[reportPrivateUsage]

    def counted(protocol: PushProtocol, *args: Any, **options: Any) -> Any:
        started.append(1)
        return start(protocol, *args, **options)

    monkeypatch.setattr(PushProtocol, "_start", counted)
    run = scenario()
    simulate(run)
    assert len(started) >= run.config.run.steps
