"""Files at a URL: downloaded once and kept by their checksum, so that a run reads the same rows.

A pinned URL ends with `#sha256=...`. The process that starts a run pins; any process, here or on
another machine, then reads these very bytes, or refuses what the URL gives by then.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import urllib.error
import urllib.request
from http.client import HTTPException, InvalidURL
from pathlib import Path
from typing import Any, cast

from umbra.proto.errors import StartupError, UsageError

CHECKSUM = "#sha256="
_SILENCE_S = 60.0  # until a server that sends nothing more is given up
_DIGEST = re.compile("[0-9a-f]{64}")
_PRIVATE = re.compile(r"(https?://)(?:[^\s/?#@\"]*@)?([^\s?#\"]*)(?:\?[^\s#\"]*)?")


def is_url(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def shown(text: str) -> str:
    """Return `text`, a URL or with some in it, without what may be secret: query and account."""
    if not is_url(text):
        return _PRIVATE.sub(_public, text)
    url, mark, checksum = text.partition(CHECKSUM)
    place, query, _ = url.partition("?")
    return _PRIVATE.sub(_public, place) + ("?..." if query else "") + mark + checksum


def _public(found: re.Match[str]) -> str:
    return f"{found[1]}{found[2]}{'?...' if '?' in found[0] else ''}"


def without_secrets(value: Any) -> Any:
    """Return `value`, made of dicts and lists, with each URL in it as `shown`."""
    if isinstance(value, str):
        return shown(value)
    if isinstance(value, dict):
        items = cast(dict[Any, Any], value).items()
        return {without_secrets(key): without_secrets(one) for key, one in items}
    if isinstance(value, list):
        return [without_secrets(one) for one in cast(list[Any], value)]
    return value


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "umbra" / "prompts"


def pin_url(url: str) -> str:
    """Return `url` with the checksum of what it gives now; unchanged if it has one.

    Raises:
        UsageError, StartupError: it gives nothing.
    """
    return url if _pinned(url)[1] else f"{url}{CHECKSUM}{_download(url).name}"


def file_of(name: str) -> Path:
    """Return the file: `name` itself, or what was downloaded from that URL.

    Raises:
        UsageError: there is nothing at the URL, or something else than its checksum says.
        StartupError: it cannot be reached.
    """
    if not is_url(name):
        return Path(name)
    url, checksum = _pinned(name)
    kept = cache_folder() / checksum
    if checksum and kept.is_file() and _digest(kept) == checksum:
        return kept
    found = _download(url)
    if checksum and found.name != checksum:
        raise UsageError(
            f"{shown(url)} gives other bytes now (sha256 {found.name}) than those that were pinned "
            f"({checksum}): bring these back, or begin another run"
        )
    return found


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _pinned(name: str) -> tuple[str, str]:
    url, mark, checksum = name.partition(CHECKSUM)
    if mark and not _DIGEST.fullmatch(checksum):
        raise UsageError(
            f"{shown(url)}: {mark}{checksum} is no checksum: give 64 hexadecimal digits, or leave "
            "it out"
        )
    return url, checksum


def _download(url: str) -> Path:
    """Return the file with what is at `url`, named by its checksum."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".") as scratch:
            part = Path(scratch) / "part"
            _read(url, part)
            return part.replace(folder / _digest(part))
    except OSError as error:
        raise UsageError(
            f"{shown(url)} cannot be kept in {folder}: {error.strerror}; set XDG_CACHE_HOME to a "
            "folder that can be written to"
        ) from error


def _read(url: str, into: Path) -> None:
    try:
        with urllib.request.urlopen(url, timeout=_SILENCE_S) as response, into.open("wb") as file:
            shutil.copyfileobj(response, file)
            if response.length:  # of what the server has announced
                raise HTTPException(f"the connection ended {response.length} bytes too early")
    except urllib.error.HTTPError as error:
        error.close()  # it is the answer, too
        kind = StartupError if error.code == 429 or error.code >= 500 else UsageError
        why = str(error.reason).partition(" - ")[0]  # then comes where it would redirect to
        raise kind(f"{shown(url)}: the server answered {error.code} {why}") from error
    except urllib.error.URLError as error:
        raise StartupError(f"{shown(url)} cannot be reached: {error.reason}") from error
    except (InvalidURL, ValueError) as error:  # whose words have all of it
        raise UsageError(f"{shown(url)} is no URL that can be asked for") from error
    except (ConnectionError, TimeoutError, HTTPException) as error:  # in the middle
        raise StartupError(f"{shown(url)} cannot be downloaded: {error}") from error
