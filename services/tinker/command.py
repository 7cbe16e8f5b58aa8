"""`umbra tinker MODEL`: serve the Tinker API for one model."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from umbra.services.config.loader import load_config
from umbra.services.process.command import setup_logging

KEY_VARIABLE = "UMBRA_TINKER_KEY"
option = partial(click.option, show_default=True)


@click.command("tinker")
@click.argument("model")
@option("--bind", default="127.0.0.1:8400", help="HOST:PORT that is served.")
@click.option("--name", help="The model's name for clients.  [default: MODEL]")
@option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path),
    default=Path("tinker"),
    help="Folder of the journal and of checkpoints; a server resumes from it.",
)
@option("--device", default="auto", help="cpu, cuda or auto.")
@option(
    "--context",
    "max_context",
    type=click.IntRange(8),
    default=4096,
    help="Tokens of a sequence at most.",
)
@option("--slots", type=click.IntRange(1), default=64, help="Samples at once.")
@option(
    "--engine",
    type=click.Choice(["torch", "vllm"]),
    default="torch",
    help="That samples; with several GPUs not on the trainer's.",
)
def command(model: str, bind: str, name: str | None, folder: Path, **generator: object) -> int:
    """Serve the Tinker API for MODEL, a directory or a name on the hub.

    A client gets http://HOST:PORT as TINKER_BASE_URL, and any TINKER_API_KEY that begins with tml-.
    An address that other machines reach needs a key of its own, in the variable UMBRA_TINKER_KEY.
    """
    settings = [f"generator.{key}={value}" for key, value in generator.items()]
    trainer = f"trainer.device={generator['device']}"
    config = load_config(overrides=[f"model.path={model}", trainer, *settings])
    setup_logging(config.log, "tinker")
    from umbra.services.tinker.service import run  # brings torch

    return run(config, bind, name or model, folder)
