"""Consequences of a configuration, and refused ones."""

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
    GeneratorConfig,
    RunConfig,
    ScorerConfig,
    TrainerConfig,
)
from umbra.services.config.loader import load_config
from umbra.services.config.presets import PRESETS, Preset
from umbra.services.config.rules import check_feasible, implied_staleness, lone_groups


def buffer(**values: Any) -> RunConfig:
    return RunConfig(buffer=BufferConfig(**values))


def test_the_defaults_are_feasible() -> None:
    defaults = RunConfig()
    check_feasible(defaults)
    assert implied_staleness(defaults).bound == defaults.buffer.max_staleness


SERVERS = GeneratorConfig(engine="vllm-http", urls=["unix:/run/vllm"], count=0)


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
            RunConfig(generator=SERVERS, trainer=TrainerConfig(router_replay=True)),
            "trainer.router_replay = true does not work with generator.engine = vllm-http",
        ),
        (
            RunConfig(
                generator=SERVERS, trainer=TrainerConfig(lora_rank=2, lora_publish="adapter")
            ),
            "trainer.lora_publish = adapter does not work with generator.engine = vllm-http",
        ),
        (RunConfig(generator=GeneratorConfig(count=0)), "leaves the run without a generator"),
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
            "trainer.rendezvous = 10.0.0.1:29500 has no effect: set trainer.nodes",
        ),
        (
            RunConfig(trainer=TrainerConfig(ranks=4, sequence_parallel=2, compile=True)),
            "trainer.compile cannot",
        ),
        (
            RunConfig(
                trainer=TrainerConfig(ranks=4, sequence_parallel=2, router_aux_loss_coef=0.1)
            ),
            "trainer.router_aux_loss_coef needs whole rows",
        ),
        (
            RunConfig(trainer=TrainerConfig(ranks=4, expert_parallel=3)),
            "trainer.expert_parallel = 3 does not divide trainer.ranks = 4",
        ),
        (
            RunConfig(trainer=TrainerConfig(ranks=4, expert_parallel=2, compile=True)),
            "cannot compile trainer.expert_parallel",
        ),
        (
            RunConfig(trainer=TrainerConfig(ranks=4, expert_parallel=2, lora_rank=8)),
            "divides no adapters of experts: set trainer.lora_targets",
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
        (
            {"environment": {"workers": 0}},
            "workers = 0 needs environment.kind = agent or verifiers",
        ),
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


AGENT = ("environment.kind=agent", "environment.agent=my:agent")
BRANCHES = ("environment.branches=train",)


def check(*overrides: str) -> None:
    check_feasible(load_config(overrides=overrides, environ={}))


def test_agents_may_have_branches() -> None:
    check(*AGENT, *BRANCHES)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (BRANCHES, "branches = train needs environment.kind = agent or"),
        (
            (*AGENT, *BRANCHES, "generator.max_context=131072"),
            "lower max_context to 65536",
        ),
        ((*AGENT, *BRANCHES, "trainer.objective=reinforce_pp"), "advantage = reinforce_pp"),
        (
            (*AGENT, *BRANCHES, "trainer.objective=reinforce_pp_baseline"),
            "advantage = reinforce_pp_baseline",
        ),
        ((*AGENT, *BRANCHES, "trainer.objective=ppo_critic"), "trainer.advantage = gae"),
        ((*AGENT, *BRANCHES, "trainer.objective=m2po"), "trainer.mask = m2po"),
        ((*AGENT, *BRANCHES, "trainer.overlong_buffer=4"), "trainer.overlong_buffer"),
        ((*AGENT, *BRANCHES, "trainer.overlong_filter=true"), "trainer.overlong_filter"),
        (
            (*AGENT, *BRANCHES, "trainer.objective=reinforce_pp", "trainer.kl_coef=0.1",
             'buffer.stages=["ref_logp"]'),
            "takes the KL of one response off the reward",
        ),
        ((*AGENT, *BRANCHES, "trainer.router_replay=true"), "trainer.router_replay"),
    ],
)  # fmt: skip
def test_what_is_not_proven_is_refused(overrides: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        check(*overrides)


def trainer(*keys: str) -> RunConfig:
    overrides = [key if "." in key.partition("=")[0] else f"trainer.{key}" for key in keys]
    return load_config(overrides=overrides, environ={})


@pytest.mark.parametrize("preset", [name for name in PRESETS if name not in ("ppo_critic", "opd")])
def test_a_preset_works_by_itself(preset: Preset) -> None:
    config = trainer(f"objective={preset}")
    check_feasible(config)
    assert config.trainer.pieces == PRESETS[preset]


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (["kl_coef=0.1"], "trainer.kl_coef = 0.1 needs ref_logp in buffer.stages: add it"),
        (
            ["objective=decoupled", "proximal=stage"],
            "trainer.proximal = stage needs logp in buffer.stages: add it",
        ),
        (
            ["objective=m2po", "proximal=interpolate"],
            "trainer.mask = m2po looks at the whole batch",
        ),
        (["objective=ppo", "correction=truncate"], "for the behaviour policy a second time"),
        (["objective=icepop", "is_cap=0.4"], "is_floor = 0.5 must be less than trainer.is_cap"),
        (["mask=token", "mask_low=3"], "mask_low = 3 must be less than trainer.mask_high = 2"),
        (["critic.value_clip=0.1"], "[critic] is for trainer.advantage = gae"),
        (["objective=rloo", "buffer.group_size=1"], "set buffer.group_size to 2 or more"),
        (["dual_clip=1.1"], "trainer.dual_clip = 1.1 must be more than 1 + clip_high = 1.2"),
        (
            ["overlong_buffer=300"],
            "overlong_buffer = 300 is more than sampling.max_tokens = 256: lower it",
        ),
        (
            [
                "objective=ppo_critic",
                "kl_coef=0.1",
                "kl_unbiased=true",
                'buffer.stages=["ref_logp"]',
            ],
            "trainer.kl_unbiased changes the gradient of a KL in the loss",
        ),
        (
            ["objective=ppo", "is_cap=3"],
            "trainer.is_cap does nothing with objective ppo: it needs a correction",
        ),
        (["objective=sapo", "clip_low=0.1"], "trainer.clip_low does nothing with objective sapo"),
        (
            ["objective=ppo", "proximal=stage"],
            "trainer.proximal does nothing with objective ppo: it needs anchor",
        ),
        (["objective=opd"], "trainer.kl_coef = 1 needs ref_logp in buffer.stages: add it"),
        (
            ["objective=opd", "kl_coef=0"],
            "needs trainer.objective = opd and kl_coef above 0",
        ),
        (["advantage=teacher"], "needs trainer.objective = opd"),
        (
            ["objective=opd", "buffer.dynamic_sampling=true", 'buffer.stages=["ref_logp"]'],
            "buffer.dynamic_sampling goes by rewards",
        ),
        (["scorer.model={ math = 'a' }"], "which are none: name these, or one model for all"),
        (["objective=gspo", "score_centering=8"], "centers the scores of tokens"),
        (["objective=dapo", "score_centering=8"], "does nothing with objective dapo, whose weight"),
        (["sampling.top_p=0.9"], "set sampling.top_k to 64, say"),
        (
            ["sampling.top_k=500", "generator.max_context=30000"],
            "sampling.top_k = 500: with generator.max_context = 30,000 and batches of 256",
        ),
        (
            ["score_centering=128", "generator.max_context=30000"],
            "trainer.score_centering = 128: with generator.max_context",
        ),
    ],
)
def test_what_cannot_work_is_refused(keys: list[str], told: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_feasible(trainer(*keys))
    message = str(caught.value)
    assert told in message
    assert "\n" not in message
    assert "; " not in message, "one fault, one sentence"


def test_what_a_preset_implies_is_what_no_key_says_and_something_reads() -> None:
    shown = trainer("objective=dapo", "clip_low=0.1").trainer.implied
    assert shown["clip_high"] == 0.28
    assert shown["denominator"] == "all"
    assert not shown.keys() & {"clip_low", "is_cap", "kl_to", "gamma"}


@pytest.mark.parametrize(
    ("keys", "advantage"),
    [
        (["buffer.group_size=1"], "dr_grpo"),
        (["buffer.group_size=1", "objective=grpo"], "grpo"),
        (["buffer.group_size=1", "objective=reinforce_pp"], ""),
        (["buffer.group_size=2"], ""),
    ],
)
def test_a_group_of_one_has_nothing_to_compare_with(keys: list[str], advantage: str) -> None:
    text = lone_groups(trainer(*keys))
    assert bool(text) == bool(advantage)
    if advantage:
        assert f"trainer.advantage = {advantage} nothing to compare a sample with" in text
