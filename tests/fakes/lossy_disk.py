"""A disk that forgets, when the power goes, whatever it need not keep.

It works on real files and records the operations on them. `after` then makes the folder as it may
be found when the power went after any number of these steps: of a file, what was synced, and of
what was written since any part; of a folder, the names that were synced, and of the changes since
any subset. A subset is drawn for each seed; two of them are the extremes.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from umbra.services.process.files import FILE_MODE, Disk

NOTHING, ALL = -1, -2  # seeds: only what was synced survives; all does
SECTOR = 512  # bytes that a disk writes as one


@dataclass
class File:
    data: bytes = b""
    since: list[tuple[int, bytes | None]] = field(default_factory=list[tuple[int, "bytes | None"]])

    def sync(self) -> None:
        data = bytearray(self.data)
        for offset, written in self.since:
            _apply(data, offset, written)
        self.data, self.since = bytes(data), []

    def survivor(self, chance: random.Random | None) -> bytes:
        """As it may be found; None keeps nothing that was not synced."""
        data = bytearray(self.data)
        for offset, written in self.since if chance else []:
            assert chance is not None
            if written is None:
                if chance.random() < 0.5:
                    _apply(data, offset, None)
                continue
            ends = range(0, len(written) + 2 * SECTOR, SECTOR)  # any sectors that follow each other
            first, last = sorted(chance.choices(ends, k=2))
            if written[first:last]:
                _apply(data, offset + first, written[first:last])
        return bytes(data)


def _apply(data: bytearray, offset: int, written: bytes | None) -> None:
    if written is None:
        del data[offset:]
        return
    if len(data) < offset:
        data.extend(bytes(offset - len(data)))
    data[offset : offset + len(written)] = written


@dataclass
class Folder:
    """The names that the disk has for certain, and the changes since, each done as a whole."""

    names: dict[str, Node] = field(default_factory=dict[str, "Node"])
    since: list[dict[str, Node | None]] = field(default_factory=list[dict[str, "Node | None"]])

    def now(self) -> dict[str, Node]:
        return _changed(self.names, self.since)

    def sync(self) -> None:
        self.names, self.since = self.now(), []

    def survivor(self, chance: random.Random | None) -> dict[str, Node]:
        return _changed(self.names, [c for c in self.since if chance and chance.random() < 0.5])


def _changed(names: dict[str, Node], changes: list[dict[str, Node | None]]) -> dict[str, Node]:
    merged: dict[str, Node | None] = {**names}
    for change in changes:
        merged |= change
    return {name: node for name, node in merged.items() if node is not None}


Node: TypeAlias = File | Folder
Names: TypeAlias = dict[str, Node]
Step: TypeAlias = tuple[str, Callable[[Folder], object]]


class QuickDisk(Disk):
    """One that waits for nothing: the power does not go in the test that uses it."""

    def sync(self, fd: int) -> None:
        """Nothing to wait for."""

    def sync_directory(self, path: Path) -> None:
        """Nothing to wait for."""


class LossyDisk(QuickDisk):
    """Recorder of all operations below `root`; files that are there at first count as synced."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.steps: list[Step] = []
        self._first = _read(root)

    def after(self, steps: int, target: Path, seed: int) -> None:
        """Make `target` the folder that is found if the power fails after so many steps."""
        tree = copy.deepcopy(self._first)
        for _, step in self.steps[:steps]:
            step(tree)
        if seed == ALL:
            _sync_all(tree)
        _write(tree, target, None if seed == NOTHING else random.Random(seed))

    def open(self, path: Path, *, new: bool = False, mode: int = FILE_MODE) -> int:
        there = path.exists()
        fd = super().open(path, new=new, mode=mode)
        if not there:
            self._rename("create", path, lambda _: {path.name: File()})
        return fd

    def write(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        count = super().write(fd, data, offset)
        self._change(fd, offset, bytes(data[:count]))
        return count

    def truncate(self, fd: int, size: int) -> None:
        super().truncate(fd, size)
        self._change(fd, size, None)

    def sync(self, fd: int) -> None:
        path = _path(fd)
        self.steps.append(("sync", lambda tree: self._at(tree, path).sync()))

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        assert new.parent == old.parent, "a rename within one folder is one change"
        self._rename("rename", old, lambda names: {old.name: None, new.name: names[old.name]})

    def remove(self, path: Path) -> None:
        super().remove(path)
        self._rename("remove", path, lambda _: {path.name: None})

    def make_folder(self, path: Path) -> None:
        super().make_folder(path)
        self._rename("folder", path, lambda _: {path.name: Folder()})

    def remove_folder(self, path: Path) -> None:
        super().remove_folder(path)
        self._rename("remove", path, lambda _: {path.name: None})

    def sync_directory(self, path: Path) -> None:
        self.steps.append(("names", lambda tree: self._at(tree, path).sync()))

    def _change(self, fd: int, offset: int, data: bytes | None) -> None:
        path = _path(fd)

        def step(tree: Folder) -> None:
            file = self._at(tree, path)
            assert isinstance(file, File)
            file.since.append((offset, data))

        self.steps.append(("write", step))

    def _rename(
        self, what: str, path: Path, change: Callable[[Names], dict[str, Node | None]]
    ) -> None:
        def step(tree: Folder) -> None:
            folder = self._at(tree, path.parent)
            assert isinstance(folder, Folder)
            folder.since.append(change(folder.now()))

        self.steps.append((what, step))

    def _at(self, tree: Folder, path: Path) -> Node:
        node: Node = tree
        for name in path.relative_to(self.root).parts:
            assert isinstance(node, Folder)
            node = node.now()[name]
        return node


def _sync_all(node: Node) -> None:
    node.sync()
    if isinstance(node, Folder):
        for inner in node.names.values():
            _sync_all(inner)


def power_cuts(disk: LossyDisk, places: Path, seeds: int) -> Iterator[tuple[int, Path]]:
    """Every step with folders that may be found after it: the extremes, and `seeds` others."""
    for step in range(len(disk.steps) + 1):
        for seed in (NOTHING, ALL, *range(seeds)):
            place = places / f"{step}-{seed}"
            disk.after(step, place, seed if seed < 0 else 1000 * step + seed)
            yield step, place


def _path(fd: int) -> Path:
    return Path(os.readlink(f"/proc/self/fd/{fd}"))


def _read(path: Path) -> Folder:
    names: dict[str, Node] = {}
    for entry in path.iterdir():
        names[entry.name] = _read(entry) if entry.is_dir() else File(entry.read_bytes())
    return Folder(names)


def _write(folder: Folder, target: Path, chance: random.Random | None) -> None:
    target.mkdir(parents=True)
    for name, node in folder.survivor(chance).items():
        if isinstance(node, Folder):
            _write(node, target / name, chance)
        else:
            (target / name).write_bytes(node.survivor(chance))
