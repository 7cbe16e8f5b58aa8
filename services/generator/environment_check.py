"""Tries each environment of a run on its first prompt, before anything of the run is started.

    python -m umbra.services.generator.environment_check CONFIG ROWS

A process of its own, because it runs the user's code: that may hang, or pull in all of torch.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from umbra.proto.errors import UmbraError, UsageError
from umbra.services.config import RunConfig
from umbra.services.config.loader import load_config
from umbra.services.environments.pool import EnvironmentPool, EpisodeOutcome, open_pool
from umbra.services.environments.protocol import Opening, StepResult
from umbra.services.generator.template_check import check_play
from umbra.services.process.parent import die_with_parent

_LOOK_S = 0.01


def check_environment(config: RunConfig, row: dict[str, Any]) -> None:
    """Load the environment and put an empty response to `row` into it, or a whole group of them.

    Agents are only loaded.

    A model can say nothing at all, so every reward must take an empty response. If there are more
    turns, the model's chat template must be able to write them.

    Raises:
        UsageError: the environment cannot be loaded, fails on that response, or goes on in a way
            that the chat template can't.
    """
    environment = config.environment
    if environment.asks and not environment.starts_agents:
        return  # its agents come to the generators
    asks = environment.asks  # it asks a model, and there is none yet
    key = "environment.reward" if environment.kind == "reward" else "environment.kind"
    size = config.buffer.group_size if environment.reward_scope == "group" else 1
    with closing(open_pool(environment)) as pool:
        plays = [] if asks else [_played(pool, row, said) for said in ([], [""] * size)]
    for outcome in plays:
        if outcome.error:
            raise UsageError(
                f"{key}: an empty response to the first prompt failed: {outcome.error}"
            )
    match [outcome.value for outcome in plays]:
        case [Opening() as opening, StepResult() as answer]:
            check_play(config, opening, answer)


def _played(pool: EnvironmentPool, row: dict[str, Any], responses: list[str]) -> EpisodeOutcome:
    """What comes of a play; the pool sees to it that something does."""
    pool.play("first", row, responses)
    while not (outcomes := pool.collect()):
        time.sleep(_LOOK_S)
    return outcomes[0]


def main(path: str, rows: str) -> int:
    """Check the environments of the configuration at `path`, each with its first row.

    `rows` is a JSON file with the rows by the environments' names, of which one has none.
    """
    die_with_parent()
    config = load_config(Path(path), environ={})
    name, named = "", {one.name: one for one in config.environments}
    try:
        for name, row in json.loads(Path(rows).read_bytes()).items():
            one = named.get(name, config.environment)
            check_environment(msgspec.structs.replace(config, environment=one), row)
    except UmbraError as error:
        print(f"environment {name}: {error}" if named else error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
