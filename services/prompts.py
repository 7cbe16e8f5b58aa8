"""Rows of prompts: an object each with `prompt`, which is text or a list of messages.

They are read from a JSONL or Parquet file, a Hugging Face data set, or a function.
"""

from __future__ import annotations

import importlib
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import IOBase
from pathlib import Path
from typing import Any, cast

import msgspec

from umbra.proto.bounds import ROW_KEYS
from umbra.proto.errors import StartupError, UsageError
from umbra.services.process.files import read_numbered

ROW_BYTES = 16 << 20  # as it is sent; a lease of one such row fits into a frame
INTEGERS = range(-(1 << 63), 1 << 64)  # MessagePack's
_UNREAD = ("m", "M", "V")  # of dtypes: times become bare nanoseconds, records lose their names
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row. `prompt_id` is its line number (1-based), so it is the same in every run."""

    prompt_id: str
    row: dict[str, Any]


def rename_columns(row: dict[str, Any], columns: Mapping[str, str], source: str) -> dict[str, Any]:
    """Return `row` with columns renamed by {ours: theirs}; UsageError if it has no such column."""
    if not columns:
        return row
    for ours, theirs in columns.items():
        if theirs not in row:
            names = ", ".join(map(str, row))
            raise UsageError(
                f'{source}: there is no column "{theirs}" for {ours}, only {names}: correct columns'
            )
    sources = set(columns.values())
    rest = {name: value for name, value in row.items() if name not in sources}
    return rest | {ours: row[theirs] for ours, theirs in columns.items()}


def rows_of(value: object, source: str) -> list[dict[str, Any]]:
    """Return the rows of an iterable of texts and mappings, a data set of Hugging Face, say.

    Raises:
        UsageError: it is something else, whose iteration would give names of columns or splits;
            begins with `source`.
    """
    kind = type(value).__name__
    if kind in ("DatasetDict", "IterableDatasetDict"):
        raise UsageError(f'{source}: a {kind} holds splits: give one, as in dataset["train"]')
    no_rows = isinstance(value, str | bytes | Mapping | IOBase) or hasattr(value, "columns")
    if no_rows or not isinstance(value, Iterable):
        raise UsageError(
            f"{source}: give a path or rows, not a {kind}; of a data frame give "
            'frame.to_dict("records")'
        )
    rows: list[dict[str, Any]] = []
    for number, row in enumerate(cast(Iterable[object], value), start=1):
        if isinstance(row, str):
            row = {"prompt": row}
        if not isinstance(row, Mapping):
            raise UsageError(
                f"{source}, row {number} is a {type(row).__name__}; a row is a text, or a mapping "
                'with "prompt"'
            )
        rows.append(dict(cast(Mapping[str, Any], row)))
    return rows


def check_row(row: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return `row` as plain JSON values; raise UsageError unless it is a prompt.

    The error begins with `source` and names the column.
    """
    plain = plain_row(row, source)
    if "prompt" not in plain:
        raise UsageError(f'{source}: the object has no "prompt"')
    prompt = plain["prompt"]
    if not _is_prompt(prompt):
        raise UsageError(
            f'{source}: "prompt" must be text or a list of {{"role", "content"}} objects, '
            f"got {repr(prompt)[:40]}"
        )
    if (size := len(msgspec.msgpack.encode(plain))) > ROW_BYTES:
        raise UsageError(f"{source}: {size} bytes; {ROW_BYTES} are the most")
    return plain


