"""Common parts of tests of rollouts: settings, a scripted model, and running to the end."""

from collections.abc import Callable, Sequence
from typing import Any

from fakes.engine import ScriptedEngine
from fakes.trajectories import sample

from umbra.proto.messages import ReturnedSample
from umbra.proto.records import Sampling, Trajectory
from umbra.services.environments.pool import EnvironmentPool, InlinePool
from umbra.services.environments.protocol import EnvironmentFactory
from umbra.services.generator.engines.engine import Engine
from umbra.services.generator.rollout import RolloutSettings
from umbra.services.generator.runner import RolloutRunner
from umbra.services.modeling.chat import Chat

STOP = 3


def settings(chat: Chat, **changes: Any) -> RolloutSettings:
    values = {"sampling": Sampling(max_tokens=8), "max_context": 64, "clock": lambda: 5.0}
    return RolloutSettings(chat=chat, **{**values, **changes})


def says(tokenizer: Any, *turns: str, given: int = 0) -> Callable[[Sequence[int]], list[int]]:
    """A script: after n end tokens, say turn n; the prompt has `given` end tokens more."""
    prefix = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in turns]
    assistant = tokenizer.convert_tokens_to_ids("<|assistant|>")

    def script(ids: Sequence[int]) -> list[int]:
        turn = prefix[list(ids).count(STOP) - given]
        said = len(ids) - 1 - max(i for i, token in enumerate(ids) if token == assistant)
        return [*turn, STOP][said:]

    return script


def runner_of(
    chat: Chat,
    environment: EnvironmentFactory | EnvironmentPool,
    *turns: str,
    engine: Engine | None = None,
    flush_tokens: int = 0,
    **options: Any,
) -> RolloutRunner:
    """A runner whose model says `turns`, or whose engine is given; `options` are settings."""
    engine = engine or ScriptedEngine(says(chat._tokenizer, *turns))
    pool = InlinePool(environment) if callable(environment) else environment
    return RolloutRunner(engine, pool, settings(chat, **options), flush_tokens)


def rolled(
    chat: Chat, environment: EnvironmentFactory, row: dict[str, Any], *turns: str, **options: Any
) -> Trajectory:
    """The trajectory of one sample of such a runner."""
    runner = runner_of(chat, environment, *turns, **options)
    runner.add([sample(row)])
    (trajectory,) = finish(runner)
    return trajectory


def after(runner: RolloutRunner, polls: int) -> tuple[list[Trajectory], list[ReturnedSample]]:
    """Results after so many polls."""
    for _ in range(polls):
        runner.poll(0.0)
    return runner.results()


def finish(runner: RolloutRunner, turns: int = 1000) -> list[Trajectory]:
    done: list[Trajectory] = []
    for _ in range(turns):
        runner.poll(0.0)
        finished, failed = runner.results()
        assert not failed, failed[0].reason
        done += finished
        if not runner.active:
            return done
    raise AssertionError("rollouts do not end")
