"""Small files are whole or as before whenever the power goes, and pins survive a killed hub."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from fakes.lossy_disk import LossyDisk, power_cuts

from umbra.services.process.files import DISK, Disk


def test_a_replaced_file_is_whole_or_as_before(tmp_path: Path) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    disk = LossyDisk(root)
    told: list[tuple[int, bytes]] = [(0, b"")]
    for text in (b"first", b"x" * 3000, b"short"):
        disk.replace(root / "file", text)
        told.append((len(disk.steps), text))
    for step, place in power_cuts(disk, tmp_path, seeds=4):
        path = place / "file"
        found = path.read_bytes() if path.exists() else b""
        last = max(n for n, (at, _) in enumerate(told) if at <= step)
        assert found in [text for _, text in told[last : last + 2]]


def test_a_tree_that_was_synced_is_there(tmp_path: Path) -> None:
    """Its files were written by somebody else, here a library that saves models."""
    synced: list[str] = []

    class Noting(Disk):
        def sync(self, fd: int) -> None:
            synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)

        def sync_directory(self, path: Path) -> None:
            synced.append(path.name)

    (tmp_path / "model" / "inner").mkdir(parents=True)
    for name in ("a", "inner/b"):
        (tmp_path / "model" / name).write_bytes(b"x")
    Noting().sync_tree(tmp_path / "model")
    assert sorted(synced) == ["a", "b", "inner", "model"]
    assert synced[-1] == "model"


def test_what_is_kept_is_its_owners(tmp_path: Path) -> None:
    DISK.replace(tmp_path / "file", b"x")
    DISK.make_folders(tmp_path / "folder")
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "folder").stat().st_mode) == 0o700


def test_a_write_that_is_cut_short_goes_on(tmp_path: Path) -> None:
    class Slow(Disk):
        def write(self, fd: int, data: bytes | memoryview, offset: int) -> int:
            return super().write(fd, data[:3], offset)

    with Slow().opened(tmp_path / "file") as fd:
        Slow().write_all(fd, b"0123456789", 2)
    assert (tmp_path / "file").read_bytes() == b"\0\0" + b"0123456789"
