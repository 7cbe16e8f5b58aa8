"""`umbra export`: a checkpoint as a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from umbra.proto.errors import UsageError
from umbra.services.runtime.config import RunConfig


def export_checkpoint(checkpoint: Path, out: Path, model: str = "") -> Path:
    """Write the weights of `checkpoint`, an adapter merged, to directory `out`; whole or not.

    Args:
        checkpoint: a checkpoint, or the folder of a run, whose newest one is taken.
        model: the directory that the run began with, if it is not where it was.

    Raises:
        UsageError: no checkpoint, a damaged one, or one of another model.
    """
    from umbra.services.modeling.lora import add_adapter
    from umbra.services.runtime.model.directory import weights_checksum
    from umbra.services.trainer.checkpoints.folder import CheckpointFolder
    from umbra.services.trainer.checkpoints.index import DamagedError, check_files, read_index
    from umbra.services.trainer.checkpoints.parts import Weights
    from umbra.services.trainer.checkpoints.reading import Saved
    from umbra.services.trainer.policy import export_policy, load_policy
    from umbra.services.trainer.snapshot import whole_weights

    if (checkpoint / "checkpoints").is_dir():
        folder = CheckpointFolder(checkpoint / "checkpoints", RunConfig().checkpoint)
        if not folder.steps():
            raise UsageError(f"{folder.path} holds no checkpoint")
        checkpoint = folder.of(folder.steps()[-1])
    if not checkpoint.is_dir():
        raise UsageError(f"{checkpoint} is no checkpoint: name a folder like checkpoints/step-20")
    try:
        index = read_index(checkpoint)
        paths = check_files(checkpoint, index)
        config = msgspec.convert(index.config, RunConfig)
        source = "--model" if model else f"model.path of {checkpoint}, or --model"
        policy, tokenizer = load_policy(model or config.model.name, source, config.model.checked)
        base = ""
        if config.trainer.lora_rank:
            base = weights_checksum(model or config.model.name)
            add_adapter(policy, config.trainer, config.run.seed)
        with Saved(checkpoint, index, paths) as saved:
            Weights(policy, base).load(saved.part("policy"))
    except (DamagedError, msgspec.ValidationError) as error:
        raise UsageError(f"{checkpoint} cannot be exported: {error}") from error
    return export_policy(policy, tokenizer, out, whole_weights(policy))


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder to write.")
@click.option("--model", default="", help="Where the run began, if that model has moved.")
def command(checkpoint: Path, out: Path, model: str) -> None:
    """Write CHECKPOINT as a Hugging Face directory (safetensors, float32, tokenizer included).

    CHECKPOINT is a folder like runs/ID/checkpoints/step-20, or runs/ID for the newest one. A LoRA
    adapter is merged into its base.
    """
    click.echo(f"{export_checkpoint(checkpoint, out, model)}")
