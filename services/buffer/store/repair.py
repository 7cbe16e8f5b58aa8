"""Repair of a damaged store: what is sound goes into new files.

A buffer that starts on a repaired store names the samples, groups and batches that it lost.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from umbra.proto.errors import UsageError
from umbra.services.buffer.store.log import LogStore, store_lock
from umbra.services.buffer.store.records import value_of
from umbra.services.buffer.store.segments import Replay, segment_bytes, segment_numbers
from umbra.services.process.files import DISK

REPAIRED = "repaired"  # key that marks the store for the next start


def repair(directory: Path) -> list[str]:
    """Write all that is sound into new files, move the old ones aside; return lines for people.

    Raises:
        UsageError: there is no store.
        StoreError: it is in use, or of another schema.
    """
    if not directory.is_dir() or not segment_numbers(directory):
        raise UsageError(f"{directory} holds no store: name the folder with the .seg files")
    with store_lock(directory):
        image = Replay(directory, salvage=True).run()
        dropped = [f"dropped {damage}" for damage in image.damages]
        if image.torn is not None:
            dropped.append(f"dropped {image.torn} (a crash left it; it was never acknowledged)")
        if not dropped:
            return [f"nothing to repair: {len(image.places)} keys are sound"]
        fresh = directory.with_name(directory.name + ".repaired")
        shutil.rmtree(fresh, ignore_errors=True)  # of a repair that was broken off
        backup = _unused(directory.with_name(directory.name + ".damaged"))
        store = LogStore(fresh, store=image.store)
        for number in segment_numbers(directory):
            data = segment_bytes(directory, number)
            for key, place in image.places.items():
                if place.segment == number:
                    value = value_of(data[place.offset : place.end], key)
                    assert not isinstance(value, str)  # else it would have no place
                    store.put(key, bytes(value))
            store.commit()
        if image.damages:
            store.put(REPAIRED, b"\xc3")
            store.commit()
        store.close()
        DISK.rename(directory, backup)
        DISK.rename(fresh, directory)
        DISK.sync_directory(directory.parent)
    kept = f"kept {len(image.places)} keys; the files of before are in {backup}"
    return [*dropped, kept, "the buffer names what is lost with them when it starts"]


def _unused(path: Path) -> Path:
    number = 1
    while path.exists():
        number += 1
        path = path.with_name(f"{path.name.partition('-')[0]}-{number}")
    return path
