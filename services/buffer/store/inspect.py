"""What a store holds, for people: counts, the oldest items, one trajectory."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from umbra.proto.errors import UsageError
from umbra.proto.records import Score, Trajectory, unpack_float32, unpack_int32, with_score
from umbra.services.buffer.samples.trajectory_store import PREFIX as TRAJECTORY
from umbra.services.buffer.samples.trajectory_store import score_key
from umbra.services.buffer.store.head import read_head
from umbra.services.buffer.store.record_format import HEAD_BYTES
from umbra.services.buffer.store.segments import (
    Image,
    Replay,
    refuse_damage,
    segment_bytes,
    segment_numbers,
)

OLDEST = 10  # items shown
TRIES = 10  # of reading it while it changes
TOKENS = 24  # of a trajectory shown
KINDS = {
    "g/": "groups",
    "t/": "trajectories",
    "x/": "scores",
    "b/": "batches",
    "r/": "prompt rows",
    "p/": "groups for replay",
}


class StoreReader:
    """Reads a store without changing it, also while the buffer has it open.

    Raises:
        UsageError: there is no store.
        StoreError: it is damaged or foreign.
    """

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir() or not segment_numbers(directory):
            raise UsageError(f"{directory} holds no store: name the folder with the .seg files")
        self.directory = directory
        self.image: Image = _read(directory)
        refuse_damage(directory, self.image)

    def get(self, key: str) -> bytes | None:
        """The value of `key`; None if there is none."""
        place = self.image.places.get(key)
        if place is None:
            return None
        data = segment_bytes(self.directory, place.segment)[place.offset : place.end]
        name = len(key.encode())
        return bytes(data[len(data) - value_bytes(data, name) :])

    def read(self, key: str) -> Any:
        """The plain value of `key`."""
        value = self.get(key)
        return None if value is None else msgspec.msgpack.decode(value)

    def summary(self) -> dict[str, Any]:
        """Counts by state and the oldest samples in flight."""
        groups = [self.read(key) for key in self.image.places if key.startswith("g/g-")]
        in_batches = self._groups_in_batches()
        samples: list[dict[str, Any]] = []
        for group in groups:
            for sample in group["samples"]:
                if group["group_id"] in in_batches:
                    sample["state"] = "training"
                samples.append(sample | {"group": group["group_id"]})
        samples.sort(key=lambda sample: sample.get("serial", 0))
        run: dict[str, Any] = self.read("run") or {}
        now: dict[str, Any] = self.read("now") or {}
        run: dict[str, Any] = self.read("run") or {}
        kinds = Counter(KINDS.get(key[:2], "") for key in self.image.places)
        return {
            "run": run.get("run_id", ""),
            "bytes": sum(self.image.sizes.values()),
            "files": len(self.image.sizes),
            "commits": self.image.commit,
            "torn": "" if self.image.torn is None else str(self.image.torn),
            "finished": now.get("finished", ""),
            "version": now.get("version", 0),
            "checkpoint": now.get("checkpoint"),
            "issued": now.get("issued", 0),
            "trained": now.get("trained", 0),
            "ended": now.get("ended", {}),
            "in_flight": dict(Counter(s.get("state", "queued") for s in samples)),
            "kept": {name: kinds[name] for name in KINDS.values()},
            "oldest": [
                {
                    "sample": sample["sample_id"],
                    "group": sample["group"],
                    "state": sample.get("state", "queued"),
                    "attempt": sample.get("attempt", 0),
                    "holder": sample.get("holder", ""),
                }
                for sample in samples[:OLDEST]
            ],
        }

    def _groups_in_batches(self) -> set[str]:
        """The groups of the batches that are formed and not committed."""
        batches = [self.read(key) for key in self.image.places if key.startswith("b/")]
        return {g["group_id"] for batch in batches if batch["is_open"] for g in batch["groups"]}

    def trajectory(self, sample_id: str) -> dict[str, Any]:
        """One trajectory in readable form, with what has been found of it.

        Raises:
            UsageError: the store has none of that sample.
        """
        value = self.get(TRAJECTORY + sample_id)
        if value is None:
            raise UsageError(f"the store holds no trajectory of sample {sample_id!r}")
        found = msgspec.msgpack.decode(value, type=Trajectory)
        run: dict[str, Any] = self.read("run") or {}
        for stage in run.get("buffer.stages", ()):
            score = self.get(score_key(sample_id, stage))
            if score is not None:
                found = with_score(found, stage, msgspec.msgpack.decode(score, type=Score))
        first, *further = found.lines
        plain: dict[str, Any] = msgspec.to_builtins(first, builtin_types=(bytes,))
        plain |= _arrays(first)
        plain["branches"] = [
            _arrays(line) | {"spans": msgspec.to_builtins(line.spans)} for line in further
        ]
        return plain


def _arrays(line: Trajectory) -> dict[str, Any]:
    """The tokens of one line, and what is known of each."""
    plain: dict[str, Any] = {
        "prompt_ids": _short(unpack_int32(line.prompt_ids)),
        "response_ids": _short(unpack_int32(line.response_ids)),
        "loss_mask": _short(list(line.loss_mask)),
    }
    for name in ("logprobs", "ref_logprobs", "proximal_logprobs"):
        data: bytes | None = getattr(line, name)
        values = None if data is None else [round(v, 4) for v in unpack_float32(data)]
        plain[name] = None if values is None else _short(values)
    return plain


def _read(directory: Path) -> Image:
    """What is in the store; once more if a buffer has cleaned up meanwhile."""
    for _ in range(TRIES):
        with suppress(FileNotFoundError):
            image = Replay(directory, growing=True).run()
            if not image.damages or image.head == read_head(directory):
                return image
    return Replay(directory, growing=True).run()


def value_bytes(record: memoryview, key_bytes: int) -> int:
    """Length of the value in a record."""
    return len(record) - HEAD_BYTES - key_bytes


def _short(values: list[Any]) -> list[Any]:
    if len(values) <= TOKENS:
        return values
    return [*values[: TOKENS - 4], f"... {len(values)} in all ...", *values[-4:]]
