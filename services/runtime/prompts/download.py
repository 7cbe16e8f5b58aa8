"""Files at a URL: downloaded once, and kept by their checksum, so that a run reads the same rows.

A pinned URL ends with `#sha256=...`. The process that starts a run pins; any process, here or on
another machine, then reads these very bytes, or refuses what the URL gives by then.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path

from umbra.proto.errors import StartupError, UsageError
from umbra.services.runtime.numbers import size

SCHEMES = ("http://", "https://")
CHECKSUM = "#sha256="
_SILENCE_S = 60.0  # until a server that sends nothing more is given up
_CHUNK = 1 << 20
_DIGEST = re.compile("[0-9a-f]{64}")
_PRIVATE = re.compile(r"(https?://)(?:[^\s/?#@\"]*@)?([^\s?#\"]*)(?:\?[^\s#\"]*)?")

log = logging.getLogger(__name__)


def is_url(name: str) -> bool:
    """Whether `name` is to be downloaded."""
    return name.startswith(SCHEMES)


def shown(text: str) -> str:
    """`text` with what may be secret in its URLs left out: their queries, and passwords."""

    def public(found: re.Match[str]) -> str:
        query = "?..." if "?" in found[0] else ""
        return f"{found[1]}{found[2]}{query}"

    return _PRIVATE.sub(public, text)


def cache_folder() -> Path:
    """Where downloads are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "umbra" / "prompts"


def pin_url(url: str) -> str:
    """`url` with the checksum of what it gives now; itself, if it has one.

    Raises:
        UsageError, StartupError: it gives nothing.
    """
    if CHECKSUM in url:
        _pinned(url)
        return url
    return url + CHECKSUM + _download(url).name


def file_of(name: str) -> Path:
    """The file: `name` itself, or what was downloaded from that URL.

    Raises:
        UsageError: there is nothing at the URL, or something else than its checksum says.
        StartupError: it cannot be reached.
    """
    if not is_url(name):
        return Path(name)
    url, checksum = _pinned(name)
    kept = cache_folder() / checksum
    if checksum and kept.is_file():
        if _checksum_of(kept) == checksum:
            return kept
        log.warning("%s is not what was downloaded any more: it is downloaded anew", kept)
    found = _download(url)
    if checksum and found.name != checksum:
        raise UsageError(
            f"{shown(url)} gives other bytes now (sha256 {found.name}) than those that were pinned "
            f"({checksum}): bring these back, or begin another run"
        )
    return found


def _pinned(name: str) -> tuple[str, str]:
    """URL and checksum, "" if there is none."""
    url, mark, checksum = name.partition(CHECKSUM)
    if mark and not _DIGEST.fullmatch(checksum):
        raise UsageError(
            f"{shown(url)}: {mark}{checksum} is no checksum: give 64 hexadecimal digits, or leave "
            "it out"
        )
    return url, checksum


def _checksum_of(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _download(url: str) -> Path:
    """The file with what is at `url`, named by its checksum."""
    folder, checksum = cache_folder(), hashlib.sha256()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, scratch = tempfile.mkstemp(dir=folder, prefix=".")
    except OSError as error:
        raise UsageError(
            f"{shown(url)} cannot be kept in {folder}: {error.strerror}; set XDG_CACHE_HOME to a "
            "folder that can be written to"
        ) from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            for part in _parts(url):
                checksum.update(part)
                file.write(part)
            log.info("downloaded %s: %s", shown(url), size(file.tell()))
        kept = folder / checksum.hexdigest()
        os.replace(scratch, kept)
    except OSError as error:
        raise UsageError(f"{shown(url)} cannot be kept in {folder}: {error.strerror}") from error
    finally:
        Path(scratch).unlink(missing_ok=True)
    return kept


def _parts(url: str) -> Iterator[bytes]:
    try:
        with urllib.request.urlopen(url, timeout=_SILENCE_S) as response:
            while part := response.read(_CHUNK):
                yield part
            if response.length:  # of what the server has announced
                raise HTTPException(f"the connection ended {response.length} bytes too early")
    except urllib.error.HTTPError as error:
        passing = error.code == HTTPStatus.TOO_MANY_REQUESTS or error.code >= 500
        kind = StartupError if passing else UsageError
        raise kind(f"{shown(url)}: the server answered {error.code} {error.reason}") from error
    except urllib.error.URLError as error:
        raise StartupError(f"{shown(url)} cannot be reached: {error.reason}") from error
    except (OSError, HTTPException, ValueError) as error:  # in the middle; or no URL at all
        raise StartupError(f"{shown(url)} cannot be downloaded: {error}") from error
