"""Consequences of a configuration, and refused ones."""

from pathlib import Path

import pytest

from umbra.proto.errors import UsageError
from umbra.services.config import BufferConfig, RunConfig, TrainerConfig
from umbra.services.config.loader import load_config
from umbra.services.config.presets import PRESETS, Preset
from umbra.services.config.rules import cautions, check_feasible, describe_staleness


def loaded(*keys: str) -> RunConfig:
    """The defaults but for these keys, of [trainer] if no section is named."""
    overrides = [key if "." in key.partition("=")[0] else f"trainer.{key}" for key in keys]
    return load_config(overrides=overrides, environ={})


def test_the_defaults_are_feasible_and_so_are_branches_of_agents() -> None:
    defaults = RunConfig()
    judged = loaded("buffer.stages=['reward']", "environment.kind=math")  # by a scorer, like exact
    for config in (defaults, loaded(*AGENT, *BRANCHES), judged):
        check_feasible(config)
    assert defaults.buffer.bound == defaults.buffer.max_staleness


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((0, 5, 1, 1), (0, 0, 0)),
        ((1, 2, 1, 1), (2, 1, 2)),
        ((0, 0, 4, 1), (0, 0, 3)),  # strictly on-policy, and yet 3 updates behind at the last one
        ((0, 0, 1, 4), (0, 0, 3)),
        ((1, 2, 2, 2), (2, 1, 11)),
    ],
)
def test_what_it_implies(sizes: tuple[int, int, int, int], expected: tuple[int, int, int]) -> None:
    run_ahead, max_staleness, minibatches, epochs = sizes
    config = RunConfig(
        buffer=BufferConfig(run_ahead=run_ahead, max_staleness=max_staleness),
        trainer=TrainerConfig(minibatches=minibatches, epochs=epochs),
    )
    bound, typical, updates = expected
    text = f"at most {bound} versions, typically up to {typical}"
    if updates != bound:
        text += f"; at most {updates} optimizer updates, as each batch is several"
    assert describe_staleness(config) == text


