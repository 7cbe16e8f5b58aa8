"""Addresses of runs on this machine: `umbra up` leaves its address in the run's folder."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from umbra.proto.errors import UNREADABLE, UsageError
from umbra.services.config import RunSection
from umbra.services.process.files import DISK, READABLE_MODE, is_held, read_regular

FILE = "address.json"


@dataclass(frozen=True, slots=True)
class RunAddress:
    """The buffer of a run under way, and the folder of its keys; empty: it has none."""

    broker: str
    keys: str = ""

    def write(self, folder: Path) -> None:
        DISK.replace(folder / FILE, msgspec.json.encode(self) + b"\n", mode=READABLE_MODE)

    @classmethod
    def read(cls, folder: Path) -> RunAddress | None:
        """Read the address that the run in `folder` left; None if it does not run."""
        try:
            return msgspec.json.decode(read_regular(folder / FILE), type=cls)
        except (OSError, *UNREADABLE):
            return None

    @staticmethod
    def forget(folder: Path) -> None:
        (folder / FILE).unlink(missing_ok=True)


def find_run(run: str = "") -> Path:
    """Return the folder of `run`: a path, an id in `runs/` here, or if empty the newest run here.

    UsageError if there is none.
    """
    parent = Path(RunSection().dir)
    if run:
        for folder in (Path(run), parent / run):
            if (folder / "config.json").is_file():
                return folder.resolve()
        raise UsageError(
            f"{run} is no run: neither it nor {parent / run} is a folder with a config.json"
        )
    folders = [file.parent for file in parent.glob("*/config.json") if file.is_file()]
    return _newest(folders, f"no run is in {parent.resolve()}")


def find_address(run: str = "") -> RunAddress:
    """Return the address of `run` (see `find_run`), or if empty of the newest run under way here.

    UsageError if there is no such run, or it is over.
    """
    if run:
        folder = find_run(run)
    else:
        parent = Path(RunSection().dir)
        live = filter(is_held, parent.glob("*"))
        folder = _newest(live, f"no run in {parent.resolve()} is under way")
    running, address = is_held(folder), RunAddress.read(folder)
    if not running:  # the address of one that was killed may be there still
        state = f"not under way; `umbra up {folder}` resumes it if it has not reached its end"
    elif address is not None:
        return address
    elif (folder / "summary.json").exists():
        state = "ending: `umbra runs` says how"
    else:
        state = "starting: its buffer is not up yet; try again"
    raise UsageError(f"the run in {folder} is {state}")


def _newest(folders: Iterable[Path], otherwise: str) -> Path:
    def start_time(folder: Path) -> float:
        config = folder / "config.json"  # which a demo that makes its model lacks still
        return (config if config.is_file() else folder).stat().st_mtime

    if (newest := max(folders, key=start_time, default=None)) is None:
        remedy = "name a run's folder, or its buffer by --broker tcp://host:port"
        raise UsageError(f"{otherwise}: {remedy}")
    return newest.resolve()
