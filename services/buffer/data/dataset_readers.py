"""Rows of prompts from a JSONL or Parquet file, or from a Hugging Face data set."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from umbra.proto.errors import UsageError
from umbra.services.buffer.data.prompts import Prompt, check_row, read_prompts

DATASETS = "datasets:"


def read_source(name: str, prefix: str = "") -> list[Prompt]:
    """All rows of one source; `prefix` goes before their ids, so that those of two differ.

    Raises:
        UsageError: it cannot be read, is empty, or has a row that is no prompt.
    """
    if name.startswith(DATASETS):
        rows = _read_dataset(name)
    elif name.endswith(".parquet"):
        rows = _read_parquet(name)
    else:
        return [Prompt(prefix + prompt.prompt_id, prompt.row) for prompt in read_prompts(name)]
    if not rows:
        raise UsageError(f"{name} has no rows")
    if "prompt" not in rows[0]:
        raise UsageError(
            f'{name} has no column "prompt", only {", ".join(rows[0])}: rename the one that holds '
            "the prompts"
        )
    return [
        Prompt(f"{prefix}{number}", check_row(row, f"{name}, row {number}"))
        for number, row in enumerate(rows, start=1)
    ]


def _read_parquet(path: str) -> list[dict[str, Any]]:
    parquet: Any = _load("pyarrow.parquet", path)
    if not Path(path).is_file():
        raise UsageError(f"{path} cannot be read: there is no such file")
    try:
        return parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        raise UsageError(f"{path} is no Parquet file that can be read: {_line(error)}") from error


def _read_dataset(name: str) -> list[dict[str, Any]]:
    """`datasets:NAME[:SPLIT]`; NAME is a folder or a name on the hub, SPLIT "train" by default.

    A folder holds data files of any format that `datasets` reads, or is what `save_to_disk` wrote.
    """
    datasets: Any = _load("datasets", name)
    path, _, split = name.removeprefix(DATASETS).partition(":")
    split = split or "train"
    saved = [Path(path) / file for file in ("dataset_dict.json", "dataset_info.json")]
    datasets.disable_progress_bars()
    if any(file.exists() for file in saved):
        found = _attempt(name, lambda: datasets.load_from_disk(path))
        if isinstance(found, datasets.DatasetDict):
            if split not in found:
                raise UsageError(f"{name}: there is no split {split}, only {', '.join(found)}")
            found = found[split]
    else:
        found = _attempt(name, lambda: datasets.load_dataset(path, split=split))
    return [dict(row) for row in found]


def _attempt(name: str, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Exception as error:
        raise UsageError(f"{name} cannot be loaded: {_line(error)}") from error


def _load(module: str, source: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        raise UsageError(
            f"{source} needs {package}, which is not installed: pip install 'umbra-rl[tasks]'"
        ) from error


def _line(error: Exception) -> str:
    """The first line of what a library says."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
