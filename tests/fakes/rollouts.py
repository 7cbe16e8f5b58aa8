"""Common parts of tests of rollouts: settings, a scripted model, and running to the end."""

from collections.abc import Callable, Sequence
from typing import Any

from umbra.proto.records import Sampling, Trajectory
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
