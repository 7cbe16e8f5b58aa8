"""Rows of prompts from a JSONL or Parquet file, a Hugging Face data set, or a function."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from umbra.proto.errors import StartupError, UsageError
from umbra.services.process.files import read_numbered
from umbra.services.prompts.rows import Prompt, check_row, renamed, rows_of

DATASETS = "datasets:"
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_PART = re.compile(r":(?![^\[]*\])")  # a slice of a split, "train[:100]", is one part


def read_source(
    name: str | Path,
    prefix: str = "",
    columns: Mapping[str, str] | None = None,
    section: str = "data",
) -> list[Prompt]:
    """Return all rows of one source.

    Args:
        name: a JSONL or Parquet file, "datasets:NAME[:CONFIG][:SPLIT]", or "module:function",
            which returns an iterable of rows.
        prefix: goes before their ids, so that ids of two sources differ.
        columns: renamed columns of the source, as {ours: theirs}.
        section: whose keys `prompts` and `columns` are, for errors.

    Raises:
        UsageError: it cannot be read, is empty, or has a row that is no prompt.
        StartupError: it is elsewhere, and cannot be reached.
    """
    if not (name := str(name)):
        raise UsageError(
            f"{section}.prompts is not set: name a JSONL file with one prompt per line"
        )
    rows, columns = list(_rows(name)), columns or {}
    if not rows:
        raise UsageError(f"{name} has no rows")
    _, first, where = rows[0]
    if "prompt" not in columns and "prompt" not in first:
        known = ", ".join(map(str, first))
        raise UsageError(
            f'{where}: there is no "prompt", only {known}: name the column that holds '
            f'the prompts, {section}.columns = {{ prompt = "..." }}'
        )
    return [
        Prompt(f"{prefix}{number}", check_row(renamed(row, columns, where), where))
        for number, row, where in rows
    ]


def is_elsewhere(name: str) -> bool:
    """True if a source is a data set that is no folder of this machine."""
    return name.startswith(DATASETS) and not Path(_dataset(name)[0]).exists()


def pin_source(name: str) -> str:
    """Return `name` with its commit if it is a data set on the hub.

    It is left as it is while the hub cannot be asked: `datasets` has its own cache.

    Raises:
        UsageError: it is not there.
    """
    if not is_elsewhere(name):
        return name
    path, revision, *others = _dataset(name)
    if revision:
        return name
    hub = _load("huggingface_hub", name)
    errors = _load("huggingface_hub.errors", name)
    try:
        commit = hub.HfApi().dataset_info(path).sha
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise UsageError(
            f"{name}: there is no folder {path} here, and the hub shows no data set of that name: "
            "correct it, or set HF_TOKEN if it is a private one"
        ) from error
    except (errors.OfflineModeIsEnabled, errors.HTTPError, OSError):
        return name
    return ":".join([f"{DATASETS}{path}@{commit}", *(part for part in others if part)])


def _rows(name: str) -> Iterator[tuple[int, dict[str, Any], str]]:
    """Yield number and content of each row, and what errors call its place."""
    _refuse_url(name)
    what = "row"
    if name.startswith(DATASETS):
        rows = enumerate(_read_dataset(name), start=1)
    elif is_parquet(name):
        rows = enumerate(_read_parquet(name), start=1)
    elif is_function(name):
        rows = enumerate(_call(name), start=1)
    else:
        rows, what = read_numbered(name), "line"
    for number, row in rows:
        yield number, row, f"{name}, {what} {number}"


def _refuse_url(name: str) -> None:
    if name.startswith(("http://", "https://")):
        raise UsageError(
            f"{name.partition('?')[0]}: prompts are not read from URLs: download the file, or name "
            "a data set on the hub (datasets:NAME)"
        )


def is_function(name: str) -> bool:
    """True if a source is written as "module:function"."""
    return bool(_FUNCTION.fullmatch(name)) and not name.startswith(DATASETS)


def _call(name: str) -> list[dict[str, Any]]:
    """Return the rows of "module:function"; modules beside the run file are found."""
    module, _, function = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # a file there shadows no library
    try:
        return rows_of(getattr(importlib.import_module(module), function)(), name)
    except UsageError:
        raise
    except Exception as error:
        told = f"{name} gave no prompts: {type(error).__name__}: {_line(error)}"
        raise UsageError(f"{told}; it must return an iterable of rows") from error


def is_parquet(name: str) -> bool:
    return name.endswith(".parquet")


def _read_parquet(name: str) -> list[dict[str, Any]]:
    parquet = _load("pyarrow.parquet", name)
    if not Path(name).is_file():
        raise UsageError(f"{name} cannot be read: there is no such file")
    try:
        return parquet.read_table(name).to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        raise UsageError(f"{name} is no Parquet file that can be read: {_line(error)}") from error


def _dataset(name: str) -> tuple[str, str, str, str]:
    """Return path, revision, configuration and split of "datasets:..."; "" for what it lacks."""
    path, *parts = _PART.split(name.removeprefix(DATASETS))
    if len(parts) > 2:
        raise UsageError(f"{name}: write it as datasets:NAME, :NAME:SPLIT or :NAME:CONFIG:SPLIT")
    config, split = ("", "", *parts)[-2:]
    if Path(path).exists():
        return path, "", config, split
    path, _, revision = path.partition("@")
    return path, revision, config, split


def placed(name: str, place: Callable[[str], str]) -> str:
    """Return `name`, a source, with its file or folder as the absolute path that `place` gives."""
    _refuse_url(name)
    if not name or is_function(name):
        return name
    if not name.startswith(DATASETS):
        return place(name)
    path, *parts = _PART.split(name.removeprefix(DATASETS))
    folder = place(path)
    if not Path(folder).exists():
        return name
    if _PART.search(folder):
        raise UsageError(f"{name}: the folder is {folder}, which has a colon: give it another name")
    return DATASETS + ":".join([folder, *parts])


def _read_dataset(name: str) -> list[dict[str, Any]]:
    """Return the rows of a folder or data set on the hub, of split "train" by default.

    A folder holds data files of any format that `datasets` reads, or is what `save_to_disk` wrote.
    """
    datasets = _load("datasets", name)
    path, revision, config, split = _dataset(name)
    split = split or "train"
    saved = [Path(path) / file for file in ("dataset_dict.json", "dataset_info.json")]
    datasets.disable_progress_bars()
    try:
        if not any(file.exists() for file in saved):
            given = {"name": config or None, "revision": revision or None}
            return [dict(row) for row in datasets.load_dataset(path, split=split, **given)]
        found = datasets.load_from_disk(path)
    except ConnectionError as error:
        raise StartupError(f"{name} cannot be reached: {_line(error)}") from error
    except Exception as error:
        raise UsageError(f"{name} cannot be loaded: {_line(error)}") from error
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            raise UsageError(f"{name}: there is no split {split}, only {', '.join(found)}")
        found = found[split]
    return [dict(row) for row in found]


def _load(module: str, source: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        raise UsageError(
            f"{source} needs {package}, which is not installed: pip install 'umbra-rl[tasks]'"
        ) from error


def _line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
