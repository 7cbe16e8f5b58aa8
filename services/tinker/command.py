"""`umbra tinker MODEL`: serve the Tinker API for one model."""

from __future__ import annotations

from pathlib import Path

import click

from umbra.services.config.loader import load_config
from umbra.services.process.command import setup_logging

KEY_VARIABLE = "UMBRA_TINKER_KEY"


@click.command("tinker")
@click.argument("model")
@click.option(
    "--bind", default="127.0.0.1:8400", show_default=True, help="HOST:PORT that is served."
)
@click.option("--name", help="The model's name for clients.  [default: MODEL]")
@click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path),
    default=Path("tinker"),
    show_default=True,
    help="Folder of the journal and of checkpoints; a server resumes from it.",
)
@click.option("--device", default="auto", show_default=True, help="cpu, cuda or auto.")
@click.option(
    "--context",
    type=click.IntRange(8),
    default=4096,
    show_default=True,
    help="Tokens of a sequence at most.",
)
@click.option(
    "--slots",
    type=click.IntRange(1),
    default=64,
    show_default=True,
    help="Samples at once of a sampler.",
)
@click.option(
    "--samplers",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Processes that sample, each with the model; with several GPUs not on the trainer's.",
)
@click.option(
    "--engine",
    type=click.Choice(["torch", "vllm"]),
    default="torch",
    show_default=True,
    help="Of the samplers.",
)
def command(
    model: str,
    bind: str,
    name: str | None,
    folder: Path,
    device: str,
    context: int,
    slots: int,
    samplers: int,
    engine: str,
) -> int:
    """Serve the Tinker API for MODEL, a directory or a name on the hub.

    A client gets http://HOST:PORT as TINKER_BASE_URL, and any TINKER_API_KEY that begins with tml-.
    An address that other machines reach needs a key of its own, in the variable UMBRA_TINKER_KEY.
    """
    config = load_config(
        overrides=[
            f"model.path={model}",
            f"trainer.device={device}",
            f"generator.device={device}",
            f"generator.engine={engine}",
            f"generator.max_context={context}",
            f"generator.slots={slots}",
            f"generator.count={samplers}",
        ]
    )
    setup_logging(config.log, "tinker")
    from umbra.services.tinker.service import run  # brings torch

    return run(config, bind, name or model, folder)
