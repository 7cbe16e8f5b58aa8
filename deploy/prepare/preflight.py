"""A run file as commands take it: loaded, and checked before a single process is started."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any, get_args

import click
import msgspec

from umbra.deploy.run_folder import RunFolder
from umbra.proto.errors import UsageError
from umbra.proto.messages import Role
from umbra.proto.net.keys import open_security
from umbra.proto.sockets import check_address
from umbra.services.buffer.prompts import open_prompts
from umbra.services.config import RunConfig
from umbra.services.config.generation import ENVIRONMENT
from umbra.services.config.loader import load_tree
from umbra.services.config.rules import check_feasible
from umbra.services.generator.vllm.http_client import check_private
from umbra.services.modeling import architectures
from umbra.services.modeling.architectures import check_architecture
from umbra.services.modeling.hub import check_weights, is_hub_name
from umbra.services.modeling.model_directory import check_model_dir
from umbra.services.modeling.run_file import located
from umbra.services.prompts import read_source
from umbra.services.reporting import size
from umbra.services.weights.planes.plane import check_plane

run_file_argument = click.argument("run_file", type=click.Path(path_type=Path))
set_option = click.option(
    "--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Override a key."
)


def load_given(run_file: Path, overrides: tuple[str, ...]) -> tuple[RunConfig, dict[str, Any]]:
    """Return the configuration of `run_file` as `located`, and the settings that are given."""
    tree = load_tree(run_file, overrides=overrides)
    sys.path += [str(f) for f in search_path(run_file) if str(f) not in sys.path]  # for prompts
    return located(msgspec.convert(tree, RunConfig), run_file, partial(click.echo, err=True)), tree


def search_path(run_file: Path) -> list[Path]:
    """Return where modules of the user's environment or reward are looked for."""
    folder = RunFolder(run_file.parent)
    if run_file == folder.config and (folders := folder.read_origin().get("search")):
        return [*map(Path, folders), Path.cwd()]
    return list(dict.fromkeys((run_file.resolve().parent, Path.cwd())))


LEAST_ROOM = 16 << 20  # bytes on the disk of run.dir with which a run is begun


def check_run(config: RunConfig, *, download: bool = True) -> None:
    """Check the numbers of a run, and the files that it needs.

    Without `download` weights of models on the hub need only be there. UsageError names a
    mistake, StartupError a remote name that cannot be reached.
    """
    check_feasible(config)
    _check_security(config)
    model = _model_dir(config.model.path, "model.path", download=download)
    check_architecture(model, checked=config.model.checked)
    architectures.check_heads(architectures.read_config(model), config.trainer.sequence_parallel)
    architectures.check_experts(architectures.read_config(model), config.trainer.expert_parallel)
    open_prompts(config.data, seed=config.run.seed, environments=config.environments)
    if config.eval.prompts:
        _check_eval(config)
    for name in config.scorer.models.values() if "ref_logp" in config.buffer.stages else ():
        directory = _model_dir(name, "scorer.model", download=download)
        check_architecture(directory, "scorer.model", config.model.checked)
    critic = config.critic
    if config.trainer.pieces.needs_critic and critic.path:
        directory = _model_dir(critic.path, "critic.path", tokenizer=False, download=download)
        check_architecture(directory, "critic.path", config.model.checked)
    if not (place := nearest_place(Path(config.run.dir))).is_dir():
        raise UsageError(f"run.dir: {place} is a file; name a folder")


def _model_dir(name: str, key: str, *, tokenizer: bool = True, download: bool) -> Path:
    """Return a model's directory; without `download` weights need only be on the hub."""
    directory = check_model_dir(name, key, tokenizer=tokenizer, weights=download)
    if is_hub_name(name) and not download:
        check_weights(name, key)
    return directory


def check_packages(config: RunConfig) -> None:
    """Raise UsageError, naming setting and extra, for a package or plane not usable here."""
    check_plane(config.weight_hub.plane)
    trainer, metrics = config.trainer, config.metrics
    kinds = {config.environment.kind, *(e.kind for e in config.environments)}
    for setting, needed, package, extra in (
        ("trainer.lora_rank", trainer.lora_rank > 0, "peft", "lora"),
        ('generator.engine = "vllm"', config.generator.engine == "vllm", "vllm", "vllm"),
        ('environment.kind = "math"', "math" in kinds, "math_verify", "tasks"),
        *(("metrics.also", True, name, name) for name in metrics.also),
    ):
        if needed and importlib.util.find_spec(package) is None:
            raise UsageError(
                f"{setting} needs {package.replace('_', '-')}, which is not installed: "
                f"pip install 'umbra-rl[{extra}]'"
            )


def nearest_place(path: Path) -> Path:
    """Return `path`, or of the places above it the lowest that exists."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def check_room(config: RunConfig) -> None:
    """Raise UsageError if the disk is full already; a run whose disk fills up later waits."""
    place = nearest_place(Path(config.run.dir))
    if (free := shutil.disk_usage(place).free) < LEAST_ROOM:
        raise UsageError(
            f"run.dir: {size(free)} free on the disk of {place}, and a run needs "
            f"{size(LEAST_ROOM)} at the least: free some, or name another folder"
        )


def run_endpoints(config: RunConfig) -> list[str]:
    host = config.run.broker.rpartition(":")[0]
    others = [f"{host}:{port}" for port in config.buffer.ports]
    return [config.run.broker, *others, config.weight_hub.listen]


def _check_security(config: RunConfig) -> None:
    """Check that all keys for processes here exist, and that public binds have keys."""
    binds = {"run.broker": config.run.broker, "weight_hub.listen": config.weight_hub.listen}
    for key, endpoint in binds.items():
        if not endpoint.startswith("tcp://"):
            raise UsageError(f"{key} {endpoint}: write it as tcp://host:port")
        if not endpoint.endswith(":*"):
            check_address(endpoint, key)
    for role in get_args(Role):
        security = open_security(config.security.keys, [role], insecure=config.security.insecure)
        for endpoint in binds.values():
            security.check_bind(endpoint)
    for url in config.generator.urls if config.generator.count else ():
        check_private(url)


def _check_eval(config: RunConfig) -> None:
    try:
        prompts = read_source(config.eval.prompts, columns=config.eval.columns, section="eval")
    except UsageError as error:
        raise UsageError(f"eval.prompts: {error}") from error
    names = [environment.name for environment in config.environments]
    strays = (p.prompt_id for p in prompts if names and p.row.get(ENVIRONMENT) not in names)
    if (row := next(strays, None)) is not None:
        raise UsageError(
            f'eval.prompts, row {row}: "{ENVIRONMENT}" must be one of '
            f"[[environments]]: {', '.join(names)}"
        )
