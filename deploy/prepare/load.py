"""The run file of a command: its configuration with absolute paths, pinned names, what it lacks.

A model or a data set on the hub gets the commit that its revision stands for. So all processes of
the run read the same, on whatever machine and after whatever restart; each resolves what it needs
by itself, from its cache or by a download.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import click
import msgspec
from msgspec.structs import replace

from umbra.proto.errors import UsageError
from umbra.proto.net.keys import FOLDER
from umbra.services.config import ModelConfig, RunConfig
from umbra.services.config.loader import load_tree
from umbra.services.modeling.hub import (
    HubName,
    is_hub_name,
    looks_like_name,
    pin,
    refuse_misspelt,
)
from umbra.services.prompts.readers import is_elsewhere, pin_source, placed

Say = Callable[[str], None]

run_file_argument = click.argument("run_file", type=click.Path(path_type=Path))
set_option = click.option(
    "--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Override a key."
)


def load_run(run_file: Path, overrides: tuple[str, ...]) -> RunConfig:
    """Return the configuration of `run_file` with absolute paths and pinned names.

    Raises:
        UsageError: see `load_tree` and `pinned`.
        StartupError: a model or prompts are elsewhere, and cannot be reached.
    """
    return load_given(run_file, overrides)[0]


def load_given(run_file: Path, overrides: tuple[str, ...]) -> tuple[RunConfig, dict[str, Any]]:
    """Return `load_run`, and the tree of what was given, without defaults."""
    tree = load_tree(run_file, overrides=overrides)
    config = msgspec.convert(tree, RunConfig)
    return pinned(resolve_paths(config, run_file, note), note), tree


def note(text: str) -> None:
    click.echo(text, err=True)


def search_path(run_file: Path) -> list[Path]:
    """Return where modules of the user's environment or reward are looked for."""
    return list(dict.fromkeys((run_file.resolve().parent, Path.cwd())))


def resolve_paths(config: RunConfig, run_file: Path, say: Say = lambda text: None) -> RunConfig:
    """Return `config` with absolute paths: looked up from the run file's folder, else from here.

    `say` is told which of two is taken where both exist.

    Raises:
        UsageError: a model's name is rather a path with a mistake, or a folder cannot be named.
    """

    @cache
    def found(path: str) -> Path:
        beside, here = run_file.parent / path, Path(path)
        if beside.exists() and here.exists() and not beside.samefile(here):
            say(
                f"{path} is taken from the run file's folder: {beside.absolute()}, not the one here"
            )
        return beside if beside.exists() else here

    def file(path: str) -> str:
        return str(found(path).resolve()) if path else ""

    def program(python: str) -> str:
        """Resolve a path like a file's, but follow no link of it."""
        return str(found(python).absolute()) if "/" in python else python

    def model(name: str, key: str) -> str:
        if not is_hub_name(name) or (run_file.parent / name).exists():
            return file(name)
        if key != "model.path" or not config.model.revision:
            refuse_misspelt(name, key, run_file.parent)
            refuse_misspelt(name, key)
        return name

    own = config.model
    # A pinned name stays, whatever has come to lie there since.
    path = own.path if is_pinned(own) else model(own.path, "model.path")
    usual = Path(config.run.dir).absolute() / FOLDER
    keys = config.security.keys or (str(usual) if usual.is_dir() else "")
    return replace(
        _renamed(config, model, lambda name: placed(name, file), program),
        model=replace(own, path=path, chat_template=file(own.chat_template)),
        security=replace(config.security, keys=file(keys)),
    )


def pinned(config: RunConfig, say: Say) -> RunConfig:
    """Return `config` with all names pinned; one that was pinned before stays as it is.

    Args:
        config: with absolute paths, so that a model's path that is none is a name on the hub.
        say: is told what names stand for.

    Raises:
        UsageError: there is nothing of such a name, or this machine may not read it.
        StartupError: it cannot be reached, and no cache has it.
    """

    @cache
    def source(name: str) -> str:
        found = pin_source(name) if name and is_elsewhere(name) else name
        if found != name:
            say(f"prompts: {found}")
        return found

    def model(name: str, key: str) -> str:
        return str(pin(name, key)) if is_hub_name(name) else name

    own = _pinned_model(config.model, say)
    return replace(_renamed(config, model, source, lambda python: python), model=own)


def _renamed(
    config: RunConfig,
    model: Callable[[str, str], str],
    source: Callable[[str], str],
    program: Callable[[str], str],
) -> RunConfig:
    """Return `config` with other names of prompts, Pythons, and models but the run's own."""
    given, environment = config.data.prompts, config.environment
    prompts = (
        source(given)
        if isinstance(given, str)
        else {source(name): weight for name, weight in given.items()}
    )
    return replace(
        config,
        environment=replace(environment, python=program(environment.python)),
        environments=tuple(
            replace(one, python=program(one.python), prompts=source(one.prompts))
            for one in config.environments
        ),
        data=replace(config.data, prompts=prompts),
        scorer=replace(config.scorer, model=model(config.scorer.model, "scorer.model")),
        critic=replace(config.critic, path=model(config.critic.path, "critic.path")),
        eval=replace(config.eval, prompts=source(config.eval.prompts)),
    )


def is_pinned(model: ModelConfig) -> bool:
    """True if it is a commit on the hub, even if a folder of its name exists by now."""
    return looks_like_name(model.path) and HubName.of(model.name).pinned


def _pinned_model(model: ModelConfig, say: Say) -> ModelConfig:
    if is_pinned(model):
        return model
    if not is_hub_name(model.path):
        if model.revision and model.path:
            raise UsageError(
                f"model.revision = {model.revision} is for models on the hub, and model.path is "
                f"the directory {model.path}: remove it"
            )
        return model
    if "@" in model.path and model.revision:
        raise UsageError(
            f"model.path = {model.path} names a revision, and model.revision = {model.revision} "
            "does too: remove one of them"
        )
    name = pin(model.name, "model.path")
    if name != HubName.of(model.name):
        say(f"model: {name.repo}, commit {name.revision}")
    return replace(model, path=name.repo, revision=name.revision)
