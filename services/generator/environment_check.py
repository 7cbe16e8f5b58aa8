"""Tries a run's environment on its first prompt, before anything of the run is started.

    python -m umbra.services.generator.environment_check CONFIG ROW

A process of its own, because it runs the user's code, which may pull in all of torch. It plays as
in the run: in a worker that is ended when an answer takes longer than `environment.timeout_s`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from umbra.proto.errors import UmbraError, UsageError
from umbra.services.environments.environment_host import Result
from umbra.services.environments.pool import EnvironmentPool, open_pool
from umbra.services.environments.protocol import Opening, StepResult
from umbra.services.generator.template_check import check_play
from umbra.services.runtime.config import RunConfig
from umbra.services.runtime.config.loader import load_config
from umbra.services.runtime.process.parent import die_with_parent


def check_environment(config: RunConfig, row: dict[str, Any]) -> None:
    """Load the environment and put an empty response to `row` into it; agents are only loaded.

    A model can say nothing at all, so every reward must take an empty response. If there are more
    turns, the model's chat template must be able to write them.

    Raises:
        UsageError: the environment cannot be loaded, fails on that response, takes longer than
            `environment.timeout_s` for it, or goes on in a way that the chat template can't.
        DeadlineError: loading it took too long.
    """
    kind = config.environment.kind
    if kind == "agent" and not config.environment.agent:
        return  # its agents come from outside
    key = "environment.reward" if kind == "reward" else "environment.kind"
    answered = threading.Event()
    with closing(open_pool(config.environment, wake=answered.set)) as pool:
        if kind == "agent":
            return  # it asks a model, and there is none yet
        opening = _play(pool, row, [], answered, f"{key}: opening the first prompt failed")
        failed = f"{key}: an empty response to the first prompt failed"
        answer = _play(pool, row, [""], answered, failed)
    if isinstance(opening, Opening) and isinstance(answer, StepResult):
        check_play(config, opening, answer)


def _play(
    pool: EnvironmentPool,
    row: dict[str, Any],
    responses: Sequence[str],
    answered: threading.Event,
    failed: str,
) -> Result:
    answered.clear()
    pool.play("first", row, responses)
    while not (outcomes := pool.collect()):
        answered.wait()  # the pool gives an outcome at environment.timeout_s at the latest
        answered.clear()
    (outcome,) = outcomes
    if outcome.error or not isinstance(outcome.value, Opening | StepResult):
        raise UsageError(f"{failed}: {outcome.error}")
    return outcome.value


def main(path: str, row: str) -> int:
    """Check the environment of the configuration at `path` on the row (MessagePack) at `row`."""
    die_with_parent()
    try:
        config = load_config(Path(path), environ={})
        check_environment(config, msgspec.msgpack.decode(Path(row).read_bytes()))
    except UmbraError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
