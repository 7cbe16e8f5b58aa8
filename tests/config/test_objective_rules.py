"""Objectives that cannot work are refused before a run, in a sentence that says what to change."""

import pytest

from umbra.proto.errors import UsageError
from umbra.services.config import RunConfig
from umbra.services.config.loader import load_config
from umbra.services.config.presets import PRESETS, Preset
from umbra.services.config.rules import check_feasible, lone_groups


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
        (["kl_coef=0.1"], "trainer.kl_coef = 0.1 needs logprobs of the reference model: add ref_"),
        (
            ["objective=decoupled", "proximal=stage"],
            "trainer.proximal = stage needs the logprobs of that stage: add logp to buffer.stages",
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
            "overlong_buffer = 300 is more than the longest response (sampling.max_tokens = 256",
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
        (["objective=opd"], "trainer.kl_coef = 1 needs logprobs of the reference model: add ref_"),
        (
            ["objective=opd", "kl_coef=0"],
            "set trainer.objective = opd, and trainer.kl_coef above 0",
        ),
        (["advantage=teacher"], "set trainer.objective = opd"),
        (
            ["objective=opd", "buffer.dynamic_sampling=true", 'buffer.stages=["ref_logp"]'],
            "buffer.dynamic_sampling chooses groups by their rewards",
        ),
        (["scorer.model={ math = 'a' }"], "which are none: name these, or one model for all"),
        (["objective=gspo", "score_centering=8"], "centers the scores of tokens"),
        (["sampling.top_p=0.9"], "set sampling.top_k to 64, say"),
        (
            ["sampling.top_k=500", "generator.max_context=30000"],
            "sampling.top_k = 500: a trajectory of generator.max_context = 30,000 tokens can",
        ),
        (
            ["score_centering=128", "generator.max_context=30000"],
            "trainer.score_centering = 128: a trajectory",
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