def plain_row(row: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return `row` as plain JSON values.

    numpy's scalars and arrays become numbers and lists. Keys of nested objects whose value is null
    are left out: Arrow adds them where rows differ, and chat templates take them for set.

    Raises:
        UsageError: it has something else; begins with `source` and names the column.
    """
    if len(row) > ROW_KEYS:
        raise UsageError(f"{source}: the object has {len(row)} keys; {ROW_KEYS} are the most")
    try:
        return {_key(name, source): _plain(row[name], f'{source}, "{name}"') for name in row}
    except RecursionError:
        raise UsageError(f"{source}: cannot be sent to a generator: nested too deeply") from None


def _plain(value: Any, place: str) -> Any:
    """Return `value` as JSON has it."""
    fault = f"a {type(value).__name__} is no JSON value: write text, a number, a list or an object"
    match value:
        case None | bool():
            return value
        case str() if not _SURROGATE.search(value):
            return str.__str__(value)  # of an Enum its value
        case str():
            fault = "a lone surrogate is no text that can be written as UTF-8"
        case int() if value in INTEGERS:
            return int(value)
        case int():
            fault = f"{str(value)[:20]}... has more than 64 bits: write text"
        case float() if math.isfinite(value):
            return float(value)
        case float():
            fault = f"{value} is no number of JSON: fill it in or leave it out"
        case Mapping():
            items = cast(Mapping[Any, Any], value).items()
            inner = ((_key(name, place), item) for name, item in items if item is not None)
            return {name: _plain(item, f"{place}.{name}") for name, item in inner}
        case list() | tuple():
            entries = enumerate(cast(list[Any], value))
            return [_plain(item, f"{place}[{index}]") for index, item in entries]
        case _ if hasattr(value, "dtype") and hasattr(value, "tolist"):
            if getattr(value.dtype, "kind", "") not in _UNREAD:
                return _plain(value.tolist(), place)
        case _:
            pass
    raise UsageError(f"{place}: {fault}")


def _key(name: Any, source: str) -> str:
    if not isinstance(name, str):
        raise UsageError(f"{source}: the key {name!r} is a {type(name).__name__}: keys are texts")
    return name


class _Turn(msgspec.Struct):
    role: str
    content: str


def _is_prompt(value: object) -> bool:
    try:
        return bool(msgspec.convert(value, str | list[_Turn]))
    except msgspec.ValidationError:
        return False


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
    _refuse_url(name)
    columns, unit = columns or {}, "row"
    if name.startswith(DATASETS):
        rows = list(enumerate(_read_dataset(name), start=1))
    elif is_parquet(name):
        rows = list(enumerate(_read_parquet(name), start=1))
    elif is_function(name):
        rows = list(enumerate(_call(name), start=1))
    else:
        rows, unit = read_numbered(name), "line"
    if not rows:
        raise UsageError(f"{name} has no rows")
    number, first = rows[0]
    if "prompt" not in columns and "prompt" not in first:
        raise UsageError(
            f'{name}, {unit} {number}: there is no "prompt", only {", ".join(map(str, first))}: '
            f'name the column that holds the prompts, {section}.columns = {{ prompt = "..." }}'
        )
    prompts: list[Prompt] = []
    for number, row in rows:
        place = f"{name}, {unit} {number}"
        row = check_row(rename_columns(row, columns, place), place)
        prompts.append(Prompt(f"{prefix}{number}", row))
    return prompts


def pin_source(name: str) -> str:
    """Return `name` with its commit if it is a data set on the hub.

    It is left as it is while the hub cannot be asked: `datasets` has its own cache.

    Raises:
        UsageError: it is not there.
    """
    path, revision, *others = _dataset(name) if name.startswith(DATASETS) else ("", "")
    if not path or revision or Path(path).exists():
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
    sys.path.extend({str(Path.cwd())}.difference(sys.path))  # a file there shadows no library
    try:
        with redirect_stdout(sys.stderr):  # ours may be read by programs
            return rows_of(getattr(importlib.import_module(module), function)(), name)
    except UsageError:
        raise
    except Exception as error:
        text = f"{name} gave no prompts: {type(error).__name__}: {_line(error)}"
        raise UsageError(f"{text}; it must return an iterable of rows") from error


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


def locate_source(name: str, place: Callable[[str], str]) -> str:
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
    """Return the rows of a folder (of data files, or `save_to_disk`'s) or of a set on the hub."""
    datasets = _load("datasets", name)
    path, revision, config, split = _dataset(name)
    split = split or "train"
    saved = [Path(path) / file for file in ("dataset_dict.json", "dataset_info.json")]
    datasets.disable_progress_bars()
    try:
        if not any(file.exists() for file in saved):
            options = {"name": config or None, "revision": revision or None}
            return [dict(row) for row in datasets.load_dataset(path, split=split, **options)]
        dataset = datasets.load_from_disk(path)
    except ConnectionError as error:
        raise StartupError(f"{name} cannot be reached: {_line(error)}") from error
    except Exception as error:
        raise UsageError(f"{name} cannot be loaded: {_line(error)}") from error
    if isinstance(dataset, datasets.DatasetDict):
        if split not in dataset:
            raise UsageError(f"{name}: there is no split {split}, only {', '.join(dataset)}")
        dataset = dataset[split]
    return [dict(row) for row in dataset]


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
