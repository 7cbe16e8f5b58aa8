"""The files of a plan."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from umbra.deploy.cluster.compose import (
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    KEYS_FOLDER,
    compose_file,
    container_paths,
    environment_file,
)
from umbra.deploy.cluster.invocation import Paths, key_files
from umbra.deploy.cluster.kubernetes import manifests
from umbra.deploy.cluster.plan import Plan
from umbra.deploy.cluster.slurm import slurm_script
from umbra.deploy.files.formats import to_toml
from umbra.proto.errors import UsageError
from umbra.services.config.loader import as_dict

FORMATS = ("compose", "slurm", "kubernetes")
COMPOSE_FILE = "compose.yaml"
SLURM_FILE = "run.sbatch"
KUBERNETES_FILE = "kubernetes.yaml"


class Bundle:
    """Renders a plan into texts, by their path below `out`.

    Args:
        modules: folder of the user's own Python modules; empty if there are none.
        out: absolute.
        keys: folder of the run's keys; None if it has none.
    """

    def __init__(self, plan: Plan, modules: str, out: Path, keys: Path | None) -> None:
        self._plan = plan
        self._modules = modules
        self._out = out
        self._keys = keys

    def render(self, formats: Iterable[str]) -> dict[str, str]:
        """The texts of `formats`.

        Raises:
            UsageError: the plan cannot be rendered so.
        """
        files: dict[str, str] = {}
        for name in formats:
            files |= getattr(self, f"_{name}")()
        return files

    def write(self, files: dict[str, str]) -> None:
        """Write `files` below `out`.

        Raises:
            UsageError: that cannot be written to.
        """
        for name, text in files.items():
            path = self._out / name
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            except OSError as error:
                raise UsageError(
                    f"cannot write {path}: {error.strerror}; choose another --out"
                ) from error

    def copy_keys(self) -> None:
        """Put into each node's folder the keys that it needs, readable by their owner alone.

        That is the user of the containers, if we may give files away or are that user.

        Raises:
            UsageError: one is missing, or the folder cannot be written to; or the user of the
                containers could not read them.
        """
        if self._keys is None:
            return
        user, group = self._plan.cluster.owner
        if os.geteuid() not in (0, user):
            raise UsageError(
                f"cluster.user is {user}:{group}, and only root can give keys to another user: "
                f"leave it out (then it is you, {os.geteuid()}:{os.getegid()}), or plan as root"
            )
        for node in self._plan.nodes:
            names = {name for process in self._plan.on(node) for name in key_files(process)}
            folder = self._out / node.name / KEYS_FOLDER
            try:
                if names:
                    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                    os.chown(folder, user, -1)
                for name in sorted(names):
                    _copy_private(self._keys / name, folder / name)
                    os.chown(folder / name, user, -1)
            except OSError as error:
                raise UsageError(
                    f"cannot copy the run's keys from {self._keys} to {folder}: {error.strerror}: "
                    f"{error.filename}; `umbra keys` makes them"
                ) from error

    def _compose(self) -> dict[str, str]:
        plan, config = self._plan, self._config()
        paths = container_paths(plan, self._modules, keys=self._keys is not None)
        files: dict[str, str] = {}
        for node in plan.nodes:
            if plan.on(node):
                files[f"{node.name}/{COMPOSE_FILE}"] = compose_file(plan, node, paths)
                files[f"{node.name}/{ENVIRONMENT_FILE}"] = environment_file(plan, paths)
                files[f"{node.name}/{CONFIG_FILE}"] = config
        return files

    def _slurm(self) -> dict[str, str]:
        results = Path(self._plan.config.run.dir).resolve() / self._plan.run_id
        paths = Paths(
            config=str(self._out / CONFIG_FILE),
            results=str(results),
            store=self._plan.config.buffer.store or str(results / "store"),
            keys=str(self._keys or ""),
            modules=self._modules,
        )
        script = slurm_script(self._plan, paths, str(self._out / SLURM_FILE))
        return {SLURM_FILE: script, CONFIG_FILE: self._config()}

    def _kubernetes(self) -> dict[str, str]:
        paths = container_paths(self._plan, self._modules, keys=self._keys is not None)
        return {KUBERNETES_FILE: manifests(self._plan, paths, self._config())}

    def _config(self) -> str:
        """Return the run file for the nodes, whose environment says where their keys are."""
        config = self._plan.config
        replace = msgspec.structs.replace
        return to_toml(as_dict(replace(config, security=replace(config.security, keys=""))))


def _copy_private(source: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(source.read_bytes())
