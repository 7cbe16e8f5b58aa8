"""`umbra export`: a checkpoint as a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from umbra.proto.errors import UsageError
from umbra.services.config import RunConfig
from umbra.services.process.files import named_run


def export_checkpoint(checkpoint: Path, out: Path, model: str = "") -> Path:
    """Write the weights of `checkpoint`, an adapter merged, to directory `out`; whole or not.

    A run's folder stands for its newest one. `model` is where the run began, a directory or a name,
    if that is not where it was.

    Raises:
        UsageError: no checkpoint, a damaged one, or one of another model.
    """
    from umbra.services.modeling.lora import add_adapter
    from umbra.services.modeling.model_directory import weights_checksum
    from umbra.services.trainer.checkpoints.folder import (
        NAME,
        NODE,
        CheckpointFolder,
        DamagedError,
        read_index,
    )
    from umbra.services.trainer.checkpoints.state import ModelState, Saved
    from umbra.services.trainer.policy import export_policy, load_policy
    from umbra.services.trainer.snapshot import whole_weights

    if (checkpoint / "checkpoints").is_dir():
        folder = CheckpointFolder(checkpoint / "checkpoints", RunConfig().checkpoint)
        if not folder.steps():
            raise UsageError(f"{folder.path} holds no checkpoint")
        checkpoint = folder.of(folder.steps()[-1])
    elif not (checkpoint / NAME).is_file():
        raise UsageError(
            f"{checkpoint} is no checkpoint: name a run that has saved one (checkpoint.every), or "
            "a folder like runs/ID/checkpoints/step-20"
        )
    try:
        index = read_index(checkpoint)
        config = msgspec.convert(index.config, RunConfig)
        source = "--model" if model else f"model.path of {checkpoint}, or --model"
        begun = model or config.model.name
        policy, tokenizer = load_policy(
            begun, source, config.model.checked, trust=config.model.trust_remote_code
        )
        base = ""
        if config.trainer.lora_rank:
            base = weights_checksum(begun)
            add_adapter(policy, config.trainer, config.run.seed)
        root = checkpoint.parent
        folder = CheckpointFolder(
            root.parent if root.name.startswith(NODE) else root, config.checkpoint
        )
        ModelState("policy", policy, base=base).load(Saved(folder, index))
    except (DamagedError, msgspec.ValidationError) as error:
        raise UsageError(f"{checkpoint} cannot be exported: {error}") from error
    return export_policy(policy, tokenizer, out, whole_weights(policy))


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to write.")
@click.option("--model", default="", help="Where the run began, if that model has moved.")
def command(checkpoint: Path, out: Path, model: str) -> None:
    """Write CHECKPOINT as a Hugging Face model (safetensors, float32, tokenizer included).

    CHECKPOINT is a folder like runs/ID/checkpoints/step-20, or a run (its folder, or its id in
    runs/) for the newest one. A LoRA adapter is merged into its base. `hf upload ORG/NAME OUT`
    uploads the result.
    """
    there = out.exists() and (not out.is_dir() or any(out.iterdir()))
    if there and not all((out / n).is_file() for n in ("config.json", "tokenizer_config.json")):
        raise UsageError(f"--out {out} exists and holds no model: name another folder")
    click.echo(f"{export_checkpoint(named_run(checkpoint), out, model)}")
