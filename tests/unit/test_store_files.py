"""Whatever is done to the files of a store by hand is noticed and named, or loses nothing."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from fakes.lossy_disk import QuickDisk

from umbra.services.buffer.service import open_store
from umbra.services.buffer.store.api import StoreError
from umbra.services.buffer.store.log import LogStore
from umbra.services.buffer.store.mark import NAME as MARK
from umbra.services.buffer.store.mark import open_marked, refuse_marked
from umbra.services.buffer.store.repair import repair
from umbra.services.buffer.store.segments import HEAD, segment_name, segment_numbers, segment_path
from umbra.services.config import BufferConfig, RunConfig
from umbra.services.process.command import ServiceContext

SMALL = 2048  # bytes of a segment here


def contents(store: LogStore) -> dict[str, bytes]:
    """Everything in the store."""
    return {key: bytes(store.get(key)) for key in store.keys("")}


def filled(folder: Path, *, first: int = 0, commits: int = 100) -> dict[str, bytes]:
    """A store of several segments, of which the first are gone; what is in it."""
    store = LogStore(folder, segment_bytes=SMALL, disk=QuickDisk())
    for number in range(first, first + commits):
        store.put(f"a{number % 40}", bytes([number % 251]) * 150)
        store.commit()
    held = contents(store)
    store.close()
    return held


Change = Callable[[Path], None]


def removed(path: Path) -> None:
    path.unlink()


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def header_only(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:52])


def zeroed(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def cut_by_a_byte(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def cut_by_a_group(path: Path) -> None:
    """At a boundary: every record that is left is sound."""
    data = path.read_bytes()
    path.write_bytes(data[: data.rindex(b"\xf5uR\xfa")])


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def of_another_store(path: Path) -> None:
    other = path.parent.with_name("other")
    filled(other)
    shutil.copy(other / path.name, path)


CHANGES = (removed, emptied, header_only, zeroed, cut_by_a_byte, cut_by_a_group, flipped,
           of_another_store)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("which", ["oldest", "middle", "newest"])
def test_a_changed_segment_is_refused_by_name(tmp_path: Path, which: str, change: Change) -> None:
    folder = tmp_path / "store"
    filled(folder)
    numbers = segment_numbers(folder)
    assert numbers[0] > 0, "the first segments were cleaned up"
    number = {"oldest": numbers[0], "middle": numbers[2], "newest": numbers[-1]}[which]
    change(segment_path(folder, number))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(StoreError, match=rf"damaged: {segment_name(number)}.*--repair"):
        LogStore(folder, segment_bytes=SMALL)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before, "it was changed"


@pytest.mark.parametrize("change", [removed, emptied, zeroed, of_another_store])
def test_a_changed_head_is_refused_by_name(tmp_path: Path, change: Change) -> None:
    filled(tmp_path / "store")
    change(tmp_path / "store" / HEAD)
    with pytest.raises(StoreError, match=r"damaged: (head|.*another store).*--repair"):
        LogStore(tmp_path / "store")


def test_a_head_of_earlier_is_refused_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    filled(folder, commits=20)
    shutil.copy(folder / HEAD, tmp_path / HEAD)
    filled(folder, first=20, commits=2)
    shutil.copy(tmp_path / HEAD, folder / HEAD)
    with pytest.raises(StoreError, match="head: it is older than the segments"):
        LogStore(folder)


def test_swapped_segments_are_refused_by_name(tmp_path: Path) -> None:
    filled(tmp_path)
    first, second, *_ = (segment_path(tmp_path, number) for number in segment_numbers(tmp_path))
    first.rename(tmp_path / "x")
    second.rename(first)
    (tmp_path / "x").rename(second)
    with pytest.raises(StoreError, match=f"damaged: {first.name}.*it says that it is segment"):
        LogStore(tmp_path)


def test_a_segment_that_was_copied_is_refused_by_name(tmp_path: Path) -> None:
    filled(tmp_path)
    numbers = segment_numbers(tmp_path)
    for number in (numbers[-1] + 1, numbers[-1] + 7):
        copied = segment_path(tmp_path, number)
        shutil.copy(segment_path(tmp_path, numbers[0]), copied)
        with pytest.raises(StoreError, match=f"{copied.name}.*"):
            LogStore(tmp_path)
        copied.unlink()
    LogStore(tmp_path).close()


def test_a_segment_of_earlier_is_refused_by_name(tmp_path: Path) -> None:
    """A copy of the newest one from before its last groups, with the head that it has now."""
    folder = tmp_path / "store"
    filled(folder, commits=40)
    newest = segment_numbers(folder)[-1]
    shutil.copy(segment_path(folder, newest), tmp_path / "copy")
    filled(folder, first=40, commits=1)
    shutil.copy(tmp_path / "copy", segment_path(folder, newest))
    with pytest.raises(StoreError, match=f"{segment_name(newest)}.*acknowledged"):
        LogStore(folder)


def test_a_store_that_went_another_way_is_refused_by_name(tmp_path: Path) -> None:
    """Two copies of a store went on apart: a segment of one has no place in the other."""
    folder, fork = tmp_path / "store", tmp_path / "fork"
    filled(folder, commits=12)
    shutil.copytree(folder, fork)
    for place, first in ((folder, 12), (fork, 13)):
        filled(place, first=first, commits=40)
    middle = segment_numbers(folder)[-2]
    shutil.copy(segment_path(fork, middle), segment_path(folder, middle))
    with pytest.raises(StoreError, match=rf"0000000[{middle}{middle + 1}].seg.*"):
        LogStore(folder)


def test_what_does_not_count_any_more_may_lie_about(tmp_path: Path) -> None:
    """The power went before the name of a cleaned file was gone from the disk."""
    folder = tmp_path / "store"
    filled(folder, commits=1)
    first = segment_path(folder, 0)
    shutil.copy(first, tmp_path / "copy")
    held = filled(folder, first=1)
    assert not first.exists()
    shutil.copy(tmp_path / "copy", first)
    store = LogStore(folder)
    assert contents(store) == held
    assert not first.exists()
    store.close()


@pytest.mark.parametrize("change", [removed, emptied, cut_by_a_group])
def test_a_repair_keeps_what_is_sound_and_the_store_goes_on(tmp_path: Path, change: Change) -> None:
    folder = tmp_path / "store"
    held = filled(folder)
    store = LogStore(folder)
    name = store.id
    store.close()
    numbers = segment_numbers(folder)
    change(segment_path(folder, numbers[-2]))
    mended = repair(folder)
    assert any(segment_name(numbers[-2]) in line for line in mended)
    store = LogStore(folder)
    found = contents(store)
    found.pop("repaired")
    assert found
    assert set(found) <= set(held)  # of a key whose newest value is gone an older one may be there
    assert store.id == name
    store.close()


# -- the run that has it --------------------------------------------------------------------------


def begun(run: Path) -> str:
    """A run with a store; the id of that."""
    run.mkdir()
    store = open_marked(run, run / "store")
    store.put("k", b"v")
    store.commit()
    store.close()
    return store.id


def all_removed(store: Path) -> None:
    shutil.rmtree(store)


def all_emptied(store: Path) -> None:
    for path in store.iterdir():
        path.unlink()


def replaced(store: Path) -> None:
    shutil.rmtree(store)
    filled(store)


@pytest.mark.parametrize("change", [all_removed, all_emptied, replaced])
def test_a_run_does_not_begin_anew_in_silence(tmp_path: Path, change: Change) -> None:
    run = tmp_path / "run"
    name = begun(run)
    change(run / "store")
    with pytest.raises(StoreError, match=rf"has the store {name} in .*, but .*bring it back"):
        open_marked(run, run / "store")
    assert not list((run / "store").glob("00000000.seg")) or change is replaced


def test_a_run_with_a_store_does_not_go_on_without(tmp_path: Path) -> None:
    begun(tmp_path / "run")
    with pytest.raises(StoreError, match="memory"):
        refuse_marked(tmp_path / "run")
    refuse_marked(tmp_path)
    refuse_marked(None)


def test_the_buffer_asks_for_the_store_of_its_run(tmp_path: Path) -> None:
    """As `umbra buffer --run-dir` opens it."""
    run = tmp_path / "run"
    begun(run)

    def context(store: str = "") -> ServiceContext:
        config = RunConfig(buffer=BufferConfig(store=store))
        fake = SimpleNamespace(config=config, run_dir=run, log=logging.getLogger("test"))
        return cast(ServiceContext, fake)

    open_store(context()).close()
    with pytest.raises(StoreError, match="memory"):
        open_store(context("memory"))
    with pytest.raises(StoreError, match="holds none"):
        open_store(context(str(tmp_path / "elsewhere")))
    shutil.rmtree(run / "store")
    with pytest.raises(StoreError, match="bring it back"):
        open_store(context())


def test_a_store_may_move(tmp_path: Path) -> None:
    run = tmp_path / "run"
    begun(run)
    (run / "store").rename(tmp_path / "elsewhere")
    store = open_marked(run, tmp_path / "elsewhere")
    assert store.get("k") == b"v"
    store.close()
    assert str(tmp_path / "elsewhere") in (run / MARK).read_text()


@pytest.mark.parametrize("change", [removed, emptied])
def test_the_mark_itself_is_written_anew_or_refused(tmp_path: Path, change: Change) -> None:
    run = tmp_path / "run"
    begun(run)
    change(run / MARK)
    if change is emptied:
        with pytest.raises(StoreError, match=r"store\.json.*cannot be read.*written anew"):
            open_marked(run, run / "store")
        return
    open_marked(run, run / "store").close()
    assert (run / MARK).exists()
