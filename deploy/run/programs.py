"""The processes of a run, in the order in which they start, and the waves in which they stop."""

from __future__ import annotations

import math
from collections.abc import Iterator

from umbra.deploy.files.run_folder import RunFolder
from umbra.services.config import RunConfig
from umbra.services.process.child import umbra_argv
from umbra.services.process.supervisor import Program, RestartPolicy

TRAINER_RESTARTS = 3  # each repeats the steps since its last checkpoint

BUFFER, HUB, TRAINER = "buffer", "weight-hub", "trainer"


def buffer_program(config: RunConfig, folder: RunFolder) -> Program:
    """The buffer, which binds the address that all others are given; so it starts first.

    With a durable store it can be started again: it goes on where it was, at the same address.
    """
    return Program(BUFFER, _argv(BUFFER, BUFFER, folder), wave=2, recovers=is_durable(config))


def is_durable(config: RunConfig) -> bool:
    """True if a buffer that ended can resume, and a trainer can repeat its steps."""
    return config.buffer.store != "memory"


def other_programs(config: RunConfig, folder: RunFolder, broker: str) -> list[Program]:
    """Return all programs but the buffer, which are told its address."""
    connect = ("--broker", broker)
    durable = is_durable(config)
    return [
        Program(HUB, _argv(HUB, HUB, folder, *connect), wave=1, recovers=True),
        Program(
            TRAINER,
            _argv(TRAINER, TRAINER, folder, *connect),
            wave=0,
            recovers=durable,
            policy=lambda: RestartPolicy(limit=TRAINER_RESTARTS, window_s=math.inf),
        ),
        *_generators(config, folder, connect),
        *_scorers(config, folder, connect),
    ]


def _generators(
    config: RunConfig, folder: RunFolder, connect: tuple[str, ...]
) -> Iterator[Program]:
    """Yield `generator.count` generators; with device cuda:N each gets GPUs of its own, from N."""
    generator = config.generator
    kind, _, first = generator.device.partition(":")
    for index in range(generator.count):
        device: tuple[str, ...] = ()
        if first and index:
            device = ("--device", f"{kind}:{int(first) + index * generator.tensor_parallel}")
        name = f"generator-{index}"
        argv = _argv("generator", name, folder, *connect, *device)
        yield Program(name, argv, wave=0, elastic=True)


def _scorers(config: RunConfig, folder: RunFolder, connect: tuple[str, ...]) -> Iterator[Program]:
    for stage in config.buffer.stages:
        for index in range(config.scorer.processes(stage)):
            name = f"{stage.replace('_', '-')}-{index}"
            argv = _argv("scorer", name, folder, *connect, "--stage", stage)
            yield Program(name, argv, wave=0, elastic=True)


def _argv(command: str, name: str, folder: RunFolder, *more: str) -> tuple[str, ...]:
    common = ("--config", str(folder.config), "--name", name, "--run-dir", str(folder.path))
    return umbra_argv(command, *common, *more)
