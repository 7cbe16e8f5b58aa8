"""Tries a run's environment on its first prompt: `python -m umbra.deploy.environment_check CONFIG`.

A process of its own, because it runs the user's code: that may hang, or pull in all of torch.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from umbra.proto.errors import UmbraError, UsageError
from umbra.services.environments.loading import load_environment
from umbra.services.environments.plays import Plays
from umbra.services.runtime.config import RunConfig
from umbra.services.runtime.config_loader import load_config
from umbra.services.runtime.jsonl import read_jsonl
from umbra.services.runtime.parent import die_with_parent


def check_environment(config: RunConfig, row: dict[str, Any]) -> None:
    """Load the environment and put an empty response to `row` into it; agents are only loaded.

    A model can say nothing at all, so every reward must take an empty response.

    Raises:
        UsageError: the environment cannot be loaded, or fails on that response.
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
        asyncio.run(Plays(make, what).play("first", row, [""]))
    except UmbraError as error:
        raise UsageError(f"{key}: an empty response to the first prompt failed: {error}") from error


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
