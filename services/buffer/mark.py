"""`store.json` in the folder of a run: that the run has a durable store, which, and where.

Without it a store that is gone altogether would look like that of a run which has not begun.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from umbra.proto.errors import UNREADABLE
from umbra.services.buffer.store import LmdbStore, StoreError
from umbra.services.process.files import DISK

NAME = "store.json"


class RunMark(msgspec.Struct, frozen=True):
    store: str  # its id
    folder: str  # where it was when the run was last begun


def open_marked(run_dir: Path | None, folder: Path) -> LmdbStore:
    """Open the store in `folder`, which must be the one of the run in `run_dir`.

    Raises:
        StoreError: `folder` holds none or another one; or as `LmdbStore`.
    """
    mark = read_mark(run_dir)
    if mark is not None and not (folder.is_dir() and any(folder.iterdir())):
        raise _gone(mark, run_dir, f"{folder} holds none")
    store = LmdbStore(folder)
    if mark is not None and mark.store != store.id:
        store.close()
        raise _gone(mark, run_dir, f"{folder} holds another one, {store.id}")
    if run_dir is not None:
        found = RunMark(store.id, str(folder.resolve()))
        if found != mark:
            DISK.replace(run_dir / NAME, msgspec.json.encode(found) + b"\n")
    return store


def refuse_marked(run_dir: Path | None) -> None:
    """Raise StoreError if the run has had a store."""
    mark = read_mark(run_dir)
    if mark is not None:
        raise _gone(mark, run_dir, 'buffer.store is "memory"')


def read_mark(run_dir: Path | None) -> RunMark | None:
    """Return the content of the file; None if there is none. Raises StoreError."""
    path = None if run_dir is None else run_dir / NAME
    if path is None or not path.exists():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunMark)
    except (OSError, *UNREADABLE) as error:
        raise StoreError(
            f"{path}, which names the store of the run, cannot be read ({error}): restore it from "
            "a copy; if the store itself is there, remove the file, and it is written anew"
        ) from error


def _gone(mark: RunMark, run_dir: Path | None, what: str) -> StoreError:
    return StoreError(
        f"the run in {run_dir} has the store {mark.store} in {mark.folder}, but {what}: bring it "
        f"back, or choose another --run-dir to begin a run anew"
    )
