"""`umbra.train`: a run from a few lines of Python, by the same processes as `umbra up`."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from umbra.deploy.check.choose import in_one_line, ready
from umbra.deploy.python.run import LOOK_S, Run, start
from umbra.deploy.python.source import MODULE, CopiedSource
from umbra.deploy.run_folder import RunFolder
from umbra.deploy.shown import shown_path
from umbra.proto.errors import UmbraError, UsageError
from umbra.services.config import RunConfig
from umbra.services.config.loader import ENVIRONMENTS, config_of, read_run_file, to_json
from umbra.services.environments.protocol import Tool
from umbra.services.environments.tools import BUILT_IN
from umbra.services.modeling.run_file import Say, located
from umbra.services.process.files import DISK, READABLE_MODE
from umbra.services.prompts import plain_row, rows_of

# A value of `data.prompts`; or a data set, or rows that are texts or mappings.
Prompts: TypeAlias = str | Path | Iterable[str | Mapping[str, Any]]
# A function, or "module:function", called with `prompt=`, `completion=` and `row=`; or several
# functions, each with its weight.
Reward: TypeAlias = str | Callable[..., Any] | Mapping[str | Callable[..., Any], float]
MODULE_FILE = f"{MODULE}.py"


def train(
    model: str | Path,
    prompts: Prompts,
    reward: Reward | None = None,
    *,
    environment: str | type[Any] | None = None,
    tools: Sequence[Tool | str] | None = None,
    eval_prompts: Prompts | None = None,
    steps: int | None = None,
    name: str | None = None,
    config: str | Path | Mapping[str, Mapping[str, Any]] | None = None,
    wait: bool = True,
    show: bool = True,
    **sections: Mapping[str, Any],
) -> Run:
    """Train `model` on `prompts` with reinforcement learning, on this machine.

    Starts the processes of `umbra up`, shows how the run gets on, and returns it when it has ended.
    The run's folder (`runs/ID`) has all that the run was given, so `umbra up runs/ID` goes on with
    one that was stopped. Ctrl-C (in a notebook: interrupt) ends the run in order.

    Args:
        model: a Hugging Face model directory, or ORG/NAME[@REVISION] on the hub.
        prompts: a file, "datasets:NAME[:CONFIG][:SPLIT]", or rows; "" if environments have theirs.
        reward: what an answer is worth. A function from a notebook cell or from the program itself
            is copied as source into the run's folder, with what it uses there. Functions and
            classes may also be values in `config["environment"]`.
        environment: instead of `reward`: "exact", "guess", ... or a class of your own.
        tools: functions that the model may call, or names of tools that there are ("calculator");
            without a `reward` an answer is worth 1 if it is the row's "answer".
        eval_prompts: held-out prompts; the policy is evaluated on them before and after.
        steps: optimizer steps (`run.steps`).
        name: of the run; its id begins with it (`run.name`).
        config: a run file, or its sections as mappings; the other arguments go before it.
        wait: return at the end of the run; else at once, and it goes on while this program does.
        show: print how it gets on.
        **sections: keys of the run file by section, as `trainer={"learning_rate": 1e-6}`.

    Raises:
        UsageError: the arguments cannot work; nothing was started, and no folder is left.
        UmbraError: the run ended badly, with the `exit_code` and sentence of `umbra up`.
        KeyboardInterrupt: it was interrupted and has ended in order.
    """
    source = CopiedSource()
    tree = _sections(config, sections)
    _set(tree, "model", path=str(model))
    _set(tree, "run", steps=steps, name=name)
    _set(tree, "environment", **_environment(reward, environment, source))
    if "environment" in tree:
        tree["environment"] = _named(tree["environment"], source)
    if not tree.get("environment") and not tree.get("environments") and tools is None:
        raise UsageError(
            'umbra.train: give a reward ("exact" compares with the row\'s "answer"), environment '
            "or tools"
        )
    if tools is not None:
        _set(tree, "environment", **_with_tools(tree.get("environment", {}), tools, source))
    stages = tree.get("buffer", {}).get("stages", [])
    group = tree.get("environment", {}).get("reward_scope") == "group"  # which scorers give
    if group and "reward" not in stages:
        _set(tree, "buffer", stages=["reward", *stages])
    run_keys, defaults = tree.get("run", {}), RunConfig().run
    parent, title = run_keys.get("dir", defaults.dir), run_keys.get("name") or defaults.name
    folder = RunFolder.create(str(parent), str(title))
    say: Say = print if show else lambda text: None
    try:
        _set(tree, "data", prompts=_write_prompts(prompts, folder, "prompts"))
        if eval_prompts is not None:
            _set(tree, "eval", prompts=_write_prompts(eval_prompts, folder, "eval_prompts"))
        run_file = Path(config if isinstance(config, str | Path) else "run.toml").resolve()
        resolved, changes = ready(located(config_of(tree, "umbra.train"), run_file, say), tree)
        search = [*source.search, run_file.parent]
        if source.text:
            _write_input(folder, MODULE_FILE, source.text.encode())
            search = [folder.inputs, *search]
        DISK.replace(folder.config, to_json(resolved), mode=READABLE_MODE)
        folder.write_origin(search)
    except BaseException:
        shutil.rmtree(folder.path)
        raise
    say(in_one_line(resolved))
    if changes:
        say(f"chosen for this machine: {', '.join(changes)}")
    if source.text:
        path = shown_path(folder.inputs / MODULE_FILE)
        say(f"{', '.join(source.copied)}: copied as source to {path}")
    run = Run(folder.path, start(folder, show=show))
    if wait:
        see_through(run)
    return run


def see_through(run: Run, *, look: Callable[[], object] = lambda: None) -> None:
    """Wait for the end of `run`, with a call of `look` now and then and one after the end.

    Removes its folder if nothing was begun. Raises as `train`.
    """
    folder = RunFolder(run.path)
    try:
        while run.under_way:
            look()
            time.sleep(LOOK_S)
    except BaseException:
        while run.under_way:
            with suppress(KeyboardInterrupt):  # which ends it at once
                run.stop()
        raise
    look()
    try:
        run.wait()
    except UmbraError:
        if run.summary is None and not folder.metrics.exists():
            shutil.rmtree(folder.path)
        raise


def _sections(
    config: str | Path | Mapping[str, Mapping[str, Any]] | None,
    sections: Mapping[str, Mapping[str, Any]],
) -> dict[str, dict[str, Any]]:
    """Return the sections of `config`, overridden by those given as arguments."""
    tree = read_run_file(Path(config)) if isinstance(config, str | Path) else dict(config or {})
    merged: dict[str, Any] = {}
    for name, values in [*tree.items(), *sections.items()]:
        if name == ENVIRONMENTS:
            merged[name] = values
        elif isinstance(values, Mapping):
            merged[name] = {**merged.get(name, {}), **values}
        else:
            raise UsageError(
                f"umbra.train has no argument {name!r}; a section of the run file is given as a "
                "mapping, such as trainer={'learning_rate': 1e-6}"
            )
    return merged


def _set(tree: dict[str, dict[str, Any]], section: str, **values: Any) -> None:
    settings = {key: value for key, value in values.items() if value is not None}
    if settings:
        tree.setdefault(section, {}).update(settings)


def _environment(
    reward: Reward | None, environment: str | type[Any] | None, source: CopiedSource
) -> dict[str, Any]:
    if reward is not None and environment is not None:
        raise UsageError(
            "umbra.train: give reward or environment, not both: an environment rewards"
        )
    if isinstance(reward, str) and ":" not in reward:  # "exact", "math", ...
        return {"kind": reward}
    if reward is not None:
        return {"kind": "reward", "reward": _named(reward, source, "reward")}
    return {"kind": _named(environment, source)}


def _named(value: Any, source: CopiedSource, argument: str = "environment") -> Any:
    """Return `value` with each function and class in it as "module:name"."""
    if isinstance(value, Mapping):
        pairs = ((key, value[key]) for key in value)
        return {_named(k, source, argument): _named(v, source, argument) for k, v in pairs}
    return source.target(value, argument) if callable(value) else value


def _with_tools(
    environment: Mapping[str, Any], tools: Sequence[Tool | str], source: CopiedSource
) -> dict[str, Any]:
    """Return keys of `[environment]` for an answer with the help of `tools`."""
    kind = environment.get("kind", "tools")
    if kind == "reward":
        functions: list[Any] = [BUILT_IN.get(str(tool), tool) for tool in tools]
        return {"kind": "trl", "id": source.toolset(functions)}
    if kind != "tools":
        raise UsageError(
            'umbra.train: tools are for answers that a reward or the row\'s "answer" judges: leave '
            "out environment, or give one that offers them itself"
        )
    names = [tool if isinstance(tool, str) else source.target(tool, "tools") for tool in tools]
    return {"kind": "tools", "options": {**environment.get("options", {}), "tools": names}}


def _write_prompts(prompts: Prompts, folder: RunFolder, argument: str) -> str:
    """Return the value of `data.prompts`; rows are written to the run's folder."""
    if isinstance(prompts, str | Path):
        return str(prompts)
    raw = rows_of(prompts, argument)
    if not raw:
        raise UsageError(f"{argument} has no rows")
    # The column that holds the prompts may have another name, by data.columns.
    rows = [plain_row(row, f"{argument}, row {number}") for number, row in enumerate(raw, start=1)]
    lines = b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
    return _write_input(folder, f"{argument}.jsonl", lines)


def _write_input(folder: RunFolder, name: str, content: bytes) -> str:
    folder.inputs.mkdir(exist_ok=True)
    DISK.replace(folder.inputs / name, content, mode=READABLE_MODE)
    return str(folder.inputs / name)
