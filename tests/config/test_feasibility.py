"""What a configuration implies, and what it must not ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from umbra.proto.errors import UsageError
from umbra.services.config import (
    BufferConfig,
    EnvironmentConfig,
    EvalConfig,
    RunConfig,
    ScorerConfig,
    TrainerConfig,
)
from umbra.services.config.loader import load_config
from umbra.services.config.rules import check_feasible, implied_staleness


def buffer(**values: Any) -> RunConfig:
    return RunConfig(buffer=BufferConfig(**values))


def test_the_defaults_are_feasible() -> None:
    defaults = RunConfig()
    check_feasible(defaults)
    assert implied_staleness(defaults).bound == defaults.buffer.max_staleness


@pytest.mark.parametrize(
    ("run_ahead", "max_staleness", "minibatches", "epochs", "expected"),
    [
        (0, 5, 1, 1, (0, 0, 0)),
        (1, 2, 1, 1, (2, 1, 2)),
        (3, 1, 1, 1, (1, 1, 1)),
        (0, 0, 4, 1, (0, 0, 3)),  # strictly on-policy, and yet 3 updates behind at the last one
        (0, 0, 1, 4, (0, 0, 3)),
        (1, 2, 4, 1, (2, 1, 11)),
        (1, 2, 2, 2, (2, 1, 11)),
    ],
)
def test_implied_staleness(
    run_ahead: int,
    max_staleness: int,
    minibatches: int,
    epochs: int,
    expected: tuple[int, int, int],
) -> None:
    config = RunConfig(
        buffer=BufferConfig(run_ahead=run_ahead, max_staleness=max_staleness),
        trainer=TrainerConfig(minibatches=minibatches, epochs=epochs),
    )
    implied = implied_staleness(config)
    assert (implied.bound, implied.typical, implied.updates) == expected
    assert implied.describe().startswith(f"at most {implied.bound} versions, typically up to ")


@pytest.mark.parametrize(
    ("config", "to_change"),
    [
        (buffer(group_size=1, dynamic_sampling=True), "buffer.group_size to 2"),
        (buffer(group_size=1, straggler_s=5.0), "set straggler_s to 0"),
        (buffer(on_batch="interrupt", max_staleness=0), "buffer.on_batch to continue"),
        (buffer(stale_policy="wait", oversample=2), "buffer.oversample to 0"),
        (buffer(stages=["reward", "reward"]), "reward twice"),
        (
            RunConfig(buffer=BufferConfig(stages=["logp"]), scorer=ScorerConfig(count={"logp": 0})),
            "scorer.count.logp = 0",
        ),
        (
            RunConfig(
                buffer=BufferConfig(stages=["reward"]), environment=EnvironmentConfig(kind="guess")
            ),
            "remove the stage",
        ),
        (RunConfig(eval=EvalConfig(every=5)), "eval.prompts"),
        (
            RunConfig(trainer=TrainerConfig(ranks=4, sequence_parallel=3)),
            "trainer.sequence_parallel = 3 does not divide trainer.ranks = 4",
        ),
        (
            RunConfig(trainer=TrainerConfig(ranks=4, nodes=3, rendezvous="10.0.0.1:29500")),
            "trainer.nodes = 3 does not divide trainer.ranks = 4",
        ),
        (
            RunConfig(
                trainer=TrainerConfig(
                    ranks=4, nodes=2, rendezvous="10.0.0.1:29500", sequence_parallel=4
                )
            ),
            "trainer.sequence_parallel = 4 does not divide the 2 ranks of each host",
        ),
        (
            RunConfig(trainer=TrainerConfig(ranks=4, rendezvous="10.0.0.1:29500")),
            "trainer.rendezvous = 10.0.0.1:29500 has no effect with one host",
        ),
        (
            RunConfig(trainer=TrainerConfig(ranks=4, sequence_parallel=2, compile=True)),
            "trainer.compile cannot",
        ),
        (
            RunConfig(
                trainer=TrainerConfig(ranks=4, sequence_parallel=2, router_aux_loss_coef=0.1)
            ),
            "trainer.router_aux_loss_coef balances",
        ),
        (
            RunConfig(trainer=TrainerConfig(ranks=4, expert_parallel=3)),
            "trainer.expert_parallel = 3 does not divide trainer.ranks = 4",
        ),
        (
            RunConfig(trainer=TrainerConfig(ranks=4, expert_parallel=2, compile=True)),
            "compile the exchanges of trainer.expert_parallel",
        ),
        (
            RunConfig(trainer=TrainerConfig(ranks=4, expert_parallel=2, lora_rank=8)),
            "does not divide adapters of experts, which an empty trainer.lora_targets",
        ),
        (RunConfig(trainer=TrainerConfig(profile_steps=[3, 900])), "has step 900, but run.steps"),
    ],
)
def test_what_can_never_work_is_refused(config: RunConfig, to_change: str) -> None:
    with pytest.raises(UsageError, match=to_change):
        check_feasible(config)


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(UsageError, match=r"buffer\.oversample to 0.*eval\.prompts"):
        config = RunConfig(
            buffer=BufferConfig(stale_policy="wait", oversample=1), eval=EvalConfig(every=5)
        )
        check_feasible(config)


@pytest.mark.parametrize(
    ("name", "value", "run_ahead", "max_staleness"),
    [
        ("async_generation_ratio", 2, 2, 2),
        ("generate_ahead_steps", 2, 1, 1),
    ],
)
def test_other_systems_names_are_understood(
    name: str,
    value: int,
    run_ahead: int,
    max_staleness: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f"[buffer]\n{name} = {value}\n")
    for config in (
        load_config(file, environ={}),
        load_config(overrides=[f"buffer.{name}={value}"], environ={}),
    ):
        assert (config.buffer.run_ahead, config.buffer.max_staleness) == (run_ahead, max_staleness)
    assert f"{name} = {value} is read as buffer." in caplog.text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[trainer]\nasync_generation_ratio = 1", r"did you mean buffer\.async_generation_ratio"),
        ("async_generation_ratio = 1", r"did you mean buffer\.async_generation_ratio"),
        ("[buffer]\nasync_generation_ratios = 1", r"did you mean buffer\.async_generation_ratio"),
        ("[buffer]\ngenerate_ahead_steps = 0", "an integer >= 1"),
        ("[buffer]\nasync_generation_ratio = 2\nrun_ahead = 1", "remove one of them"),
    ],
)
def test_what_has_no_one_translation_is_explained(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=said):
        load_config(file, environ={})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"environment": {"workers": 0}}, "is for programs that ask for turns"),
        (
            {"environment": {"kind": "agent", "agent": "m:f", "workers": 0}},
            "workers = 0 leaves the programs to `umbra run-agents`: set generator.serve",
        ),
        ({"generator": {"sessions": 4, "slots": 8}}, "leaves some of generator.slots = 8 empty"),
    ],
)
def test_sessions_of_agents_elsewhere(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        check_feasible(msgspec.convert(changes, RunConfig))
