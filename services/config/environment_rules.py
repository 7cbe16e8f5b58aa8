"""What is wrong with a run's environments, as far as the configuration tells."""

from __future__ import annotations

from collections.abc import Iterator

from umbra.proto.bounds import SUBMITTED
from umbra.services.config import EnvironmentConfig, RunConfig
from umbra.services.config.generation import LIBRARIES

_REWARDED = ("reward", "trl")  # kinds that take functions of the user's


def environment_faults(config: RunConfig) -> Iterator[str]:
    """What can't work, or has no effect; a sentence each."""
    several, serve = config.environments, config.generator.serve
    if several and config.environment != EnvironmentConfig():
        yield "environment and [[environments]] are both set: remove one of them"
    asking = sum(one.asks for one in config.all_environments)
    if serve and not asking:
        kinds = " or ".join(("agent", *LIBRARIES))
        yield (
            f"generator.serve = {serve} has no effect: set environment.kind to {kinds}, or "
            "remove it"
        )
    advertised = config.generator.serve_advertise
    if asking > 1 and advertised.rpartition(":")[2].isdigit():
        yield (
            f"generator.serve_advertise = {advertised} names one port, and each environment with "
            "agents is served at its own: leave the port out"
        )
    for one in config.all_environments:
        yield from _faults(one, serve)
    yield from _stage_faults(config)


def _stage_faults(config: RunConfig) -> Iterator[str]:
    """Where the environments and stage "reward" don't fit."""
    if groups := config.rewarded_by_groups:
        yield from _group_faults(config, groups[0])
    elif "reward" not in config.buffer.stages:
        return
    elif config.environments:
        yield (
            "buffer.stages has reward, which of several [[environments]] is for those with "
            "reward_scope = group, and none has that: remove the stage, or set it"
        )
    elif config.environment.kind not in ("exact", "reward"):
        yield (
            f"buffer.stages has reward, but environment.kind = {config.environment.kind} rewards "
            "its turns itself: remove the stage"
        )


def _group_faults(config: RunConfig, one: EnvironmentConfig) -> Iterator[str]:
    """Why rewards can't be given to whole groups, as `one` of the environments asks for."""
    scope, buffer = f"{one.where}.reward_scope = group", config.buffer
    if "reward" not in buffer.stages:
        yield f'{scope} is done by scorers: put "reward" into buffer.stages'
    if not 2 <= buffer.group_size <= SUBMITTED:
        yield (
            f"{scope} compares the samples of a group: buffer.group_size = {buffer.group_size} "
            f"must be from 2 to {SUBMITTED}"
        )
    if buffer.straggler_s:
        yield (
            f"{scope} waits for all samples of a group, but buffer.straggler_s = "
            f"{buffer.straggler_s:g} goes on without some: set it to 0"
        )
    each = config.eval.samples_per_prompt
    if config.eval.within and not 2 <= each <= SUBMITTED:
        yield (
            f"{scope} compares the samples of a prompt in evaluations too: "
            f"eval.samples_per_prompt = {each} must be from 2 to {SUBMITTED}"
        )


def _faults(one: EnvironmentConfig, serve: str) -> Iterator[str]:
    where = one.where
    if one.kind == "agent" and not one.agent and not serve:
        yield (
            f"{where}.kind = agent has no agent: set {where}.agent to module:function, or "
            "generator.serve to the HOST:PORT that agents come to"
        )
    if one.reward_scope == "group" and one.kind == "trl":
        yield (
            f"{where}.reward_scope = group does not go with kind trl, whose functions get the "
            f"environments of their samples, which live where each was played: remove it, or set "
            f"{where}.kind to reward"
        )
    elif one.reward_scope == "group" and one.kind != "reward":
        yield (
            f"{where}.reward_scope = group has no effect: set {where}.kind to reward, whose "
            "functions may take a group, or remove it"
        )
    if not one.workers and not one.asks:
        yield (
            f"{where}.workers = 0 is for programs that ask for turns, which `umbra run-agents` "
            f"runs: set it to 1 or more, or {where}.kind to agent, {', '.join(LIBRARIES)}"
        )
    if not one.workers and not serve:
        yield (
            f"{where}.workers = 0 leaves the programs to `umbra run-agents`: set generator.serve "
            "to the HOST:PORT that it comes to"
        )
    for key, value, kinds in (
        ("agent", one.agent, ("agent",)),
        ("id", one.id, LIBRARIES),
        ("reward", one.reward, _REWARDED),
    ):
        if value and one.kind not in kinds:
            yield (
                f"{where}.{key} = {value} has no effect: set {where}.kind to "
                f"{' or '.join(kinds)}, or remove it"
            )
    if one.kind in LIBRARIES and not one.id:
        yield f"{where}.kind = {one.kind} needs {where}.id"
    if one.kind == "verifiers" and one.max_turns:
        yield (
            f"{where}.max_turns would cut rollouts that verifiers leads: give the environment its "
            f"own argument for that, in {where}.options"
        )
