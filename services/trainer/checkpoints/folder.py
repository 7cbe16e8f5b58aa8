"""The folder with a run's checkpoints, each a folder `step-<n>` that is whole or not there at all.

A checkpoint is made in a hidden folder beside the others. All its files are on the disk before it
gets its name, so whatever ends the process, `step-<n>` is whole. `umbra export` makes a Hugging
Face directory of one.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import msgspec

from umbra.proto.errors import UNREADABLE, UmbraError, UsageError
from umbra.services.config import CheckpointConfig, RunConfig
from umbra.services.modeling.model_directory import check_out
from umbra.services.process.files import DISK, Disk, named_run

SCRATCH = ".writing-"
NAME = "checkpoint.json"
NODE = "node-"  # begins the names of the folders of other nodes than the first
FORMAT = 5


class DamagedError(UmbraError):
    """A checkpoint that is not whole."""


class TensorInfo(msgspec.Struct, frozen=True):
    """A whole tensor: all its rows, over all ranks."""

    shape: list[int]
    dtype: str  # torch's name: float32, uint8


class SavedRows(msgspec.Struct, frozen=True, array_like=True):
    """Rows of a tensor in a file."""

    name: str  # of the tensor
    first: int
    count: int  # 1 if the tensor is a number
    at: int  # byte of the file
    checksum: int  # XXH3


class FileInfo(msgspec.Struct, frozen=True):
    """One rank's file."""

    size: int
    rows: list[SavedRows]
    facts: dict[str, Any]  # what the rank saved besides tensors


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `checkpoint.json`, which is written last."""

    format: int = FORMAT
    step: int
    run: str
    saved_at: float  # seconds since the epoch; distinguishes two checkpoints of one step
    config: dict[str, Any]  # of the run, resolved
    metrics: dict[str, float]  # of the step
    tensors: dict[str, TensorInfo]  # by name
    files: list[FileInfo]  # by rank
    hosts: list[str] = []  # by node, each with equally many ranks; none = one host

    def describe(self, number: int) -> str:
        """Return the name of a file, with the host that wrote it."""
        if len(self.hosts) < 2:
            return file_name(number)
        node = number * len(self.hosts) // len(self.files)
        return f"{file_name(number)} of node {node} ({self.hosts[node]})"


class _Format(msgspec.Struct):
    format: int


def file_name(rank: int) -> str:
    return f"rank-{rank:05d}.rows"


def read_index(directory: Path) -> Index:
    """Return the index of the checkpoint in `directory`; DamagedError if it is unreadable."""
    path = directory / NAME
    try:
        content = path.read_bytes()
        version = msgspec.json.decode(content, type=_Format).format
        if version == FORMAT:
            return msgspec.json.decode(content, type=Index)
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error.strerror}") from error
    except UNREADABLE as error:
        raise DamagedError(f"{path} is damaged: {error}") from error
    raise DamagedError(f"{path} has format {version}, this Umbra reads {FORMAT}")


class CheckpointFolder:
    """A folder of checkpoints; only one process, the first rank of a host, changes its files.

    Each host (`node`) has one, with the files of its ranks; nodes above 0 have a subfolder of their
    number, in case that hosts share a disk. `config` says which checkpoints are kept.
    """

    def __init__(
        self, path: Path, config: CheckpointConfig, disk: Disk = DISK, node: int = 0
    ) -> None:
        self.root, self.path = path, path / f"{NODE}{node}" if node else path
        self.disk, self.config = disk, config

    def of(self, step: int) -> Path:
        return self.path / f"step-{step}"

    def scratch(self, step: int) -> Path:
        """Return the hidden folder in which the checkpoint of `step` is written."""
        # Named by the step: a rank that is late with another checkpoint does not write into this.
        return self.path / f"{SCRATCH}{step}"

    def steps(self) -> list[int]:
        return _steps(self.path)

    def seen(self) -> list[int]:
        """Return the steps of all checkpoints of which this host has files."""
        return [step for place in self._places() for step in _steps(place)]

    def newest_index(self, step: int) -> Index:
        """Return the index of `step`'s newest checkpoint; DamagedError if none can be read."""
        found: list[Index] = []
        fault = DamagedError(f"{self.of(step)} is not there")
        for place in self._places():
            if (directory := place / f"step-{step}").is_dir():
                try:
                    found.append(read_index(directory))
                except DamagedError as error:
                    fault = error
        if not found:
            raise fault
        return max(found, key=lambda index: index.saved_at)

    def find_files(self, index: Index) -> dict[int, Path]:
        """Return the files of a checkpoint that are on this host, by rank.

        They may be in the folders of several nodes, if hosts share a disk, or these were copied.
        """
        files: dict[int, Path] = {}
        for place in self._places():
            directory = place / f"step-{index.step}"
            with suppress(DamagedError):
                if read_index(directory).saved_at != index.saved_at:
                    continue  # of another life
                for number, file in enumerate(index.files):
                    path = directory / file_name(number)
                    if path.is_file() and path.stat().st_size == file.size:
                        files.setdefault(number, path)
        return files

    def _places(self) -> list[Path]:
        """Return the folders of all nodes that are on this host, its own one first."""
        return list(dict.fromkeys([self.path, self.root, *sorted(self.root.glob(f"{NODE}*"))]))

    @property
    def covered(self) -> int:
        """Return the step before which none of the newest checkpoints needs anything to resume.

        While there are fewer than are kept, the beginning of the run counts as one.
        """
        newest = self.steps()[-self.config.keep :]
        return newest[0] if len(newest) == self.config.keep else 0

    def best(self) -> int | None:
        """Return the step of the best checkpoint, the newest of equals; None without a metric."""
        name = self.config.best_metric
        metric, sign = name.removeprefix("-"), -1 if name.startswith("-") else 1
        values: list[tuple[float, int]] = []
        for step in self.steps() if metric else ():
            with suppress(DamagedError, KeyError):  # KeyError: it has no such number
                values.append((sign * read_index(self.of(step)).metrics[metric], step))
        return max(values)[1] if values else None

    def begin(self, step: int) -> Path:
        """Make an empty folder for the checkpoint of `step` (OSError); remove what others left."""
        self.discard()
        self.disk.make_folders(self.path)
        scratch = self.scratch(step)
        self.disk.make_folder(scratch)
        return scratch

    def discard(self) -> None:
        for scratch in self.path.glob(f"{SCRATCH}*"):
            self._remove(scratch)

    def finish(self, index: Index) -> None:
        """Give the checkpoint its name once its files are on the disk; OSError if it can't be."""
        scratch, final, disk = self.scratch(index.step), self.of(index.step), self.disk
        with disk.opened(scratch / NAME, new=True) as fd:
            disk.write_all(fd, msgspec.json.format(msgspec.json.encode(index), indent=1) + b"\n", 0)
            disk.sync(fd)
        disk.sync_directory(scratch)
        if final.exists():  # another host could not finish this one before
            disk.remove_tree(final)
        disk.rename(scratch, final)
        disk.sync_directory(self.path)

    def prune(self) -> None:
        steps = self.steps()
        for step in sorted({*steps[: -self.config.keep]} - {self.best()}):
            scratch = self.scratch(step)  # whole or not there, also while it is being removed
            self._remove(scratch)
            self.disk.rename(self.of(step), scratch)
            self.disk.sync_directory(self.path)
            self._remove(scratch)

    def set_aside(self, step: int) -> Path:
        """Rename a damaged checkpoint, so that it does not count any more."""
        aside = self.path / f"damaged-step-{step}"
        self._remove(aside)
        self.disk.rename(self.of(step), aside)
        return aside

    def _remove(self, path: Path) -> None:
        """Remove it if it is there; what can't be removed now is found again later."""
        with suppress(OSError):
            self.disk.remove_tree(path)


