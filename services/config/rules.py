"""Rules over several sections of a run file; rules of one section alone are its `faults`.

They are checked before a run starts (`umbra check`, `umbra up`, the buffer itself), because the
answer of a run would be an hour of silence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from umbra.proto.access import MOST_BYTES
from umbra.proto.bounds import SUBMITTED, SUPPORT_BYTES
from umbra.proto.errors import UsageError
from umbra.services.config import CriticConfig, EnvironmentConfig, RunConfig, Section
from umbra.services.config.generation import JUDGED_AT_ONCE, LIBRARIES, sampling_of

VLLM_COOLEST = 0.01  # it raises lower temperatures to this, but for 0
MOST_SUPPORT = 1 << 15  # tokens that could have been drawn in the place of one


def describe_staleness(config: RunConfig) -> str:
    """Describe how stale a trained token may be, in versions and in optimizer updates.

    Versions count committed batches. Each batch is m = minibatches * epochs optimizer updates, the
    last of which sees weights that m - 1 updates of the same batch have changed already.
    """
    bound, per_batch = config.buffer.bound, config.trainer.updates_per_batch
    typical = min(config.buffer.run_ahead, bound)  # of a sample that nothing overtakes
    text = f"at most {bound} versions, typically up to {typical}"
    updates = bound * per_batch + per_batch - 1
    more = f"; at most {updates} optimizer updates, as each batch is several"
    return text if updates == bound else text + more


def check_feasible(config: RunConfig) -> None:
    """Refuse settings that never fill a batch, deadlock, or contradict each other.

    Raises UsageError: all that is wrong, each with the numbers to change.
    """
    sections = [getattr(config, name) for name in config.__struct_fields__]
    faults = [
        *(fault for s in sections if isinstance(s, Section) for fault in s.faults()),
        *_environment_faults(config),
        *branch_faults(config),
        *objective_faults(config),
        *_support_faults(config),
        *_run_faults(config),
    ]
    if faults:
        raise UsageError("; ".join(faults))


def device_fault(device: str, key: str, gpus: int) -> str:
    """Return why a machine with so many GPUs lacks the device in `key`; empty if it is there."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        return f"{key} {device!r}: use cpu, cuda, cuda:1, ... or auto"
    kind, _, index = device.partition(":")
    if kind != "cuda" or int(index or 0) < gpus:
        return ""
    remedy = f"use cuda:0 to cuda:{gpus - 1}" if gpus else "use cpu or auto"
    return f"{key} {device!r}: this machine has {gpus} CUDA devices: {remedy}"


def device_faults(config: RunConfig, gpus: int) -> Iterator[str]:
    for section in ("trainer", "generator", *(["scorer"] if config.buffer.stages else [])):
        if fault := device_fault(getattr(config, section).device, f"{section}.device", gpus):
            yield fault


def _run_faults(config: RunConfig) -> Iterator[str]:
    trainer, engine = config.trainer, config.generator.engine
    for stage in dict.fromkeys(config.buffer.stages):
        if not config.scorer.processes(stage):
            yield f"buffer.stages has {stage}, but scorer.count.{stage} = 0: nothing leaves it"
    cool = {
        f"{e.sampling_key('temperature')} = {temperature:g}"
        for e in config.all_environments
        if (temperature := config.sampling_for(e).temperature) < VLLM_COOLEST
    }
    for setting in cool if engine in ("vllm", "vllm-http") else ():
        yield f"{setting} is out of range: vLLM, which raises it, takes {VLLM_COOLEST} or more"
    for setting, is_set in (
        ("router_replay = true", trainer.router_replay),
        ("lora_publish = adapter", trainer.lora_publish == "adapter"),
    ):
        if is_set and engine == "vllm-http":
            yield f"trainer.{setting} does not work with generator.engine = {engine}: use vllm"
    batch = config.buffer.group_size * config.buffer.batch_groups
    if trainer.minibatches > batch:
        yield (
            f"trainer.minibatches = {trainer.minibatches} is more than the {batch} samples of a "
            "batch (buffer.batch_groups * buffer.group_size): lower it"
        )
    steps = config.run.steps
    for step in [step for step in trainer.profile_steps if step > steps][:1]:
        yield f"trainer.profile_steps has step {step}, but run.steps = {steps}: name earlier ones"


