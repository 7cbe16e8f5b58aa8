"""Files are whole or as before when the power goes; memory is refused before it is taken."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from fakes.hub_bench import LAYOUT
from fakes.lossy_disk import LossyDisk, power_cuts

from umbra.proto.errors import StartupError
from umbra.proto.messages import Subscribed
from umbra.proto.net.keys import OPEN
from umbra.services.process import host as this_host
from umbra.services.process.files import DISK, Disk
from umbra.services.weights.arena import Arena
from umbra.services.weights.planes.receiving import StagedPlanes


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
    assert sorted(synced[:-1]) == ["a", "b", "inner"] and synced[-1] == "model"


def test_what_is_kept_is_its_owners_and_a_write_that_is_cut_short_goes_on(tmp_path: Path) -> None:
    class Slow(Disk):
        def write(self, fd: int, data: bytes | memoryview, offset: int) -> int:
            return super().write(fd, data[:3], offset)

    with Slow().opened(tmp_path / "file") as fd:
        Slow().write_all(fd, b"0123456789", 2)
    assert (tmp_path / "file").read_bytes() == b"\0\0" + b"0123456789"
    DISK.replace(tmp_path / "other", b"x")
    DISK.make_folders(tmp_path / "folder")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"file": 0o600, "other": 0o600, "folder": 0o700}


KIB, SIZE = 1 << 10, LAYOUT.total_bytes
Says = Callable[[str, str], object]


@pytest.fixture
def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Says:
    """Write one of the kernel's files about memory."""
    for name in ("MEMINFO", "CGROUP_LIMIT", "CGROUP_USED", "CGROUP_STATS"):
        monkeypatch.setattr(this_host, name, tmp_path / name)
    return lambda name, text: (tmp_path / name).write_text(text, encoding="ascii")


def meminfo(nbytes: int) -> str:
    return f"MemTotal: 1 kB\nMemAvailable: {nbytes // KIB} kB\n"


def test_what_is_available_is_the_hosts_or_the_containers(says: Says) -> None:
    assert this_host.available_bytes() == this_host.host_bytes(), "nothing says more"
    for name, text, free, why in (
        ("MEMINFO", meminfo(1000 * KIB), 1000, "the host's"),
        ("CGROUP_LIMIT", "max\n", 1000, "no limit"),
        ("CGROUP_USED", f"{900 * KIB}\n", 1000, "no limit"),
        ("CGROUP_LIMIT", f"{1200 * KIB}\n", 300, "the container's"),
        ("CGROUP_STATS", f"anon 7\ninactive_file {200 * KIB}\n", 500, "cached files make room"),
        ("CGROUP_USED", f"{9000 * KIB}\n", 0, "too much is used"),
    ):
        says(name, text)
        assert this_host.available_bytes() == free * KIB, why


def test_memory_is_refused_before_it_is_taken(
    says: Says, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    says("MEMINFO", meminfo(SIZE - KIB))
    planes = StagedPlanes(["tcp"], allocate=lambda _size: pytest.fail("taken"))
    with pytest.raises(StartupError, match=r'are free here: set weight_hub.dtype = "bfloat16"'):
        planes.open(Subscribed(manifest=LAYOUT, plane="tcp", path=""), OPEN)
    monkeypatch.setattr("os.posix_fallocate", lambda *_: pytest.fail("taken"))
    says("MEMINFO", meminfo(2 * SIZE - KIB))
    for make in (partial(Arena.create, run_id, "a"), Arena.anonymous):
        with pytest.raises(StartupError, match=r"slots of the weights .*set weight_hub.slots = 2"):
            make(slot_bytes=SIZE, slots=2)
    assert not list(Path("/dev/shm").glob(f"umbra-{run_id}-*"))
