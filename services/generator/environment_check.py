"""Tries a run's environment on its first prompt, before anything of the run is started.

    python -m umbra.services.generator.environment_check CONFIG

A process of its own, because it runs the user's code: that may hang, or pull in all of torch.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from umbra.proto.errors import UmbraError, UsageError
from umbra.services.environments.environment_host import EnvironmentHost
from umbra.services.environments.loading import load_environment
from umbra.services.environments.protocol import Opening, StepResult
from umbra.services.generator.template_check import check_play
from umbra.services.runtime.config import RunConfig
from umbra.services.runtime.config.loader import load_config
from umbra.services.runtime.process.jsonl import read_jsonl
from umbra.services.runtime.process.parent import die_with_parent


def check_environment(config: RunConfig, row: dict[str, Any]) -> None:
    """Load the environment and put an empty response to `row` into it; agents are only loaded.

    A model can say nothing at all, so every reward must take an empty response. If there are more
    turns, the model's chat template must be able to write them.

    Raises:
        UsageError: the environment cannot be loaded, fails on that response, or goes on in a way
            that the chat template can't.
    """
    kind = config.environment.kind
    if kind == "agent" and not config.environment.agent:
        return  # its agents come from outside
    make = load_environment(config.environment)
    if kind == "agent":
        return  # it asks a model, and there is none yet
    what = config.environment.reward if kind == "reward" else kind
    key = "environment.reward" if kind == "reward" else "environment.kind"
    try:
        opening, answer = asyncio.run(EnvironmentHost(make, what).play("first", row, [""]))
    except UmbraError as error:
        raise UsageError(f"{key}: an empty response to the first prompt failed: {error}") from error
    if isinstance(opening, Opening) and isinstance(answer, StepResult):
        check_play(config, opening, answer)


def main(path: str) -> int:
    """Check the environment of the resolved configuration at `path`."""
    die_with_parent()
    try:
        config = load_config(Path(path), environ={})
        check_environment(config, read_jsonl(config.data.prompts)[0])
    except UmbraError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
