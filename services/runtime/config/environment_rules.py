"""What is wrong with a run's environments, as far as the configuration tells."""

from __future__ import annotations

from collections.abc import Iterator

from umbra.services.runtime.config import EnvironmentConfig, NamedEnvironment, RunConfig
from umbra.services.runtime.config.generation import LIBRARIES

_REWARDED = ("reward", "trl")  # kinds that take functions of the user's


def environment_faults(config: RunConfig) -> Iterator[str]:
    """What can't work, or has no effect; a sentence each."""
    several, serve = config.environments, config.generator.serve
    if several and config.environment != EnvironmentConfig():
        yield "environment and [[environments]] are both set: remove one of them"
    if serve and not any(one.asks for one in config.all_environments):
        kinds = " or ".join(("agent", *LIBRARIES))
        yield (
            f"generator.serve = {serve} has no effect: set environment.kind to {kinds}, or "
            "remove it"
        )
    for one in config.all_environments:
        named = isinstance(one, NamedEnvironment)
        where = f"environments.{one.name}" if named else "environment"
        yield from _faults(one, where, serve)
        if one.timeout_s >= config.trainer.batch_wait_s:
            yield (
                f"trainer.batch_wait_s = {config.trainer.batch_wait_s:g} ends the run before a "
                f"reward that takes {where}.timeout_s = {one.timeout_s:g} is given up"
            )
    if "reward" in config.buffer.stages and several:
        yield (
            "buffer.stages has reward, which has one environment's rewards, but there are several "
            "[[environments]]: remove the stage"
        )
    elif "reward" in config.buffer.stages and config.environment.kind not in ("exact", "reward"):
        yield (
            f"buffer.stages has reward, but environment.kind = {config.environment.kind} rewards "
            "its turns itself: remove the stage"
        )


def _faults(one: EnvironmentConfig, where: str, serve: str) -> Iterator[str]:
    if one.kind == "agent" and not one.agent and not serve:
        yield (
            f"{where}.kind = agent has no agent: set {where}.agent to module:function, or "
            "generator.serve to the HOST:PORT that agents come to"
        )
    if one.run_on == "env_worker" and not one.agent:
        yield (
            f"{where}.run_on = env_worker is for agents that the run starts: set "
            f'{where}.kind = "agent" and {where}.agent to module:function'
        )
    if one.run_on == "env_worker" and isinstance(one, NamedEnvironment):
        yield (
            f"{where}.run_on = env_worker: env-workers run the agents of one [environment], not of "
            "several; remove it"
        )
    for key, value, kinds in (
        ("agent", one.agent, ("agent",)),
        ("id", one.id, LIBRARIES),
        ("reward", one.reward, _REWARDED),
        ("rewards", one.rewards, _REWARDED),
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