def _steps(path: Path) -> list[int]:
    matches = (re.fullmatch(r"step-(\d+)", entry.name) for entry in path.glob("step-*"))
    return sorted(int(match[1]) for match in matches if match)


def export_checkpoint(checkpoint: Path, out: Path, model: str = "") -> Path:
    """Write the weights of `checkpoint`, an adapter merged, to directory `out`; whole or not.

    A run's folder stands for its newest one. `model` is where the run began, a directory or a name,
    if that is not where it was.

    Raises:
        UsageError: no checkpoint, a damaged one, or one of another model.
    """
    from umbra.services.modeling.lora import add_adapter
    from umbra.services.modeling.model_directory import weights_checksum
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
        begun = model or config.model.path
        policy, tokenizer = load_policy(
            begun, source, config.model.checked, trust=config.model.trust_remote_code
        )
        base, alpha = "", 0.0
        if config.trainer.lora_rank:
            base, alpha = weights_checksum(begun), config.trainer.lora_alpha
            add_adapter(policy, config.trainer, config.run.seed)
        root = checkpoint.parent
        folder = CheckpointFolder(
            root.parent if root.name.startswith(NODE) else root, config.checkpoint
        )
        ModelState("policy", policy, base=base, alpha=alpha).load(Saved(folder, index))
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
    check_out(out)
    click.echo(f"{export_checkpoint(named_run(checkpoint), out, model)}")
