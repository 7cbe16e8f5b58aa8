"""What the processes of a run would refuse at their start, tried before."""

from __future__ import annotations

from pathlib import Path

from umbra.deploy.prepare.stage import try_aside
from umbra.services.buffer.prompts import first_rows
from umbra.services.config import RunConfig
from umbra.services.config.cautions import cautions


def try_start(config: RunConfig, search: list[Path]) -> list[tuple[str, str]]:
    """Try environment, devices and chat template; return warnings by name.

    Raises:
        UsageError: something is missing or does not fit; names it.
        ChildError: the environment cannot be used.
    """
    try_aside(config, search)
    from umbra.services.generator.checks import check_chat, check_devices  # bring torch

    check_devices(config)
    row = next(iter(first_rows(config.data, config.environments).values()))
    cut = check_chat(config, row)
    return [*cautions(config), *([("max_tokens", cut)] if cut else [])]
