"""Memory of a version: copies that let other threads go on, and how long its bytes may take."""

import os
import random
import sys
import threading
from mmap import PAGESIZE
from pathlib import Path
from types import SimpleNamespace

import pytest

from umbra.proto.deadline import Pace
from umbra.proto.errors import StartupError
from umbra.services.config import WeightHubConfig
from umbra.services.modeling.model_directory import weights_bytes
from umbra.services.weights import memory
from umbra.services.weights.memory import (
    TRIM_S,
    HeapTrimmer,
    MappedBlocks,
    copy,
    locate,
    private_memory,
    shared_memory,
)


@pytest.mark.parametrize("size", [0, 1, PAGESIZE + 7])
def test_a_copy_has_the_bytes_of_its_source_which_have_to_fit(size: int) -> None:
    source, target = random.Random(size).randbytes(size), bytearray(size + 2)
    for kind in (source, memoryview(bytearray(source))):
        target[:] = bytes(size + 2)
        copy(kind, memoryview(target)[1 : size + 1])
        assert bytes(target) == b"\0" + source + b"\0"
    for room in {abs(size - 1), size + 1}:
        with pytest.raises(ValueError, match=f"{size} bytes do not fill {room}"):
            copy(source, memoryview(bytearray(room)))
    with pytest.raises(TypeError):
        copy(bytes(4), memoryview(bytes(4)))


def test_shared_memory_is_found_by_its_place_and_mapped_once() -> None:
    block, blocks = shared_memory(3 * PAGESIZE), MappedBlocks()
    assert locate(private_memory(PAGESIZE)) is None and locate(block[:0]) is None
    place = locate(block[PAGESIZE:])
    assert place is not None and place[1] == PAGESIZE and locate(block) == (place[0], 0)
    block[-1] = 7
    view = blocks.view(place[0])
    assert view[-1] == 7 and len(view) == len(block) and blocks.view(place[0]) is view
    fd = int(place[0].rpartition("/")[2])
    other = os.memfd_create("other")
    os.ftruncate(other, 8)
    own = os.dup(fd)
    os.dup2(other, fd)  # the number of a closed file is given to the next one
    assert len(blocks.view(place[0])) == 8
    os.dup2(own, fd)
    os.close(own)
    os.close(other)
    del block, view
    with pytest.raises(StartupError, match="staging memory"):
        MappedBlocks().view(place[0])


def test_heaps_are_trimmed_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    trimmer, trims, clock = HeapTrimmer(), list[int](), iter([0.0, 0.5, 0.5, 0.5])
    trimmer._trim = trims.append
    monkeypatch.setattr(memory, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    due = 5.0 + 500.0  # it took half a second
    for now in (5.0, due - 1, due, due + TRIM_S - 1, due + TRIM_S):
        if now == due + TRIM_S:
            trimmer._trim = None  # no glibc
        trimmer.give_back(now)
    assert trims == [0, 0]


def test_other_threads_run_during_a_copy() -> None:
    source = memoryview(bytearray(b"x" * (64 << 20)))

    def seen_half_done() -> bool:
        into = memoryview(bytearray(len(source)))
        copying = threading.Thread(target=copy, args=(source, into))
        copying.start()
        ends = {0}
        while ends == {0}:  # until a part is there
            os.sched_yield()
            ends = {into[PAGESIZE], into[-PAGESIZE]}
        copying.join()
        return 0 in ends

    interval = sys.getswitchinterval()
    sys.setswitchinterval(100.0)  # nobody is made to let go of the interpreter
    try:
        # More than once, since on a busy machine a copy may end before we get a core.
        assert any(seen_half_done() for _ in range(50))
    finally:
        sys.setswitchinterval(interval)


def test_whatever_moves_a_version_may_take_the_longer_the_more_bytes_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first one the model is read, two slots are made, it is written and brought."""
    pace = Pace(30.0, least_rate=5.0)
    limits = pace.limit_s(0), pace.limit_s(500), pace.limit_s(500, parts=4)
    assert (*limits, pace.after(1.0).limit_s(1000)) == (30.0, 130.0, 32.5, 201.0)
    (tmp_path / "a.safetensors").write_bytes(bytes(30))
    (tmp_path / "b.safetensors").write_bytes(bytes(20))
    (tmp_path / "tokenizer.json").write_bytes(bytes(1000))
    monkeypatch.setattr(WeightHubConfig, "least_rate", 10.0)
    config = WeightHubConfig(slots=2, deadline_s=2.0)
    assert config.pace.limit_s(50) == 7.0
    assert config.first_version_s(weights_bytes(tmp_path)) == 600.0 + 5 * 5.0
    assert config.first_version_s(weights_bytes(tmp_path / "none")) == 600.0
