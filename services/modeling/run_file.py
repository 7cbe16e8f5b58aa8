"""Names in a run file: absolute paths, and names on the hub with the commits they stand for.

A model or a data set on the hub gets the commit of its revision, so that all processes of the run
read the same; each resolves its own needs, from its cache or by a download.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

from msgspec.structs import replace

from umbra.proto.net.keys import FOLDER
from umbra.services.config import RunConfig
from umbra.services.config.loader import load_config
from umbra.services.modeling.hub import HubName, is_hub_name, looks_like_name, pin
from umbra.services.process.parent import SEARCH_VARIABLE
from umbra.services.prompts import locate_source, pin_source

Say = Callable[[str], None]


def load_service(run_file: str | None, *, overrides: Iterable[str]) -> RunConfig:
    """Return the configuration of a service that is started by hand, with absolute paths.

    As in `umbra up`, paths and modules are looked for beside the run file first. A resolved
    configuration (JSON) has absolute paths already, and its starter names the modules' folders.
    """
    config = load_config(run_file, overrides=overrides)
    if run_file is None or run_file.endswith(".json"):
        return config
    search = list(dict.fromkeys(map(str, (Path(run_file).resolve().parent, Path.cwd()))))
    sys.path += [folder for folder in search if folder not in sys.path]
    os.environ.setdefault(SEARCH_VARIABLE, os.pathsep.join(search))  # of its processes
    return located(config, Path(run_file), pins=False)


def located(
    config: RunConfig, run_file: Path, say: Say = lambda text: None, *, pins: bool = True
) -> RunConfig:
    """Return `config` with absolute paths and, unless not `pins`, pinned names; earlier pins stay.

    Paths are looked up from the run file's folder, else from here; `say` reports which of two is
    taken, and what names stand for. Raises UsageError for a name that does not exist or may not be
    read, StartupError for one that cannot be reached and is in no cache.
    """

    @cache
    def located_path(path: str) -> Path:
        beside, local = run_file.parent / path, Path(path)
        if beside.exists() and local.exists() and not beside.samefile(local):
            taken = f"from the run file's folder: {beside.absolute()}"
            say(f"{path} is taken {taken}, not the one here")
        return beside if beside.exists() else local

    def file(path: str) -> str:
        return str(located_path(path).resolve()) if path else ""

    @cache
    def source(name: str) -> str:
        name = locate_source(name, file)
        if pins and (pinned := pin_source(name)) != name:
            say(f"prompts: {pinned}")
            return pinned
        return name

    def model(name: str, key: str) -> str:
        if looks_like_name(name) and HubName.of(name).pinned:
            return name  # whatever has come to lie there since
        if not is_hub_name(name, run_file.parent):
            return file(name)
        if not pins:
            return name
        pinned = pin(name, key, run_file.parent)
        say(f"{key}: {pinned.repo}, commit {pinned.revision}")
        return str(pinned)

    own = config.model
    usual = Path(config.run.dir).absolute() / FOLDER
    scored = config.scorer.model
    keys = config.security.keys or (str(usual) if usual.is_dir() else "")
    return replace(
        config,
        model=replace(
            own, path=model(own.path, "model.path"), chat_template=file(own.chat_template)
        ),
        environments=tuple(
            replace(one, prompts=source(one.prompts)) for one in config.environments
        ),
        data=replace(config.data, prompts=source(config.data.prompts)),
        scorer=replace(
            config.scorer,
            model=model(scored, "scorer.model")
            if isinstance(scored, str)
            else {name: model(path, "scorer.model") for name, path in scored.items()},
        ),
        critic=replace(config.critic, path=model(config.critic.path, "critic.path")),
        eval=replace(config.eval, prompts=source(config.eval.prompts)),
        security=replace(config.security, keys=file(keys)),
    )
