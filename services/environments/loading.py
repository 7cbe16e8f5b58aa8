"""Finds the environment that a configuration names, with errors a person can act on."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from umbra.proto.errors import UsageError
from umbra.services.config import EnvironmentConfig
from umbra.services.config.generation import LIBRARIES
from umbra.services.environments import built_in
from umbra.services.environments.agent_program import AgentProgram, Program
from umbra.services.environments.openenv import openenv_program
from umbra.services.environments.protocol import Environment, EnvironmentFactory
from umbra.services.environments.rewards import RewardedGroup, RewardedTurn, RewardFunction, Rewards
from umbra.services.environments.sandbox import TOOLS as SANDBOXED
from umbra.services.environments.sandbox import Sandbox, SandboxTools, container_factory
from umbra.services.environments.tools import BUILT_IN, ToolUse
from umbra.services.environments.trl import trl_program
from umbra.services.environments.verifiers import verifiers_program

UNREWARDED = "none"  # the kind that a generator runs while a scoring stage gives the rewards
_KINDS: dict[str, Callable[..., Environment]] = {
    "exact": built_in.ExactMatch,
    "numeric": built_in.NumericMatch,
    "math": built_in.MathVerify,
    "guess": built_in.Guess,
    UNREWARDED: built_in.Unrewarded,
}
_OTHERS = ("tools", "reward", "agent")
_INSTANT = {"exact", "numeric", "guess", UNREWARDED}


def runs_inline(config: EnvironmentConfig) -> bool:
    """Return whether the environment is built in and too quick to need a process."""
    if config.kind == "tools":
        return set(config.options.get("tools", BUILT_IN)) <= set(BUILT_IN)
    return config.kind in _INSTANT


def name_of(config: EnvironmentConfig) -> str:
    """Return the user's name of the environment, for errors."""
    if config.kind == "reward":
        return f"environment {', '.join(_functions(config))}"
    if config.kind == "agent":
        return f"agent {config.agent}".strip()  # one from outside has no name
    return f"environment {config.kind}" + (f":{config.id}" if config.kind in LIBRARIES else "")


def load_environment(config: EnvironmentConfig) -> EnvironmentFactory:
    """Return the factory of the configured environment; a UsageError names its fault."""
    kind, options = config.kind, dict(config.options)
    sandbox: Callable[[], Any] | None = _sandbox(config) if config.sandbox else None
    runs_code = kind == "agent" or ":" in kind
    make: Callable[..., Environment]
    if kind in LIBRARIES:
        make, options = partial(AgentProgram, _program(config), name_of(config)), {}
    elif kind == "reward":
        make = _rewarded(config)
    elif kind == "agent":
        if not config.agent:
            raise UsageError(
                'environment.kind = "agent" needs environment.agent = "module:function" here'
            )
        make = partial(AgentProgram, _load(config.agent, "environment.agent"), name_of(config))
    elif kind == "tools":
        make = ToolUse
        names = options.get("tools", list(BUILT_IN))
        if not names or not isinstance(names, list) or not all(isinstance(n, str) for n in names):
            raise UsageError(
                f"environment.options.tools must be a list of {', '.join(BUILT_IN)} or "
                f'"module:function", not {names!r}'
            )
        options["tools"] = [_tool(name) for name in names]
        if needing := [name for name in names if name in SANDBOXED]:
            if sandbox is None:
                raise UsageError(
                    f"environment.options.tools: {needing[0]!r} runs what a model writes: set "
                    'environment.sandbox to "docker" or a class as "module:Class"'
                )
            runs_code, sandbox = True, partial(SandboxTools, sandbox)
    elif ":" in kind:
        make = _load(kind, "environment.kind", "reset", "step")
    elif kind in _KINDS:
        make = _KINDS[kind]
    else:
        known = [*(kind for kind in _KINDS if kind != UNREWARDED), *_OTHERS, *LIBRARIES]
        raise UsageError(
            f"environment.kind {kind!r} is unknown{_nearest(kind, known)}; use "
            f'{", ".join(known)}, or a class as "module:Class"'
        )
    if sandbox is not None and not runs_code:
        raise UsageError(
            f"environment.sandbox = {config.sandbox} has no effect: kind {kind!r} runs no code of "
            "the model's in it; remove it, or name a tool that does in environment.options.tools"
        )

    def factory() -> Environment:
        arguments: dict[str, Any] = {} if sandbox is None else {"sandbox": sandbox()}
        return make(**options, **arguments)

    try:
        factory()
    except TypeError as error:
        raise UsageError(f"environment.options do not fit {kind!r}: {error}") from error
    return factory


