"""Addresses of runs on this machine: `umbra up` leaves its address in the run's folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
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
        DISK.replace(folder / FILE, json.dumps(asdict(self)).encode() + b"\n", mode=READABLE_MODE)

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

    Raises:
        UsageError: there is none; says where it was looked for.
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
    if (newest := max(folders, key=_start_time, default=None)) is None:
        raise UsageError(
            f"no run is in {parent.resolve()}: name a run's folder, or its buffer by "
            "--broker tcp://host:port"
        )
    return newest.resolve()


def find_address(run: str = "") -> RunAddress:
    """Return the address of `run` (see `find_run`), or if empty of the newest run under way here.

    Raises:
        UsageError: there is no such run, or it is over.
    """
    if run:
        folder = find_run(run)
    else:
        parent = Path(RunSection().dir)
        live = [folder for folder in parent.glob("*") if is_held(folder)]
        if not live:
            raise UsageError(
                f"no run in {parent.resolve()} is under way: name a run's folder, or its buffer by "
                "--broker tcp://host:port"
            )
        folder = max(live, key=_start_time).resolve()
    running, address = is_held(folder), RunAddress.read(folder)
    if not running:  # the address of one that was killed may be there still
        raise UsageError(
            f"the run in {folder} is not under way; `umbra up {folder}` resumes it if it has not "
            "reached its end"
        )
    if address is None:
        if (folder / "summary.json").exists():
            raise UsageError(f"the run in {folder} is ending: `umbra runs` says how")
        raise UsageError(f"the run in {folder} is starting: its buffer is not up yet; try again")
    return address


def _start_time(folder: Path) -> float:
    config = folder / "config.json"  # which a demo that makes its model lacks still
    return (config if config.is_file() else folder).stat().st_mtime