# -- objectives ------------------------------------------------------------------------------------


def objective_faults(config: RunConfig) -> Iterator[str]:
    pieces, stages = config.trainer.pieces, config.buffer.stages
    if not pieces.needs_critic and config.critic != CriticConfig():
        yield "[critic] is for trainer.advantage = gae: drop it, or set objective to ppo_critic"
    if pieces.advantage == "rloo" and config.buffer.group_size < 2:
        yield "trainer.advantage = rloo compares samples: set buffer.group_size to 2 or more"
    if pieces.advantage == "teacher" and config.buffer.dynamic_sampling:
        yield "buffer.dynamic_sampling goes by rewards, which opd does not read: set it to false"
    names = {one.name for one in config.environments}
    if isinstance(config.scorer.model, dict) and config.scorer.model.keys() != names:
        yield (
            "scorer.model names a model for each of [[environments]], which are "
            f"{', '.join(sorted(names)) or 'none'}: name these, or one model for all"
        )
    if pieces.kl_coef and pieces.kl_to == "reference" and "ref_logp" not in stages:
        yield f"trainer.kl_coef = {pieces.kl_coef:g} needs ref_logp in buffer.stages: add it"
    if pieces.uses_proximal and pieces.proximal == "stage" and "logp" not in stages:
        yield "trainer.proximal = stage needs logp in buffer.stages: add it, or set it to recompute"
    for one in config.all_environments:
        limit = config.sampling_for(one).max_tokens
        if (buffer := pieces.overlong_buffer) > limit:
            most = f"{one.sampling_key('max_tokens')} = {limit}"
            yield f"trainer.overlong_buffer = {buffer} is more than {most}: lower it"


def _support_faults(config: RunConfig) -> Iterator[str]:
    trainer, context = config.trainer, config.generator.max_context
    batch = config.buffer.group_size * config.buffer.batch_groups
    limit = min(
        MOST_SUPPORT,
        SUPPORT_BYTES // 4 // context // (6 if trainer.router_replay else 1),
        MOST_BYTES // (8 if trainer.score_centering else 4) // context // batch,
    )
    for one in config.all_environments:
        sampling, key = sampling_of(config.sampling_for(one)), one.sampling_key("top_k")
        if sampling.cuts_off and not sampling.top_k:
            yield (
                f"{key} = 0: with top_p or min_p a trajectory records, for each token, the tokens "
                f"that could have been drawn instead, and top_k bounds them: set {key} to 64, say"
            )
        demand = max(sampling.top_k, 0 if sampling.cuts_off else trainer.score_centering)
        if demand > limit:
            setting = key if sampling.cuts_off else "trainer.score_centering"
            yield (
                f"{setting} = {demand}: with generator.max_context = {context:,} and batches of "
                f"{batch:,} samples, at most {limit:,} alternatives of each token can be recorded: "
                "lower one of them"
            )


# -- environments ----------------------------------------------------------------------------------


def _environment_faults(config: RunConfig) -> Iterator[str]:
    serve = config.generator.serve
    if config.environments and config.environment != EnvironmentConfig():
        yield "environment and [[environments]] are both set: remove one of them"
    asking = sum(one.asks for one in config.all_environments)
    if serve and not asking:
        kinds = " or ".join(("agent", *LIBRARIES))
        yield f"generator.serve = {serve} is for environment.kind = {kinds}: remove it"
    advertised = config.generator.serve_advertise
    if asking > 1 and advertised.rpartition(":")[2].isdigit():
        key = f"generator.serve_advertise = {advertised}"
        yield f"{key} has a port, and each environment with agents its own: leave it out"
    for one in config.all_environments:
        yield from one.environment_faults(serve, config.generator.max_context)
    if groups := config.rewarded_by_groups:
        yield from _group_faults(config, groups[0])
    elif "reward" not in config.buffer.stages:
        return
    elif config.environments:
        yield "buffer.stages has reward: set reward_scope = group in [[environments]], or remove it"
    elif config.environment.kind not in JUDGED_AT_ONCE:
        kind = config.environment.kind
        yield f"buffer.stages has reward, but kind {kind} rewards its turns: remove the stage"