def _sandbox(config: EnvironmentConfig) -> Callable[[], Sandbox]:
    if ":" in config.sandbox:
        make = _load(config.sandbox, "environment.sandbox", "run", "close")
        return partial(make, **config.sandbox_options)
    if config.sandbox != "docker":
        raise UsageError(
            f"environment.sandbox {config.sandbox!r} is unknown: use docker, or a class as "
            '"module:Class"'
        )
    return container_factory(config.sandbox_options)


def _rewarded(config: EnvironmentConfig) -> Callable[..., Environment]:
    rewards = _rewards(config)
    if not rewards.any:
        raise UsageError(
            'environment.kind = "reward" needs environment.reward = "module:function", or a table '
            "of several with their weights"
        )
    if config.reward_scope != "group":
        return partial(RewardedTurn, rewards)
    if not rewards.batched:
        raise UsageError(
            f'environment.reward_scope = "group": {name_of(config)} has no function with the '
            "parameter completions, that would be called with a group"
        )
    return partial(RewardedGroup, rewards)


def _rewards(config: EnvironmentConfig) -> Rewards:
    functions = [
        RewardFunction(_load(target, "environment.reward"), target, weight)
        for target, weight in _functions(config).items()
    ]
    return Rewards(functions, named=not isinstance(config.reward, str))


def _functions(config: EnvironmentConfig) -> dict[str, float]:
    reward = config.reward
    return {reward: 1.0} if isinstance(reward, str) and reward else dict(reward or {})


def _program(config: EnvironmentConfig) -> Program:
    """Return the player for samples of another library's environment."""
    if not config.id:
        raise UsageError(f'environment.kind = "{config.kind}" needs environment.id')
    find_modules_here()
    name, options = name_of(config), config.options
    try:
        if config.kind == "verifiers":
            return verifiers_program(config.id, options, name)
        if config.kind == "openenv":
            return openenv_program(config.id, name, **options)
        make = _load(config.id, "environment.id")
        return trl_program(make, _rewards(config), name, **options)
    except TypeError as error:
        raise UsageError(f"environment.options do not fit {config.kind!r}: {error}") from error


def find_modules_here() -> str:
    """Let modules in the working directory be imported; return its path."""
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)  # a file there shadows no library
    return folder


def _tool(name: str) -> Callable[..., Any] | str:
    """Return a tool, or the name of one that is of each sample's own."""
    if name in BUILT_IN or name in SANDBOXED:
        return BUILT_IN.get(name, name)
    if ":" not in name:
        known = [*BUILT_IN, *SANDBOXED]
        raise UsageError(
            f"environment.options.tools: {name!r} is unknown{_nearest(name, known)}; use "
            f'{", ".join(known)}, or a function as "module:function"'
        )
    return _load(name, "environment.options.tools")


def _load(target: str, key: str, *methods: str) -> Callable[..., Any]:
    """Return the callable "module:name", which has `methods`, and may lie in our directory."""
    module_name, _, name = target.partition(":")
    if not module_name or not name:
        raise UsageError(f'{key} {target!r}: write it as "module:name"')
    folder = find_modules_here()
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        lacked = error.name if isinstance(error, ModuleNotFoundError) else None
        if lacked not in (module_name.split(".")[0], module_name):
            reason = f"{error}" if lacked else f"{type(error).__name__}: {error}"
            raise UsageError(f"{key} {target!r}: importing it failed: {reason}") from error
        files = [path.stem for path in Path(folder).glob("*.py")]
        raise UsageError(
            f"{key} {target!r}: no module {module_name!r} is installed or lies in {folder}"
            f"{_nearest(module_name, files)}"
        ) from error
    value = getattr(module, name, None)
    if not callable(value):
        known = [n for n, value in vars(module).items() if callable(value)]
        raise UsageError(
            f"{key} {target!r}: {module_name} has no callable {name!r}{_nearest(name, known)}"
        )
    if missing := [method for method in methods if not callable(getattr(value, method, None))]:
        raise UsageError(f"{key} {target!r} has no method {' and no '.join(missing)}")
    return value


def _nearest(name: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {matches[0]!r}?" if matches else ""
