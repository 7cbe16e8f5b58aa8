"""Settings that a run file leaves open, chosen for the GPUs of the machine that starts the run.

Without a GPU only the engine and the threads are chosen: docs/config.md has the defaults for CPUs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from umbra.deploy.check import machine as machines
from umbra.deploy.check.machine import Machine, first_gpu, kind_of, this_machine
from umbra.deploy.prepare.preflight import check_packages, check_room, check_run
from umbra.proto.errors import StartupError, UmbraError, UsageError
from umbra.services.config import RunConfig
from umbra.services.config.loader import as_dict, given_keys
from umbra.services.config.rules import device_faults
from umbra.services.modeling.architectures import read_config
from umbra.services.modeling.model_directory import directory_of
from umbra.services.process.host import driver_version, versions_line

MOST_CONTEXT = 8192  # of a model that could take more: longer answers are asked for by name
CONTEXT, TOKENS = "generator.max_context", "sampling.max_tokens"


class ChoiceRequest(msgspec.Struct, frozen=True, tag=True):
    config: RunConfig
    set_keys: list[str]  # by the user
    machine: Machine


class Choice(msgspec.Struct, frozen=True):
    """A run with its open settings chosen, each as `key = value`, and why it does not fit."""

    config: RunConfig
    changes: list[str]
    refusal: str = ""


def ready(config: RunConfig, tree: Mapping[str, Any]) -> tuple[RunConfig, list[str]]:
    """Return `for_this_machine`, checked; UsageError or StartupError names the fault."""
    if config.trainer.nodes > 1:
        raise UsageError(
            f"trainer.nodes = {config.trainer.nodes}: `umbra up` runs everything on this machine; "
            "`umbra plan` makes what starts it on several; or set it to 1"
        )
    check_run(config)
    config, changes = for_this_machine(config, tree)
    check_packages(config)
    check_room(config)
    return config, changes


def for_this_machine(config: RunConfig, tree: Mapping[str, Any]) -> tuple[RunConfig, list[str]]:
    """Return `config` with what `tree` leaves open chosen for this machine, and the choices.

    UsageError says what does not fit; StartupError is of `this_machine`, or torch sees no GPU.
    """
    machine = this_machine()
    if machine.blind and not machines.for_cpus(config):
        raise StartupError(
            f"there is an NVIDIA driver, but torch sees no GPU: {machine.blind}; for a run on CPUs "
            "set trainer.device, generator.device and scorer.device to cpu"
        )
    if fault := next(device_faults(config, len(machine.gpus)), "") if not machine.blind else "":
        raise UsageError(fault)
    set_keys = given_keys(tree)
    if not machine.gpus:
        choice = for_hardware(config, set_keys, machine)
    else:
        try:
            choice = machines.ask_aside(Choice, ChoiceRequest(config, sorted(set_keys), machine))
        except UmbraError as error:
            raise StartupError(
                f"it cannot be estimated how trainer and generator share the GPU: {error}; set "
                "generator.device, or generator.engine_args and generator.slots; `umbra check` "
                "says more"
            ) from error
    if choice.refusal:
        raise UsageError(choice.refusal)
    return choice.config, choice.changes


def in_one_line(config: RunConfig) -> str:
    """Return devices, engine and versions of a run, for a configuration of `for_hardware`."""
    trainer, generator = config.trainer, config.generator
    # On a machine with GPUs the choice, or the user, names the engine's device.
    gpu = bool(driver_version())
    trains, generates = kind_of(trainer.device, gpu=gpu), kind_of(generator.device, gpu=gpu)
    return (
        f"trainer on {trains} ({trainer.computes_in(trains)}), "
        f"engine {generator.engine} on {generates} ({config.weight_hub.dtype_on(generates)}), "
        f"plane {config.weight_hub.plane}; {versions_line()}"
    )


def for_hardware(config: RunConfig, set_keys: Collection[str], machine: Machine) -> Choice:
    """Return the choice for a machine; keys in `set_keys` are the user's and stay.

    Loads torch where a GPU is shared.
    """
    resolved = choose(config, set_keys, machine, longest := positions(config.model.path))
    kind = kind_of(config.trainer.device, gpu=bool(machine.gpus))
    fault = "; ".join(config.trainer.device_faults(kind))  # once `auto` is decided
    faults = [f"on a {'GPU' if kind == 'cuda' else 'CPU'}, {fault}"] if fault else []
    faults += resolved.generator.engine_faults(resolved.generator.engine)
    if longest and (context := resolved.generator.max_context) > longest:
        faults.append(
            f"{CONTEXT} = {context} is beyond the {longest} positions of model.path: lower it"
        )
    refusal, generator = "; ".join(faults), resolved.generator
    # Memory of a GPU is divided: with the trainer, or the torch engine's into slots.
    divided = generator.engine == "torch" or _shares_gpu(resolved, len(machine.gpus))
    on_gpu = machine.gpus and kind_of(generator.device, gpu=True) == "cuda"
    if not refusal and divided and on_gpu:
        with suppress(ModuleNotFoundError):  # without torch nothing is estimated
            from umbra.deploy.check.estimate import divide

            resolved, refusal = divide(resolved, set_keys, machine)
    return Choice(resolved, list(_changes(config, resolved)) if machine.gpus else [], refusal)


def choose(
    config: RunConfig, set_keys: Collection[str], machine: Machine, positions: int
) -> RunConfig:
    """Choose engine, devices, lengths and rows by the arguments alone; `set_keys` keys stay.

    The model was made for `positions` tokens; 0: unknown.
    """
    generator, trainer, sampling = config.generator, config.trainer, config.sampling
    change, count = msgspec.structs.replace, len(machine.gpus)
    if generator.engine == "vllm-http":  # computes nothing itself
        generator = change(generator, device="cpu")
    on_gpu = kind_of(generator.device, gpu=count > 0) == "cuda"
    trains_on_gpu = kind_of(trainer.device, gpu=count > 0) == "cuda"
    engine = generator.engine_on("cuda" if on_gpu else "cpu", vllm=machine.vllm)
    generator = change(generator, engine=engine)
    if on_gpu:
        spare = count >= trainer.ranks + generator.count * generator.tensor_parallel
        if generator.device == "auto" and trains_on_gpu and spare:
            generator = change(generator, device=f"cuda:{trainer.ranks}")
        if CONTEXT not in set_keys:
            lengths = [sampling.max_tokens] if TOKENS in set_keys else []
            lengths += [n for e in config.environments if (n := e.sampling.get("max_tokens"))]
            target = max(MOST_CONTEXT, 2 * max(lengths, default=0))
            generator = change(generator, max_context=min(positions or target, target))
        longest = generator.max_context
        if TOKENS not in set_keys:  # a quarter is the prompt's
            sampling = change(sampling, max_tokens=max(1, 3 * longest // 4))
        rows = {"trainer.pack_tokens", "trainer.micro_tokens"}
        shared = _shares_gpu(change(config, generator=generator), count)
        if shared and rows.isdisjoint(set_keys):
            trainer = change(trainer, pack_tokens=longest, micro_tokens=longest)
    # Processes that compute on CPUs beside each other are several times slower with all threads.
    computing = (not on_gpu) * generator.count + (not trains_on_gpu) * trainer.ranks
    if computing > 1 and (share := machine.cores // computing):
        trainer = change(trainer, threads=trainer.threads or share)
        if not on_gpu:
            generator = change(generator, threads=generator.threads or share)
    return change(config, generator=generator, trainer=trainer, sampling=sampling)


def _shares_gpu(config: RunConfig, gpus: int) -> bool:
    """True if the trainer is on the GPU of a generator that is on one."""
    trains_on_gpu = kind_of(config.trainer.device, gpu=gpus > 0) == "cuda"
    return trains_on_gpu and first_gpu(config.generator.device) < config.trainer.ranks


def positions(model: str) -> int:
    """Return the longest context of a model (as `directory_of` takes it); 0: unknown."""
    try:
        config = read_config(directory_of(model, weights=False))
    except (UsageError, StartupError):
        return 0  # it is refused where the run is checked
    text: Any = config.get("text_config") or config
    count = text.get("max_position_embeddings") if isinstance(text, Mapping) else None
    if not isinstance(count, int):
        return 0
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    return int(count * max(1, rope.get("factor") or 1))


def _changes(before: RunConfig, after: RunConfig) -> Iterator[str]:
    """Yield the differences, as `section.key = value`."""
    old, new = as_dict(before), as_dict(after)
    for section in ("generator", "sampling", "trainer"):
        for key, value in new[section].items():
            if value != old[section][key]:
                yield f"{section}.{key} = {value}"
