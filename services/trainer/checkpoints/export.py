"""`umbra export`: a checkpoint as a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import click
import msgspec

from umbra.proto.errors import UsageError
from umbra.services.config import RunConfig

if TYPE_CHECKING:
    from umbra.services.trainer.checkpoints.folder import Index


def export_checkpoint(checkpoint: Path, out: Path, model: str = "") -> Path:
    """Write the weights of `checkpoint`, an adapter merged, to directory `out`; whole or not.

    Args:
        checkpoint: a checkpoint, or the folder of a run, whose newest one is taken.
        out: is written.
        model: where the run began, a directory or a name, if that is not where it was.

    Raises:
        UsageError: no checkpoint, a damaged one, or one of another model.
    """
    from umbra.services.modeling.lora import add_adapter
    from umbra.services.modeling.model_directory import weights_checksum
    from umbra.services.trainer.checkpoints.folder import DamagedError, check_files
    from umbra.services.trainer.checkpoints.parts import Weights
    from umbra.services.trainer.checkpoints.reading import Saved
    from umbra.services.trainer.policy import export_policy, load_policy
    from umbra.services.trainer.snapshot import whole_weights

    checkpoint = newest(checkpoint)
    config, index = read_config(checkpoint)
    try:
        paths = check_files(checkpoint, index)
        source = "--model" if model else f"model.path of {checkpoint}, or --model"
        begun = model or config.model.name
        policy, tokenizer = load_policy(
            begun, source, config.model.checked, trust=config.model.trust_remote_code
        )
        base = ""
        if config.trainer.lora_rank:
            base = weights_checksum(begun)
            add_adapter(policy, config.trainer, config.run.seed)
        with Saved(checkpoint, index, paths) as saved:
            Weights(policy, base).load(saved.part("policy"))
    except DamagedError as error:
        raise UsageError(f"{checkpoint} cannot be exported: {error}") from error
    return export_policy(policy, tokenizer, out, whole_weights(policy))


def newest(checkpoint: Path) -> Path:
    """The checkpoint itself, or the newest one of a run's folder.

    Raises:
        UsageError: there is none.
    """
    from umbra.services.trainer.checkpoints.folder import CheckpointFolder

    if (checkpoint / "checkpoints").is_dir():
        folder = CheckpointFolder(checkpoint / "checkpoints", RunConfig().checkpoint)
        if not folder.steps():
            raise UsageError(f"{folder.path} holds no checkpoint")
        checkpoint = folder.of(folder.steps()[-1])
    if not checkpoint.is_dir():
        raise UsageError(f"{checkpoint} is no checkpoint: name a folder like checkpoints/step-20")
    return checkpoint


def read_config(checkpoint: Path) -> tuple[RunConfig, Index]:
    """The configuration of the run of a checkpoint, and the checkpoint's index.

    Raises:
        UsageError: it is damaged.
    """
    from umbra.services.trainer.checkpoints.folder import DamagedError, read_index

    try:
        index = read_index(checkpoint)
        return msgspec.convert(index.config, RunConfig), index
    except (DamagedError, msgspec.ValidationError) as error:
        raise UsageError(f"{checkpoint} cannot be exported: {error}") from error


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Folder to write.")
@click.option("--push", "repo", metavar="ORG/NAME", help="Repository on the hub to upload it to.")
@click.option("--private", is_flag=True, help="Make that repository a private one.")
@click.option("--model", default="", help="Where the run began, if that model has moved.")
def command(
    checkpoint: Path, out: Path | None, repo: str | None, private: bool, model: str
) -> None:
    """Write CHECKPOINT as a Hugging Face model (safetensors, float32, tokenizer included).

    CHECKPOINT is a folder like runs/ID/checkpoints/step-20, or runs/ID for the newest one. A LoRA
    adapter is merged into its base. It is written to --out, or uploaded with --push (with a card
    that has the run's settings and figures), or both. HF_TOKEN, or `hf auth login`, lets you.
    """
    if out is None and repo is None:
        raise UsageError("name a folder by --out, a repository on the hub by --push, or both")
    if private and repo is None:
        raise UsageError("--private is for --push, which is not given: leave it out")
    if out is not None:
        _check_replaceable(out)
    with TemporaryDirectory(prefix="umbra-export-") as scratch:
        if repo is None:
            click.echo(f"{export_checkpoint(checkpoint, out or Path(scratch), model)}")
            return
        from umbra.services.trainer.checkpoints.hub import (
            make_repository,
            model_card,
            push,
            run_summary,
        )

        config, index = read_config(newest(checkpoint))
        make_repository(repo, private=private)
        written = export_checkpoint(checkpoint, out or Path(scratch) / "model", model)
        if out is not None:
            click.echo(f"{written}")
        card = model_card(repo, config, index.step, run_summary(checkpoint), model)
        click.echo(push(written, repo, card))


def _check_replaceable(out: Path) -> None:
    """Whether nothing is lost but a model, if one is written to `out`."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not ((out / "config.json").is_file() and (out / "tokenizer_config.json").is_file()):
        raise UsageError(f"--out {out} is there, and is no model: name another folder")
