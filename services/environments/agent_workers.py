"""The processes of a run's agents, whoever runs them: a generator or a runner."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import msgspec

from umbra.services.config import EnvironmentConfig, NamedEnvironment
from umbra.services.environments.environment_host import Delivered
from umbra.services.environments.loading import name_of
from umbra.services.environments.protocol import Row
from umbra.services.environments.worker_pool import WorkerPool

NO_REWARD = "its agent returned no reward, and has posted none"
PLAYED_TWICE = "the process of its agent ended because of another agent in it"
"""Why a sample fails whose agent would begin anew: what it did must not be done twice."""

_NO_KEY = "none"  # the client insists on one


def offered_name(environment: EnvironmentConfig) -> str:
    """Return what generators and runners call the environment."""
    several = isinstance(environment, NamedEnvironment)
    return environment.name if several else name_of(environment)


def agent_workers(
    config: EnvironmentConfig,
    left: Callable[[str, Delivered | None, str], None],
    began: Callable[[str], None],
) -> WorkerPool:
    """A pool of processes for agents, to be used within one event loop.

    The work of an agent has no limit here: whoever holds its session limits its silence.

    Args:
        config: the agent, and how many processes of it there may be.
        left: called with sample, what its agent returned, and error ("" if it returned).
        began: called with the sample whenever a process begins to play for it.
    """
    lasting = msgspec.structs.replace(config, timeout_s=math.inf, reset_s=0.0)
    return WorkerPool(lasting, left, began, end_forgotten=True)


def start_agent(workers: WorkerPool, sample: str, row: Row, session_url: str, key: str) -> None:
    """Have an agent play `row`, which asks the session at `session_url` for turns."""
    endpoint = {"base_url": f"{session_url}/v1", "api_key": key or _NO_KEY}
    workers.play(sample, row, [json.dumps(endpoint)])
