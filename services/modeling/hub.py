"""Models by their names on a hub of Hugging Face: `ORG/NAME`, or `ORG/NAME@REVISION`.

`huggingface_hub` does the work: it reads the variables that its users know (`HF_TOKEN`, `HF_HOME`,
`HF_HUB_OFFLINE`, `HF_ENDPOINT`), keeps a cache that other programs share, and locks it. A process
that starts a run pins names to commits (`pin`), so that all others load the same bytes (`fetch`).
"""

from __future__ import annotations

import errno
import hashlib
import importlib
import json
import logging
import re
import shutil
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from umbra.proto.errors import StartupError, UsageError
from umbra.services.reporting.tables import size

SMALL = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
"""Files of a model besides its weights: configuration, chat template and tokenizer."""
CODE = ["*.py"]
WEIGHTS = ["model*.safetensors"]
_ELSEWHERE = ["*/*"]  # other formats and the like, in folders of their own
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
_COMMIT = re.compile(r"[0-9a-f]{40}")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository of models, and a branch, tag or commit in it."""

    repo: str
    revision: str = "main"

    @classmethod
    def of(cls, text: str) -> HubName:
        """The name in `text`, which is one (`is_hub_name`)."""
        repo, _, revision = text.partition("@")
        return cls(repo, revision or "main")

    @property
    def pinned(self) -> bool:
        """Whether it always stands for the same bytes."""
        return bool(_COMMIT.fullmatch(self.revision))

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}"


def looks_like_name(text: str) -> bool:
    """Whether `text` has the form of a name on the hub."""
    return bool(_NAME.fullmatch(text))


def is_hub_name(text: str) -> bool:
    """Whether `text` is to be looked for on the hub: it has the form of a name, and is no path."""
    return looks_like_name(text) and not Path(text).exists()


def refuse_misspelt(text: str, source: str, folder: Path | None = None) -> None:
    """Refuse a name that is rather a path with a mistake: its first part is a folder here.

    Args:
        text: has no revision, or it is a name for certain.
        source: the key or flag it came from.
        folder: where paths are looked up; the current directory by default.

    Raises:
        UsageError: it is such a name; tells both readings.
    """
    here = (folder or Path()) / text
    if looks_like_name(text) and "@" not in text and here.parent.is_dir() and not here.exists():
        near = get_close_matches(here.name, [path.name for path in here.parent.iterdir()], n=1)
        meant = f" (did you mean {Path(text).parent / near[0]}?)" if near else ""
        raise UsageError(
            f"{source}: {text} is taken for a path, as {Path(text).parent} is a folder in "
            f"{here.parent.parent.resolve()}, and it is not there{meant}; for the model of that "
            f"name on the hub write {text}@main"
        )


def pin(text: str, source: str) -> HubName:
    """The name in `text`, its revision a commit.

    Raises:
        UsageError: there is no such model, or this machine may not read it; or `refuse_misspelt`.
        StartupError: the hub cannot be reached, and the cache does not know the name.
    """
    name = HubName.of(text)
    if name.pinned:
        return name
    refuse_misspelt(text, source)
    return HubName(name.repo, _download(name, SMALL, source).name)


def fetch(text: str, source: str, *, weights: bool = True, code: bool = False) -> Path:
    """The directory, in the cache, of the model that `text` names; what is missing is downloaded.

    Args:
        text: see `is_hub_name`.
        source: the key or flag it came from, for errors.
        weights: False if they are not read.
        code: the Python files too.

    Raises:
        UsageError: as `pin`; or there are no safetensors weights, or they don't fit on the disk; or
            a file in the cache is damaged, as far as that shows without reading all weights.
        StartupError: as `pin`.
    """
    folder = _fetched(text, source, weights=weights, code=code)
    _refuse_damaged(folder, source, weights=weights)
    return folder


def _fetched(text: str, source: str, *, weights: bool = True, code: bool = False) -> Path:
    """As `fetch`, whatever the files hold."""
    name = pin(text, source)
    patterns = [*SMALL, *(CODE if code else ()), *(WEIGHTS if weights else ())]
    if folder := _cached(name, patterns, weights=weights):
        return folder
    if weights and (missing := missing_bytes(str(name), source)):
        log.info("downloading the weights of %s: %s", name, size(missing))
    folder = _download(name, patterns, source)
    if weights and not _has_weights(folder):
        _refuse_damaged(folder, source, weights=False)  # perhaps it is the index
        raise UsageError(f"{source}: {name} lacks weights that its index names, or has none")
    return folder


def missing_bytes(text: str, source: str) -> int:
    """How many bytes of weights are not in the cache yet.

    Raises:
        UsageError: there are no safetensors weights, or they don't fit on the disk; else as `pin`.
        StartupError: as `pin`.
    """
    hub, name = _library(source, text), HubName.of(text)
    if name.pinned and _cached(name, [*SMALL, *WEIGHTS], weights=True):
        return 0
    with _told(name, source):
        info = hub.HfApi().model_info(name.repo, revision=name.revision, files_metadata=True)
    files = {file.rfilename: file.size or 0 for file in info.siblings or []}
    weights = [file for file in files if re.fullmatch(r"model[^/]*\.safetensors", file)]
    if not weights:
        other = sorted(file for file in files if file.endswith((".bin", ".gguf", ".pt", ".pth")))
        has = f", only {', '.join(other[:3])}" if other else ""
        raise UsageError(
            f"{source}: {name} has no safetensors weights{has}: choose a model that has, or "
            "convert it and name its directory"
        )

    def is_cached(file: str) -> bool:
        return isinstance(hub.try_to_load_from_cache(name.repo, file, revision=info.sha), str)

    missing = sum(files[file] for file in weights if not is_cached(file))
    free = _free_bytes()
    if missing > free:
        raise UsageError(_no_room(name, source, f"{size(missing)} of weights, {size(free)} free"))
    return missing


def mend_cache(text: str, source: str) -> None:
    """Have all files of a model in the cache as they were: those that are missing are downloaded,
    those that are there read, and downloaded anew if they have another content.

    The cache names a file by its checksum. Large models take a while, so a run has it done once,
    by the process that starts it; what others look at, `fetch` says.

    Args:
        text: a pinned name.
        source: the key or flag it came from.

    Raises:
        UsageError: a file is damaged and cannot be removed; else as `fetch`.
        StartupError: the hub is needed, and cannot be reached.
    """
    name = HubName.of(text)
    # What is there goes first: only a sound index tells which weights are missing.
    folder = _cached(name, SMALL, weights=False) or _fetched(text, source)
    links = [path for path in folder.iterdir() if path.is_symlink() and path.is_file()]
    with ThreadPoolExecutor() as pool:
        whole = list(pool.map(lambda link: _is_whole(link, link.stat().st_mtime_ns), links))
    damaged = [link for link, good in zip(links, whole, strict=True) if not good]
    for link in damaged:
        log.warning("%s of %s is damaged in the cache: downloading it anew", link.name, name)
        try:
            link.resolve().unlink()
            link.unlink()
        except OSError as error:
            raise UsageError(
                f"{source}: {link.resolve()} is damaged, and cannot be removed: {error.strerror}"
            ) from error
    if damaged:
        _download(name, [link.name for link in damaged], source)
    _fetched(text, source)


@cache
def _is_whole(link: Path, changed: int) -> bool:
    """Whether a file of the cache has the checksum that is its name; asked once per process.

    A name of 64 digits is SHA-256, one of 40 what git calls the file; others tell nothing.
    """
    path = link.resolve()
    if re.fullmatch(r"[0-9a-f]{64}", path.name):
        checksum = hashlib.sha256()
    elif re.fullmatch(r"[0-9a-f]{40}", path.name):
        checksum = hashlib.sha1(b"blob %d\0" % path.stat().st_size)
    else:
        return True
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: checksum).hexdigest() == path.name


def _refuse_damaged(folder: Path, source: str, *, weights: bool) -> None:
    """Look for damage in a folder of the cache: read small files, and the heads of weights.

    A head says how long the file is and what is in it, so weights that were cut off are seen, and
    shards of another model; a flipped bit within them is not.

    Raises:
        UsageError: there is; names the file.
    """
    whole = (folder / "model.safetensors").is_file()
    read = {"model.safetensors"} if whole else set(_shards(folder / "model.safetensors.index.json"))
    for path in sorted(filter(Path.is_file, folder.iterdir())):
        changed, fault = path.stat().st_mtime_ns, ""
        if path.name in read:
            fault = _head_fault(path, changed) if weights else ""
        elif path.suffix != ".safetensors" and path.is_symlink() and not _is_whole(path, changed):
            fault = "its checksum is another one"
        if fault:
            raise UsageError(
                f"{source}: {path.name} is damaged in the hub's cache on {socket.gethostname()} "
                f"({fault}): remove {path.resolve()} there, and it is downloaded anew"
            )


@cache
def _head_fault(path: Path, changed: int) -> str:
    """What is wrong with the head of a weight file; empty if nothing. Asked once per process."""
    safetensors: Any = importlib.import_module("safetensors")
    try:
        with safetensors.safe_open(path, framework="np") as file:
            held = set(file.keys())
    except (OSError, safetensors.SafetensorError) as error:
        return _line(error)
    index = path.parent / "model.safetensors.index.json"
    missing = _shards(index).get(path.name, set[str]()) - held
    return f"it has no {min(missing)}" if missing else ""


def in_cache(text: str) -> bool:
    """Whether something of the model that `text` names is in the cache."""
    try:
        constants: Any = importlib.import_module("huggingface_hub.constants")
    except ModuleNotFoundError:
        return False
    folder = f"models--{HubName.of(text).repo.replace('/', '--')}"
    return (Path(constants.HF_HUB_CACHE) / folder).is_dir()


def _cached(name: HubName, patterns: list[str], *, weights: bool) -> Path | None:
    """Where it is, if all of it is there."""
    hub = _library("", str(name))
    try:
        found = hub.snapshot_download(
            name.repo,
            revision=name.revision,
            allow_patterns=patterns,
            ignore_patterns=_ELSEWHERE,
            local_files_only=True,
        )
    except OSError:  # of several classes; whatever it is, a download does better or says why not
        return None
    folder = Path(found)
    if any(not path.exists() and any(map(path.match, patterns)) for path in folder.iterdir()):
        return None  # the file of a link was removed
    there = (folder / "config.json").is_file() and (not weights or _has_weights(folder))
    return folder if there else None


def _download(name: HubName, patterns: list[str], source: str) -> Path:
    hub = _library(source, str(name))
    with _told(name, source), _bars_where_seen():
        return Path(
            hub.snapshot_download(
                name.repo,
                revision=name.revision,
                allow_patterns=patterns,
                ignore_patterns=_ELSEWHERE,
            )
        )


@contextmanager
def _bars_where_seen() -> Iterator[None]:
    """Let the library draw its progress on a terminal or in a notebook, but not into a log."""
    utils: Any = importlib.import_module("huggingface_hub.utils")
    unseen = not sys.stderr.isatty() and "ipykernel" not in sys.modules
    if not unseen or utils.are_progress_bars_disabled():
        yield
        return
    utils.disable_progress_bars()
    try:
        yield
    finally:
        utils.enable_progress_bars()


def _has_weights(folder: Path) -> bool:
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return True
    shards = _shards(index)
    return bool(shards) and all((folder / shard).is_file() for shard in shards)


def _shards(index: Path) -> dict[str, set[str]]:
    """The names of the tensors in each file of weights; empty if there is no such `index`."""
    shards: dict[str, set[str]] = {}
    try:
        for name, file in json.loads(index.read_bytes())["weight_map"].items():
            shards.setdefault(file, set()).add(name)
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return {}
    return shards


@contextmanager
def _told(name: HubName, source: str) -> Iterator[None]:
    """Say in one sentence what goes wrong with the hub."""
    errors: Any = importlib.import_module("huggingface_hub.errors")
    constants: Any = importlib.import_module("huggingface_hub.constants")
    hub, where = constants.ENDPOINT, f"{source}: {name.repo}"
    try:
        yield
    except errors.GatedRepoError as error:
        raise UsageError(
            f"{where} is gated: accept its terms at {hub}/{name.repo} and set HF_TOKEN to a token "
            "of that account (or use `hf auth login`)"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UsageError(
            f"{where} is no directory here, and {hub} shows no model of that name: correct it, or "
            "set HF_TOKEN if it is a private one"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UsageError(f"{where} has no revision {name.revision!r} on {hub}") from error
    except errors.HFValidationError as error:
        raise UsageError(f"{where} is neither a directory here nor a name on a hub") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, errors.HTTPError) as error:
        raise _unreachable(name, where, hub, error, errors) from error
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise UsageError(_no_room(name, source, "the disk is full")) from error
        raise StartupError(f"{where} cannot be downloaded from {hub}: {_line(error)}") from error


def _unreachable(
    name: HubName, where: str, hub: str, error: Exception, errors: Any
) -> UsageError | StartupError:
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, errors.OfflineModeIsEnabled):
        response = getattr(cause, "response", None)
        if response is not None:
            return StartupError(f"{where}: {hub} answered {response.status_code}: {_line(cause)}")
        cause = cause.__cause__
    if cause is not None:
        return UsageError(
            f"{where} is no directory here, the cache has not all of {name.revision}, and "
            "HF_HUB_OFFLINE is set: unset it, download the model, or name a directory"
        )
    why = _line(error.__cause__ or error)
    return StartupError(
        f"{where} is no directory here, and {hub} cannot be reached to look for it there ({why}): "
        "connect this machine, or name a directory"
    )


def _no_room(name: HubName, source: str, fault: str) -> str:
    constants: Any = importlib.import_module("huggingface_hub.constants")
    return (
        f"{source}: {name.repo} does not fit into {constants.HF_HUB_CACHE} ({fault}): make room "
        "there, or set HF_HOME to a folder on a larger disk"
    )


def _free_bytes() -> int:
    """What is free on the disk of the cache."""
    constants: Any = importlib.import_module("huggingface_hub.constants")
    folder = Path(constants.HF_HUB_CACHE).absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _library(source: str, name: str) -> Any:
    try:
        return importlib.import_module("huggingface_hub")
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{source}: {name} is no directory here, and huggingface_hub, which would look for it "
            "on the hub, is not installed: pip install 'umbra-rl[trainer]'"
        ) from error


def _line(error: BaseException) -> str:
    """The first line of what a library says; queries of URLs in it may be secret."""
    first = str(error).strip().partition("\n")[0]
    return re.sub(r"(://[^\s?]*)\?\S+", r"\1?...", first) or type(error).__name__
