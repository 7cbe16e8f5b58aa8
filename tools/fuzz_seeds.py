"""Inputs to begin with, and changes to the values of a message instead of to its bytes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import msgspec
from fakes.broker_world import trajectory
from fakes.costly_frames import costly_bodies
from fakes.hostile_peer import header_of
from fuzz_targets import (
    NAMES,
    ROLES,
    TARGETS,
    broker,
    chat,
    difference,
    envelope,
    feed,
    files,
    layout,
    message,
    pieces,
    planes,
    records,
    sound_trajectory,
    store,
    tool_calls,
)

from umbra.proto.messages import (
    TYPES,
    CommitBatch,
    Event,
    LeaseBatch,
    LeaseSamples,
    Message,
    RegisterManifest,
    ReturnedSample,
    ReturnSamples,
    SubmitTrajectories,
)
from umbra.proto.records import SampleTask
from umbra.services.weights import delta
from umbra.services.weights.manifest import build_manifest

GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "golden" / "frames.json"
SMALL = 600  # bytes of a message to begin with
VALUES: tuple[Any, ...] = (
    None, True, 0, 1, -1, 7, 127, 128, 255, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 53, (1 << 63) - 1,
    -(1 << 63), (1 << 64) - 1, 0.0, -0.5, 1e9, 1e308, float("inf"), float("nan"), "", "a", "s-1",
    "s-2", "g-0", "1", "generator", "ready", "stop", "a\nb", "\x1b[2J", "\u2028", "x" * 300, b"",
    b"\0" * 4, b"\1\1", b"\xff" * 8, [], [[]], {}, {"a": 1},
)  # fmt: skip
DEEP = b"[" * 2000
_PUSH: dict[str, Any] = dict.fromkeys(
    ("snapshot_s", "wire_s", "stage_s", "commit_s", "total_s"), 0.5
)
_SAMPLE: dict[str, Any] = {
    "sample": "s-1", "prompt_id": "1", "reward": 1.0, "seconds": 2.0, "tokens": 3, "turns": 1,
    "versions": [1, 2], "finish_reason": "stop",
}  # fmt: skip
_ROLLOUT: dict[str, Any] = {
    "step": 3, "sample": "s-1", "prompt_id": "1", "reward": 1.0, "reward_parts": {"a": 1.0},
    "tokens": 3, "turns": 1, "finish_reason": "stop", "staleness": 1, "prompt": "a",
    "response": "b", "pieces": [[1, 3, 1]],
}  # fmt: skip
EVENTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("push", _PUSH | {"version": 3, "bytes": 7, "receiver": "a", "plane": "tcp"}),
    ("sample", _SAMPLE | {"prompt": "a", "response": "b"}),
    ("slow_sample", _SAMPLE),
    ("spans", {"spans": [["update", 1.0, 2.0]]}),
    ("rollout", _ROLLOUT),
)
FILES = (
    '[{"version":1,"sums":[1,2],"slot":0}]\n',
    '{"step":4,"run":"r","saved_at":1.0,"config":{},"metrics":{},"tensors":{},"files":[]}',
    '{"store":"1f","folder":"store"}',
    '{"kind":"span","name":"a"}\n{"prompt":"a"}\n',
    "[" * 2000,
)
SAMPLES = [
    SampleTask(
        sample_id=f"s-{n}", group_id=f"g-{n // 2}", prompt_id=str(n // 2 + 1), attempt=1, row={},
        lease_s=1.0,
    )
    for n in range(4)
]  # fmt: skip


def seeds() -> Iterator[bytes]:
    """Sound inputs of all targets."""
    for target, inputs in _seeds().items():
        for one in inputs:
            yield bytes([TARGETS.index(target)]) + one


def _seeds() -> dict[Callable[[bytes], None], list[bytes]]:
    golden = {
        name: [bytes.fromhex(frame) for frame in frames]
        for name, frames in json.loads(GOLDEN.read_text(encoding="utf-8")).items()
    }
    bodies = {
        name: [golden[name][1], *(one for one in costly_bodies(TYPES[name], SMALL))]
        for name in NAMES
    }
    sound = [
        msgspec.msgpack.encode(trajectory(SAMPLES[0], *versions)) for versions in ((0,), (0, 1, 1))
    ]
    record = bytes([9, 3, 0, 1]) + b"t/avalue" + bytes([7, 0, 3, 1]) + b"\x92\xa2tt\xa1a" + b"x"
    return {
        message: [
            bytes([NAMES.index(name)]) + one for name, some in bodies.items() for one in some
        ],
        envelope: [_framed([header_of(name), bodies[name][0]]) for name in NAMES],
        sound_trajectory: sound,
        layout: [msgspec.msgpack.encode(RegisterManifest(manifest=_manifest(n))) for n in (1, 4)],
        difference: [bytes([64]) + one for one in _deltas()],
        planes: [bytes([16, kinds, 3, 0, 3]) + bytes(range(40)) for kinds in (0, 1, 5, 21, 42)],
        pieces: [bytes([4, 3, 0, 255, 5, 3, 0, 255, 6, 3, 0, 7]), bytes([4, 5, 1, 9])],
        records: [record, record * 3],
        store: [bytes([0, 0, 9, flags]) + record * 2 for flags in (1, 3, 9, 25, 31)],
        feed: [msgspec.msgpack.encode(Event(kind=kind, fields=fields)) for kind, fields in EVENTS],
        files: [one.encode() for one in FILES],
        chat: [
            DEEP,
            b'{"messages":[{"role":"user","content":"a"}],"max_tokens":5,"n":1}',
            b'{"prompt":"a","stream":true,"temperature":1.0,"stop":["</s>"]}',
            b'{"messages":[{"role":"assistant","tool_calls":[{"id":"1","function":{"name":"f","arguments":"{}"}}]}]}',
        ],
        tool_calls: [DEEP, b'{"name": "f", "arguments": {"a": 1}}', b"<tool_call>x</tool_call>"],
        broker: [
            _told(_day()),
            _told(_day()[:3]),
            *(
                _told([("generator", TYPES[name], body)])
                for name, some in bodies.items()
                for body in some[:1]
            ),
        ],
    }


def _framed(frames: list[bytes]) -> bytes:
    return b"".join(bytes([min(255, len(one))]) + one[:255] for one in frames)


def _manifest(tensors: int) -> Any:
    named = [(f"t{n}", "BF16", (4, 8)) for n in range(tensors)]
    owners = {name: [(n, 0), (3, 1), (4, 2)] for n, (name, _, _) in enumerate(named[:3])}
    return build_manifest(named, 128, owners if tensors > 1 else None)


def _deltas() -> Iterator[bytes]:
    for item, step in ((2, 3), (4, 50), (2, 400)):
        old, new = (memoryview(bytearray(1024)) for _ in range(2))
        new[:: step * item] = bytes([1]) * len(new[:: step * item])
        made = delta.advance(old, new, item, 1024, delta.compressor())
        if made is not None:
            yield made


def _day() -> list[tuple[str, type[Message], bytes]]:
    """What members of a run say to the broker."""
    made = [trajectory(sample, 0) for sample in SAMPLES]
    back = ReturnedSample(sample_id="s-3", attempt=1, reason="x", failed=True)
    said: list[tuple[str, Message]] = [
        ("generator", LeaseSamples(capacity=4, version=0, wait_s=0.0)),
        ("generator", SubmitTrajectories(trajectories=made[:3])),
        ("generator", ReturnSamples(samples=[back])),
        ("generator", SubmitTrajectories(trajectories=made[2:])),
        ("trainer", LeaseBatch(step=1, wait_s=0.0)),
        ("trainer", LeaseBatch(step=1, wait_s=0.0)),
        ("trainer", CommitBatch(step=1)),
    ]
    return [(name, type(body), msgspec.msgpack.encode(body)) for name, body in said]


def _told(said: list[tuple[str, type[Message], bytes]]) -> bytes:
    return b"".join(
        bytes([ROLES.index(name), NAMES.index(kind.__name__), len(body) & 255, len(body) >> 8])
        + body
        for name, kind, body in said
        if len(body) < 2048
    )


def change(data: bytes, chance: random.Random) -> bytes | None:
    """`data` with another value somewhere in a message that it holds; None if it holds none."""
    if len(data) < 3:
        return None
    target = TARGETS[data[0] % len(TARGETS)]
    if target is message:
        begin, end = 2, len(data)
    elif target in (sound_trajectory, layout, feed):
        begin, end = 1, len(data)
    elif target is broker:
        begin, end = _one_of(data, chance)
    else:
        return None
    try:
        value = msgpack.unpackb(data[begin:end], strict_map_key=False)
        for _ in range(chance.randrange(1, 4)):
            value = _changed(value, chance)
        body = msgpack.packb(value)
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException):
        return None
    assert isinstance(body, bytes)
    if target is not broker:
        return data[:begin] + body
    if len(body) >= 2048:
        return None
    lead = data[begin - 4 : begin - 2] + bytes([len(body) & 255, len(body) >> 8])
    return data[: begin - 4] + lead + body + data[end:]


def _one_of(data: bytes, chance: random.Random) -> tuple[int, int]:
    """Where one of the messages to the broker begins and ends."""
    found: list[tuple[int, int]] = []
    at = 1
    while at + 4 < len(data):
        end = at + 4 + data[at + 2] + 256 * (data[at + 3] & 7)
        found.append((at + 4, min(end, len(data))))
        at = end
    return chance.choice(found or [(len(data), len(data))])


def _changed(value: Any, chance: random.Random) -> Any:
    """`value` with something in it replaced, left out or doubled."""
    if isinstance(value, dict) and value and chance.random() < 0.85:
        made = dict(value)
        key = chance.choice(list(made))
        match chance.randrange(12):
            case 0:
                del made[key]
            case 1:
                made[chance.choice(("unknown", "a", 5))] = chance.choice(VALUES)
            case _:
                made[key] = _changed(made[key], chance)
        return made
    if isinstance(value, list) and value and chance.random() < 0.85:
        made = list(value)
        at = chance.randrange(len(made))
        match chance.randrange(8):
            case 0:
                del made[at]
            case 1:
                made.append(made[at])
            case _:
                made[at] = _changed(made[at], chance)
        return made
    if isinstance(value, bytes) and chance.random() < 0.7:
        cut = chance.randrange(len(value) + 1)
        return chance.choice(
            (
                value[:cut],
                value + chance.randbytes(4),
                value[:cut] + chance.randbytes(len(value) - cut),
            )
        )
    if isinstance(value, int | float) and chance.random() < 0.5:
        return chance.choice((value + 1, value - 1, -value, value * 2))
    return chance.choice(VALUES)