def _group_faults(config: RunConfig, environment: EnvironmentConfig) -> Iterator[str]:
    scope, buffer = f"{environment.where}.reward_scope = group", config.buffer
    if "reward" not in buffer.stages:
        yield f'{scope} is done by scorers: put "reward" into buffer.stages'
    if not 2 <= buffer.group_size <= SUBMITTED:
        size = buffer.group_size
        yield f"{scope} compares samples: buffer.group_size = {size} must be from 2 to {SUBMITTED}"
    if buffer.straggler_s:
        yield f"{scope} waits for all samples of a group: set buffer.straggler_s to 0"
    samples = config.eval.samples_per_prompt
    if config.eval.prompts and not 2 <= samples <= SUBMITTED:
        key = f"eval.samples_per_prompt = {samples}"
        yield f"{scope} compares samples: {key} must be from 2 to {SUBMITTED}"


# -- samples with branches -------------------------------------------------------------------------


def branch_faults(config: RunConfig) -> Iterator[str]:
    """Yield settings that samples with branches (`environment.branches = "train"`) exclude.

    The trainer gives a branch the weight 1 / k. That is right for whatever is a sum or a mean over
    sequences or tokens with these weights. Settings that don't read the weights, or take a response
    for the sample, are named here.
    """
    training = [one.where for one in config.all_environments if one.branches == "train"][:1]
    pieces, objective = config.trainer.pieces, config.trainer.objective
    whitened = pieces.advantage in ("reinforce_pp", "reinforce_pp_baseline", "gae")
    for is_set, setting in (
        (whitened, f"advantage = {pieces.advantage}, which counts tokens alike to whiten them"),
        (pieces.overlong_buffer, "overlong_buffer, which punishes one response for its length"),
        (pieces.overlong_filter, "overlong_filter, which looks at the end of one response"),
        (
            pieces.kl_coef and pieces.kl_in == "reward",
            f"objective = {objective}, which takes the KL of one response off the reward",
        ),
        (config.trainer.router_replay, "router_replay, which has the experts of one response"),
    ):
        for where in training if is_set else ():
            yield f"{where}.branches = train does not work with trainer.{setting}: change one"


# -- cautions: the run may start nevertheless ------------------------------------------------------


def cautions(config: RunConfig) -> Iterator[tuple[str, str]]:
    if config.model.trust_remote_code:
        code = "model.trust_remote_code = true: Python code of the model's repository may run"
        yield "trust_remote_code", f"{code}, with all rights of this user"
    advantage = config.trainer.pieces.advantage
    compares = advantage not in ("rloo", "reinforce_pp", "gae", "teacher")  # or refuses one alone
    if config.buffer.group_size == 1 and compares:
        alone = f"buffer.group_size = 1 leaves trainer.advantage = {advantage} nothing to compare a"
        remedy = "set buffer.group_size to 2 or more, or trainer.advantage to reinforce_pp"
        yield "lone_groups", f"{alone} sample with: {remedy}"
    longest = max(config.all_environments, key=lambda one: config.sampling_for(one).max_tokens)
    if config.longest_turn >= (context := config.generator.max_context):
        key = f"{longest.sampling_key('max_tokens')} = {config.longest_turn}"
        cut = f"{key} does not fit into generator.max_context = {context} with its prompt"
        yield "max_tokens", f"{cut}: answers are cut off there"
