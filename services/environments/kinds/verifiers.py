"""Environments of the package `verifiers`, of both generations; theirs are loop, tools and rewards.

v0 is a module with `load_environment()`, which verifiers has up to 0.3; v1 is a taskset, with an
environment around it (`verifiers.v1`). Written against 0.3.1 and 0.4.0.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import itertools
import json
import math
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from umbra.proto.errors import UmbraError, UsageError
from umbra.services.environments.agent_program import Program
from umbra.services.environments.protocol import (
    Row,
    SampleError,
    StepResult,
    finite_number,
)

_KEY_VARIABLE = "UMBRA_SESSION_KEY_"  # what their names begin with, see `_key_variable`
_CONNECT_S = 60.0
# v0's error for a turn without words. It is the policy's own doing, so the sample counts, with the
# reward that the rubric has for it; dropping it would hide from training that saying nothing fails.
_SAID_NOTHING = "EmptyModelResponseError"
_MOST_PARTS, _LONGEST_NAME = 64, 100  # of a reward, as `config/trajectory_rules.py` has them
TASK_DATA = "task_data"  # the column with a task of v1
_CONTROL = ("environment",)  # columns that are not the task's
_V1_DEFAULTS: dict[str, Any] = {
    "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
}


def verifiers_program(name: str, options: Mapping[str, Any], said: str) -> Program:
    """Return the program of the environment or taskset `name`, which users call `said`.

    `options` are arguments of `load_environment` (v0) or tables of the configuration over our
    defaults (v1: "taskset", "agent", ...). Raises UsageError if it can't be loaded, or rewards
    whole groups only.
    """
    if is_v0(name):
        return _v0_program(_v0_environment(name, options), said)
    return _v1_program(_v1_environment(name, options), said)


def verifiers_rows(name: str, options: Mapping[str, Any], count: int, seed: int) -> list[Row]:
    """Return the first `count` tasks as prompt rows, shuffled by `seed` if they are finite."""
    if is_v0(name):
        dataset = _v0_environment(name, options).get_dataset(n=count, seed=seed)
        rows = dataset.to_list()  # None where there is no value
        return [{k: value for k, value in row.items() if value is not None} for row in rows]
    taskset = _v1_environment(name, options).taskset
    tasks: Iterable[Any] = taskset if taskset.INFINITE else taskset.shuffle(seed)
    return [_v1_row(task, n) for n, task in enumerate(itertools.islice(tasks, count))]


def main(name: str, options: str, count: str, seed: str, out: str) -> None:
    """Write up to `count` rows of `name` to the file `out`, in the Python that has verifiers."""
    sys.path.append(os.getcwd())
    try:
        rows = verifiers_rows(name, json.loads(options), int(count), int(seed))
        lines = [json.dumps(row) for row in rows]
    except UmbraError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    except TypeError as error:
        print(f"verifiers:{name}: a task can't be written as JSON: {error}", file=sys.stderr)
        sys.exit(2)
    Path(out).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def is_v0(name: str) -> bool:
    """Return whether `name` is an environment of the first generation.

    Raises UsageError if verifiers is missing, or does not know such environments any more.
    """
    library = _library()
    try:
        module = importlib.import_module(_module_of(name))
    except ModuleNotFoundError as error:
        if error.name != _module_of(name):
            raise UsageError(f"verifiers:{name}: importing it failed: {error}") from error
        return False  # one of those that verifiers.v1 brings, by whatever way it finds them
    except Exception as error:
        raise UsageError(
            f"verifiers:{name}: importing it failed: {type(error).__name__}: {error}"
        ) from error
    if not hasattr(module, "load_environment"):
        return False
    if not hasattr(library, "load_environment"):
        raise UsageError(
            f"verifiers:{name} has load_environment(), which verifiers {library.__version__} does "
            'not know: install "verifiers<0.4" and "mcp<2" for environment.python'
        )
    return True


def _library() -> Any:
    try:
        return importlib.import_module("verifiers")
    except ModuleNotFoundError as error:
        raise UsageError(
            'environment.kind = "verifiers" needs the package verifiers: install it for the '
            f"Python that environment.python names ({error})"
        ) from error


def _module_of(name: str) -> str:
    return name.replace("-", "_").split("/")[-1]


# -- v0 -------------------------------------------------------------------------------------------


def _v0_environment(name: str, options: Mapping[str, Any]) -> Any:
    try:
        return _library().load_environment(name, **options)
    except Exception as error:
        raise UsageError(f"verifiers:{name}: {error}") from error


def _v0_program(environment: Any, said: str) -> Program:
    if environment.requires_group_rollouts:
        raise UsageError(
            f"{said} has rewards over whole groups, but samples are scored one by one here"
        )
    client_config = importlib.import_module("verifiers.types").ClientConfig
    resolve_client = importlib.import_module("verifiers.clients").resolve_client

    async def play(row: Row, endpoint: dict[str, str]) -> StepResult:
        client = resolve_client(
            client_config(
                client_type="openai_chat_completions",
                api_base_url=endpoint["base_url"],
                api_key_var=_key_variable(endpoint),
                connect_timeout=_CONNECT_S,
                max_retries=2,
            )
        )
        task = {key: value for key, value in row.items() if key not in _CONTROL}
        try:
            outcome = await environment.run_rollout(task, client, "policy", {})
        finally:
            await client.close()
        error = outcome.get("error")
        if error and error.get("error") != _SAID_NOTHING:
            raise SampleError(f"{said}: {_worded(error)}")
        return StepResult(
            reward=finite_number(outcome["reward"], said),
            reward_parts=_parts(outcome.get("metrics") or {}),
            reason=_v0_reason(outcome),
        )

    return play


def _v0_reason(outcome: Mapping[str, Any]) -> str:
    if outcome.get("is_truncated"):
        return "length"
    ends = {"max_turns_reached": "turns", "timeout_reached": "time"}
    return ends.get(str(outcome.get("stop_condition")), "stop")


# -- v1 -------------------------------------------------------------------------------------------


def _v1_environment(name: str, options: Mapping[str, Any]) -> Any:
    try:
        library = importlib.import_module("verifiers.v1")
    except ModuleNotFoundError as error:
        raise UsageError(f"verifiers:{name} needs verifiers.v1: {error}") from error
    tree = _merged(_merged(_V1_DEFAULTS, options), {"taskset": {"id": name}})
    try:
        config = library.env_config_type(name, tree.get("id", "")).model_validate(tree)
        return library.load_environment(config)
    except Exception as error:
        raise UsageError(f"verifiers:{name}: {type(error).__name__}: {error}") from error


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(under)
    for key, value in over.items():
        below = merged.get(key)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        merged[key] = _merged(below, value) if both else value  # type: ignore[arg-type]
    return merged


def _v1_row(task: Any, number: int) -> Row:
    data = task.data.model_dump(mode="json")
    prompt = data.get("prompt")
    if isinstance(prompt, list):  # only to look at: the harness writes its own
        prompt = "\n".join(str(message.get("content", "")) for message in prompt)
    return {"prompt": prompt or data.get("name") or f"task {number}", TASK_DATA: data}


def _v1_program(environment: Any, said: str) -> Program:
    library = importlib.import_module("verifiers.v1")
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
                print(f"{said}: what its episodes share has ended: {error!r}")

    async def play(row: Row, endpoint: dict[str, str]) -> StepResult:
        nonlocal serving
        if TASK_DATA not in row:
            raise SampleError(f"{said} needs rows made by `umbra make-task verifiers:...`")
        if serving is None:
            serving = asyncio.get_running_loop().create_future()
            keepers.append(asyncio.ensure_future(serve(serving)))
        await asyncio.shield(serving)
        data = data_class.model_validate(row[TASK_DATA])
        client = library.EvalClientConfig(
            base_url=endpoint["base_url"], api_key_var=_key_variable(endpoint)
        )
        context = library.ModelContext(model="policy", client=client)
        task = task_class(data, environment.config.taskset.task)
        return _v1_result(await environment.run_episode(task, context), said)

    return play


def _v1_result(episode: Any, said: str) -> StepResult:
    trained = [trace for trace in episode.traces if trace.agent is None or trace.agent.trainable]
    errors = [*episode.errors, *(error for trace in trained for error in trace.errors)]
    if errors or not episode.ok:
        raise SampleError(f"{said}: {_worded(errors[0]) if errors else 'its episode is not ok'}")
    if len(trained) != 1:
        raise SampleError(f"{said} ran {len(trained)} agents that train the policy; use one")
    (trace,) = trained
    unscored = [name for name, reward in trace.rewards.items() if reward is None]
    if unscored:
        raise SampleError(f"{said}: its reward {unscored[0]} was not computed")
    parts = {name: reward.value for name, reward in trace.rewards.items()}
    return StepResult(
        reward=finite_number(trace.reward, said),
        reward_parts=_parts({**parts, **trace.metrics}),
        reason="length" if trace.is_truncated else "stop",
    )


# -- both -----------------------------------------------------------------------------------------


def _key_variable(endpoint: Mapping[str, str]) -> str:
    """Return the environment variable with the key of `endpoint`, where verifiers reads it.

    Each key has its own: endpoints may have different ones.
    """
    key = endpoint["api_key"]
    name = _KEY_VARIABLE + hashlib.sha256(key.encode()).hexdigest()[:16]
    os.environ[name] = key
    return name


def _parts(values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among `values`, as many as a reward may have parts."""
    numbers = {
        str(name)[:_LONGEST_NAME]: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
    return dict(itertools.islice(numbers.items(), _MOST_PARTS))


def _worded(error: Any) -> str:
    """An error as verifiers records it, in one line."""
    if isinstance(error, Mapping):
        return str(error.get("error_chain_str") or error.get("message") or error.get("error"))
    return f"{getattr(error, 'type', type(error).__name__)}: {getattr(error, 'message', error)}"
