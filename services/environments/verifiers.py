"""Environments of the package `verifiers`; theirs are loop, tools and rewards.

A taskset, with an environment around it (`verifiers.v1`). Written against 0.4.0.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import math
import os
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from umbra.proto.bounds import PARTS
from umbra.proto.errors import UsageError
from umbra.services.config.trajectory_rules import MOST_NAME
from umbra.services.environments.agent_program import Program, library
from umbra.services.environments.protocol import Row, SampleError, StepResult, finite_number

_library = partial(library, "verifiers.v1", "verifiers", "verifiers, 0.4 or newer")
_KEY_VARIABLE = "UMBRA_SESSION_KEY_"  # what their names begin with, see `_key_variable`
TASK_DATA = "task_data"  # the column with a task
_DEFAULTS = {"agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}


def task_rows(name: str, options: Mapping[str, Any], count: int, seed: int) -> list[Row]:
    """Return the first `count` tasks of `name` as prompt rows, shuffled if there is an end of them.

    `options` as of `verifiers_program`. Raises UsageError if it can't be loaded.
    """
    taskset = _environment(name, options).taskset
    tasks: Iterable[Any] = taskset if taskset.INFINITE else taskset.shuffle(seed)
    return [_row(task, number) for number, task in enumerate(itertools.islice(tasks, count))]


def _environment(name: str, options: Mapping[str, Any]) -> Any:
    verifiers = _library()
    tree = _merged(_merged(_DEFAULTS, options), {"taskset": {"id": name}})
    try:
        config = verifiers.env_config_type(name, tree.get("id", "")).model_validate(tree)
        return verifiers.load_environment(config)
    except Exception as error:
        raise UsageError(f"verifiers:{name}: {type(error).__name__}: {error}") from error


def _merged(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in overrides.items():
        below = merged.get(key)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        merged[key] = _merged(below, value) if both else value  # type: ignore[arg-type]
    return merged


def _row(task: Any, number: int) -> Row:
    data = task.data.model_dump(mode="json")
    prompt = data.get("prompt")
    if isinstance(prompt, list):  # only to look at: the harness writes its own
        prompt = "\n".join(str(message.get("content", "")) for message in prompt)
    return {"prompt": prompt or data.get("name") or f"task {number}", TASK_DATA: data}


def verifiers_program(name: str, options: Mapping[str, Any], label: str) -> Program:
    """Return the program of the taskset or environment `name`, which users call `label`.

    `options` are tables of its configuration over our defaults ("taskset", "agent", ...). Raises
    UsageError if it can't be loaded.
    """
    environment = _environment(name, options)
    verifiers = _library()
    task_class = type(environment.taskset).task_type()
    data_class = task_class.data_type()
    serving: asyncio.Future[None] | None = None
    keepers: list[asyncio.Future[None]] = []

    async def serve(ready: asyncio.Future[None]) -> None:
        try:
            async with environment.serving():
                ready.set_result(None)
                await asyncio.Event().wait()
        except Exception as error:  # noqa: BLE001 - raised where it is awaited
            if not ready.done():
                ready.set_exception(error)
            else:
                print(f"{label}: the server that its episodes share has ended: {error!r}")

    async def play(row: Row, endpoint: dict[str, str]) -> StepResult:
        nonlocal serving
        if TASK_DATA not in row:
            raise SampleError(f"{label} needs rows made by `umbra make-task verifiers:...`")
        if serving is None:
            serving = asyncio.get_running_loop().create_future()
            keepers.append(asyncio.ensure_future(serve(serving)))
        await asyncio.shield(serving)
        data = data_class.model_validate(row[TASK_DATA])
        client = verifiers.EvalClientConfig(
            base_url=endpoint["base_url"], api_key_var=_key_variable(endpoint)
        )
        context = verifiers.ModelContext(model="policy", client=client)
        task = task_class(data, environment.config.taskset.task)
        return _result(await environment.run_episode(task, context), label)

    return play


def _result(episode: Any, label: str) -> StepResult:
    trained = [trace for trace in episode.traces if trace.agent is None or trace.agent.trainable]
    errors = [*episode.errors, *(error for trace in trained for error in trace.errors)]
    if errors or not episode.ok:
        raise SampleError(f"{label}: {_worded(errors[0]) if errors else 'its episode failed'}")
    if len(trained) != 1:
        raise SampleError(f"{label} ran {len(trained)} agents that train the policy; use one")
    (trace,) = trained
    unscored = [name for name, reward in trace.rewards.items() if reward is None]
    if unscored:
        raise SampleError(f"{label}: its reward {unscored[0]} was not computed")
    parts = {name: reward.value for name, reward in trace.rewards.items()}
    return StepResult(
        reward=finite_number(trace.reward, label),
        reward_parts=_parts({**parts, **trace.metrics}),
        reason="length" if trace.is_truncated else "stop",
    )


def _key_variable(endpoint: Mapping[str, str]) -> str:
    """Return the environment variable, one for each key, where verifiers reads `endpoint`'s."""
    key = endpoint["api_key"]
    name = _KEY_VARIABLE + hashlib.sha256(key.encode()).hexdigest()[:16]
    os.environ[name] = key
    return name


def _parts(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers among `values`, as many as a reward may have parts."""
    numbers = {
        str(name)[:MOST_NAME]: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
    return dict(itertools.islice(numbers.items(), PARTS))


def _worded(error: Any) -> str:
    """Return an error as verifiers records it, in one line."""
    return f"{getattr(error, 'type', type(error).__name__)}: {getattr(error, 'message', error)}"
