"""Small files are whole or as before whenever the power goes, and pins survive a killed hub."""

from __future__ import annotations

import os
import stat
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


KIB, SIZE = 1 << 10, LAYOUT.total_bytes


class Host:
    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        for name in ("MEMINFO", "CGROUP_LIMIT", "CGROUP_USED", "CGROUP_STATS"):
            patch.setattr(this_host, name, folder / name)

    def says(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text, encoding="ascii")

    def has(self, nbytes: int) -> None:
        self.says("MEMINFO", f"MemTotal: 1 kB\nMemAvailable: {nbytes // KIB} kB\n")


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path, monkeypatch)


def test_what_is_available_is_the_hosts_or_the_containers(host: Host) -> None:
    assert this_host.available_bytes() == this_host.host_bytes(), "nothing says more"
    host.has(1000 * KIB)
    assert this_host.available_bytes() == 1000 * KIB
    host.says("CGROUP_LIMIT", "max\n")
    host.says("CGROUP_USED", str(5000 * KIB))
    assert this_host.available_bytes() == 1000 * KIB, "no limit"
    host.says("CGROUP_LIMIT", f"{1200 * KIB}\n")
    host.says("CGROUP_USED", str(900 * KIB))
    assert this_host.available_bytes() == 300 * KIB
    host.says("CGROUP_STATS", f"anon 7\ninactive_file {200 * KIB}\n")
    assert this_host.available_bytes() == 500 * KIB, "cached files make room"
    host.says("CGROUP_USED", str(9000 * KIB))
    assert this_host.available_bytes() == 0


def test_staging_is_refused_before_memory_is_taken(host: Host) -> None:
    host.has(SIZE - KIB)
    planes = StagedPlanes(["tcp"], allocate=lambda _size: pytest.fail("taken"))
    with pytest.raises(StartupError, match=r'are free here: set weight_hub.dtype = "bfloat16"'):
        planes.open(Subscribed(manifest=LAYOUT, plane="tcp", path=""), OPEN)


def test_an_arena_is_refused_before_memory_is_taken(
    host: Host, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.posix_fallocate", lambda *_: pytest.fail("taken"))
    host.has(2 * SIZE - KIB)
    with pytest.raises(StartupError, match=r"slots of the weights .*set weight_hub.slots = 2"):
        Arena.create(run_id, "a", slot_bytes=SIZE, slots=2)
    assert not list(Path("/dev/shm").glob(f"umbra-{run_id}-*"))
    with pytest.raises(StartupError, match=r"slots of the weights .*set weight_hub.slots = 2"):
        Arena.anonymous(slot_bytes=SIZE, slots=2)
