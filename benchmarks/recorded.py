"""`umbra generator`, whose messages to the buffer are recorded; and what a recording says.

    UMBRA_BENCH_FRAMES=FOLDER python benchmarks/recorded.py [flags of `umbra generator`]

A recording is made once, of a run of real processes with replay engines; `replayed_members.py`
plays it back for any number of members. Recorded are the frames as the generator's encoder makes
them: what it says, in which order, and how large it is.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from replay_cells import Mode, overrides, prepare
from whole_runs import Cell, run

from umbra.proto.codec import Encoder, decode
from umbra.proto.messages import Heartbeat, Join, LeaseSamples, SubmitTrajectories
from umbra.proto.records import VersionSpan
from umbra.services.config import RunConfig
from umbra.services.config.loader import load_config
from umbra.services.generator.replay_model import ReplayModel

VARIABLE = "UMBRA_BENCH_FRAMES"
RECORDED = (Join, Heartbeat, LeaseSamples, SubmitTrajectories)
TOKENS = 1000  # of each answer
KEPT = 64  # trajectories of which members send copies
# Two generators, whose sequences end one by one; nobody ever waits for the trainer.
MODE = Mode("recording", 2, 2, 12, 4, ("buffer.max_staleness=8",))
MODEL = ReplayModel(step_s=1e-3, token_s=1e-5, lengths=[0.8 * TOKENS, 1.2 * TOKENS])


class RecordedFrame(msgspec.Struct):
    """A message that a generator has sent."""

    frames: list[bytes]


Move = tuple[int, bool, bool]


@dataclass(frozen=True)
class Recording:
    """What members say.

    Attributes:
        moves: turns of a member: how many trajectories it submits together, whether it asks for
            work with them, and whether it asks by a message of its own after them.
        trajectories: packed, each cut where its ids were: see `cut`.
        beat: body of a heartbeat.
        trajectory_bytes: of one as it was sent, mean.
    """

    moves: list[Move]
    trajectories: list[Cut]
    beat: bytes
    trajectory_bytes: float


@dataclass(frozen=True)
class Cut:
    """The bytes of a packed trajectory between the values that are another member's own."""

    parts: tuple[bytes, ...]  # one more than there are `FIELDS`


FIELDS = ("sample_id", "group_id", "prompt_id", "attempt", "generator")
_pack = msgspec.msgpack.encode


def cut(trajectory: Any) -> Cut:
    """The packed `trajectory` without ids, made of version 0, for `filled`."""
    dice = random.Random(0)
    marks: dict[str, Any] = {name: f"{dice.getrandbits(128):032x}" for name in FIELDS}
    marks["attempt"] = 1 << 61
    whole = VersionSpan(version=0, start=0, end=trajectory.response_tokens)
    left = _pack(msgspec.structs.replace(trajectory, spans=[whole], **marks))
    parts: list[bytes] = []
    for name in FIELDS:
        before, mark, left = left.partition(_pack(marks[name]))
        assert mark, f"a packed trajectory has no {name} behind {FIELDS[: len(parts)]}"
        parts.append(before)
    return Cut((*parts, left))


def filled(cut: Cut, values: Sequence[bytes]) -> list[bytes]:
    """The bytes of a trajectory with these packed values of `FIELDS`."""
    made = [cut.parts[0]]
    for value, part in zip(values, cut.parts[1:], strict=True):
        made += (value, part)
    return made


def configuration(work: Path, seed: int = 0) -> RunConfig:
    """That of the recorded run; members play in one with the same prompts and sampling."""
    cell = Cell("recording", MODE, "recording", seed)
    return load_config(None, overrides=overrides(cell, work), environ={})


def record(work: Path) -> Recording:
    """Make a run in `work` and take what its generators have said."""
    work = work.resolve()
    prepare(work)
    (work / "recording.json").write_bytes(msgspec.json.encode(MODEL))
    frames = work / "frames"
    frames.mkdir(exist_ok=True)
    os.environ[VARIABLE] = str(frames)
    try:
        scripts = {"generator": ("recorded.py",), "trainer": ("timed_trainer.py", "0.05", "0", "0")}
        run(configuration(work), scripts)
    finally:
        del os.environ[VARIABLE]
    return recording([file.read_bytes() for file in sorted(frames.iterdir())])


def recording(files: Sequence[bytes]) -> Recording:
    """What is in the files of generators; the turns of all of them, one generator's after another.

    Raises:
        ValueError: nothing was submitted or no heartbeat was sent.
    """
    moves: list[Move] = []
    cuts: list[Cut] = []
    beat, sizes = b"", list[int]()
    for content in files:
        for one in msgspec.msgpack.decode(content, type=list[RecordedFrame]):
            body = decode(one.frames).body
            match body:
                case Heartbeat():
                    beat = one.frames[1]
                case SubmitTrajectories(trajectories=made, capacity=room):
                    moves.append((len(made), room > 0, False))
                    sizes.append(len(one.frames[1]) // len(made))
                    cuts += [cut(answer) for answer in made[: KEPT - len(cuts)]]
                case LeaseSamples() if moves:
                    moves[-1] = (*moves[-1][:2], True)
                case _:
                    pass
    if not moves or not beat:
        raise ValueError("the recorded generators have submitted nothing, or sent no heartbeat")
    return Recording(moves, cuts, beat, sum(sizes) / len(sizes))


def main() -> None:
    """Be `umbra generator`, but for what is recorded."""
    from umbra.services.generator.command import command

    kept: list[RecordedFrame] = []
    encode = Encoder.encode

    def recording_encode(
        self: Encoder, body: Any, *, reply_to: int | None = None
    ) -> tuple[int, list[bytes]]:
        number, frames = encode(self, body, reply_to=reply_to)
        if isinstance(body, RECORDED):
            kept.append(RecordedFrame(frames))
        return number, frames

    Encoder.encode = recording_encode
    try:
        command.main(sys.argv[1:], prog_name="recorded generator")
    finally:
        target = Path(os.environ[VARIABLE]) / f"{os.getpid()}.msgpack"
        target.write_bytes(msgspec.msgpack.encode(kept))


if __name__ == "__main__":
    from umbra.services.process.parent import die_with_parent

    die_with_parent()
    main()