def test_all_faults_are_told_at_once() -> None:
    told = r"buffer\.oversample to 0.*eval\.prompts.*workers = 0 needs environment\.kind = agent or"
    with pytest.raises(UsageError, match=told):
        check_feasible(loaded("buffer.oversample=1", "eval.every=5", "environment.workers=0"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[buffer]\nasync_generation_ratio = 2", (2, 2)),
        ("[buffer]\ngenerate_ahead_steps = 2", (1, 1)),
        ("[trainer]\nasync_generation_ratio = 1", r"did you mean buffer\.async_generation_ratio"),
        ("[weight_hub]\nparam_update_consume_bucket_size_mb = 1", r"hub\.receive_bucket_bytes"),
        ("[buffer]\nasync_generation_ratios = 1", r"did you mean buffer\.async_generation_ratio"),
        ("[buffer]\ngenerate_ahead_steps = 0", "an integer >= 1"),
        ("[buffer]\nasync_generation_ratio = 2\nrun_ahead = 1", "remove one of them"),
    ],
)
def test_other_systems_names_are_understood_or_explained(
    text: str, said: tuple[int, int] | str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    if isinstance(said, str):
        with pytest.raises(UsageError, match=said):
            load_config(file, environ={})
        return
    buffer = load_config(file, environ={}).buffer
    assert (buffer.run_ahead, buffer.max_staleness) == said
    assert "= 2 is read as buffer." in caplog.text


AGENT = ("environment.kind=agent", "environment.agent=my:agent")
BRANCHES = ("environment.branches=train",)
DYNAMIC, LONG = "buffer.dynamic_sampling=true", "generator.max_context=30000"
REFERENCE = "buffer.stages=['ref_logp']"
GROUPS = ("environment.reward_scope=group", "buffer.stages=['reward']")
RANKED = (*GROUPS, "environment.kind=reward", "environment.reward=my:rank")
VERIFIERS = ("environment.kind=verifiers", "environment.id=x")
SERVERS = ("generator.engine=vllm-http", "generator.urls=['unix:/run/vllm']", "generator.count=0")


@pytest.mark.parametrize("preset", [name for name in PRESETS if name not in ("ppo_critic", "opd")])
def test_a_preset_works_by_itself(preset: Preset) -> None:
    config = loaded(f"objective={preset}")
    check_feasible(config)
    assert config.trainer.pieces == PRESETS[preset]


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (["buffer.group_size=1", DYNAMIC], "set buffer.group_size to 2"),
        (["buffer.group_size=1", "buffer.straggler_s=5"], "set straggler_s to 0"),
        (["buffer.on_batch=interrupt", "buffer.max_staleness=0"], "buffer.on_batch to continue"),
        (["buffer.oversample=2"], "buffer.oversample to 0"),
        (["buffer.stages=['logp', 'logp']"], "logp twice"),
        (["buffer.stages=['logp']", "scorer.count.logp=0"], "scorer.count.logp = 0"),
        (["buffer.stages=['reward']", "environment.kind=guess"], "remove the stage"),
        (["eval.every=5"], "eval.prompts"),
        ([*SERVERS, "router_replay=true"], "router_replay = true does not work with generator.eng"),
        ([*SERVERS, "lora_rank=2", "lora_publish=adapter"], "lora_publish = adapter does not work"),
        (["generator.count=0"], "leaves the run without a generator"),
        (["generator.urls=['unix:/run/vllm']"], "with generator.engine = auto: set both"),
        ([*SERVERS, "generator.count=2"], "one has all of generator.urls: set it to 1"),
        ([*SERVERS, "generator.urls=['http://10.0.0.1:80']"], "http://10.0.0.1:80 is not of this"),
        (["generator.serve=0.0.0.0:80"], "= 0.0.0.0:80 is for environment.kind = agent or verif"),
        (["environment.kind=agent"], "environment.kind = agent has no agent: set env"),
        ([*GROUPS, "environment.kind=trl", "environment.id=m:C"], "no effect with kind trl, whose"),
        ([*GROUPS, "environment.kind=exact"], "with kind exact: set environment.kind to reward"),
        ([*RANKED, "buffer.group_size=1"], "buffer.group_size = 1 must be from 2 to 512"),
        ([*RANKED, "buffer.straggler_s=5"], "waits for all samples of a group: set buffer.stra"),
        (["environment.id=x"], "environment.id = x has no effect: set environment.kind to ver"),
        (["environment.kind=verifiers"], "environment.kind = verifiers needs environment.id"),
        ([*VERIFIERS, "environment.max_turns=2"], "environment.max_turns is not for verifiers"),
        (["generator.engine=vllm", "sampling.temperature=0.001"], "takes 0.01 or more"),
        (["ranks=4", "sequence_parallel=3"], "sequence_parallel = 3 does not divide trainer.ranks"),
        (["ranks=4", "nodes=3"], "trainer.nodes = 3 does not divide trainer.ranks = 4"),
        (["ranks=4", "nodes=2", "sequence_parallel=4"], "= 4 does not divide the 2 ranks of each"),
        (["ranks=4", "rendezvous=10.0.0.1:29500"], "10.0.0.1:29500 has no effect: set trainer.n"),
        (["ranks=4", "sequence_parallel=2", "compile=true"], "trainer.compile cannot"),
        (["ranks=4", "sequence_parallel=2", "router_aux_loss_coef=1"], "needs whole rows"),
        (["ranks=4", "expert_parallel=3"], "expert_parallel = 3 does not divide trainer.ranks = 4"),
        (["ranks=4", "expert_parallel=2", "compile=true"], "compile trainer.expert_parallel"),
        (["ranks=4", "expert_parallel=2", "lora_rank=8"], "no adapters of experts: set trainer.lo"),
        (["lora_publish=adapter"], "adapter has none to publish: set trainer.lora_rank"),
        (["profile_steps=[3, 900]"], "has step 900, but run.steps"),
        ([*AGENT, "environment.workers=0"], "leaves programs to `umbra run-agents`: set gener"),
        (["generator.sessions=4", "generator.slots=8"], "is below generator.slots = 8"),
        (BRANCHES, "branches = train needs environment.kind = agent or"),
        ([*AGENT, *BRANCHES, "generator.max_context=131072"], "lower max_context to 65536"),
        ([*AGENT, *BRANCHES, "objective=reinforce_pp"], "advantage = reinforce_pp"),
        ([*AGENT, *BRANCHES, "overlong_buffer=4"], "trainer.overlong_buffer"),
        ([*AGENT, *BRANCHES, "overlong_filter=true"], "trainer.overlong_filter"),
        ([*AGENT, *BRANCHES, "objective=opd", REFERENCE], "takes the KL of one response off the"),
        ([*AGENT, *BRANCHES, "router_replay=true"], "trainer.router_replay"),
        (["kl_coef=0.1"], "trainer.kl_coef = 0.1 needs ref_logp in buffer.stages: add it"),
        (["objective=decoupled", "proximal=stage"], "proximal = stage needs logp in buffer.stages"),
        (["objective=ppo", "correction=truncate"], "for the behaviour policy a second time"),
        (["objective=icepop", "is_cap=0.4"], "is_floor = 0.5 must be less than trainer.is_cap"),
        (["mask=token", "mask_low=3"], "mask_low = 3 must be less than trainer.mask_high = 2"),
        (["critic.value_clip=0.1"], "[critic] is for trainer.advantage = gae"),
        (["objective=rloo", "buffer.group_size=1"], "set buffer.group_size to 2 or more"),
        (["dual_clip=1.1"], "trainer.dual_clip = 1.1 must be more than 1 + clip_high = 1.2"),
        (["overlong_buffer=300"], "overlong_buffer = 300 is more than sampling.max_tokens = 256"),
        (["objective=opd", "kl_unbiased=true", REFERENCE], "kl_unbiased changes the gradient of"),
        (["objective=ppo", "is_cap=3"], "is_cap does nothing with objective ppo: it needs a corr"),
        (["objective=prime_rl", "clip_low=0.1"], "clip_low does nothing with objective prime_rl"),
        (["objective=ppo", "proximal=stage"], "nothing with objective ppo: it needs anchor"),
        (["objective=opd"], "trainer.kl_coef = 1 needs ref_logp in buffer.stages: add it"),
        (["objective=opd", "kl_coef=0"], "needs trainer.objective = opd and kl_coef above 0"),
        (["advantage=teacher"], "needs trainer.objective = opd"),
        (["objective=opd", DYNAMIC, REFERENCE], "dynamic_sampling goes by rew"),
        (["scorer.model={ math = 'a' }"], "which are none: name these, or one model for all"),
        (["objective=gspo", "score_centering=8"], "centers the scores of tokens"),
        (["objective=dapo", "score_centering=8"], "does nothing with objective dapo, whose weight"),
        (["sampling.top_p=0.9"], "set sampling.top_k to 64, say"),
        (["sampling.top_k=500", LONG], "with generator.max_context = 30,000 and batches of 256"),
        (["score_centering=128", LONG], "trainer.score_centering = 128: with generator.max_conte"),
    ],
)
def test_what_cannot_work_is_refused(keys: list[str], told: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_feasible(loaded(*keys))
    message = str(caught.value)
    assert told in message
    assert "\n" not in message
    assert "; " not in message, "one fault, one sentence"


@pytest.mark.parametrize(
    ("keys", "cautioned"),
    [
        ([], {}),
        (["buffer.group_size=1"], {"lone_groups": "trainer.advantage = dr_grpo nothing to"}),
        (["buffer.group_size=1", "objective=grpo"], {"lone_groups": "= grpo nothing to compare"}),
        (["buffer.group_size=1", "objective=reinforce_pp"], {}),
        (["sampling.max_tokens=1024"], {"max_tokens": "answers are cut off there"}),
    ],
)
def test_what_is_seldom_meant_is_a_caution(keys: list[str], cautioned: dict[str, str]) -> None:
    found = dict(cautions(loaded(*keys)))
    assert found.keys() == cautioned.keys()
    assert all(part in found[name] for name, part in cautioned.items())
