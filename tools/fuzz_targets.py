"""What is fuzzed: each decoder of what others send, with what must hold whatever the bytes.

A target takes bytes. It returns where they are refused as they should be, and raises where a
decoder raises anything else or lets through what breaks whoever works with it. The first byte of
an input says which target it is for.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import zstandard
from fakes.broker_world import World
from fakes.hostile_peer import header_of
from xxhash import xxh3_64_intdigest

from umbra.deploy.run_folder import RunFolder
from umbra.deploy.summary import read_status
from umbra.proto.bounds import OWNERS, TEXT_CHARS, one_line
from umbra.proto.codec import decode_body, decode_header, kind_of
from umbra.proto.errors import UNREADABLE, UmbraError, WireError
from umbra.proto.messages import TYPES, Event, Header, Message, RegisterManifest
from umbra.proto.records import Manifest, Piece, Sampling, Trajectory
from umbra.proto.sizes import body_bytes
from umbra.proto.version import PROTOCOL_MAJOR
from umbra.services.buffer.store.api import StoreError
from umbra.services.buffer.store.head import Head
from umbra.services.buffer.store.record_format import (
    RECORD_MAGIC,
    SEGMENT_HEADER_BYTES,
    Entry,
    SegmentHeader,
    scan,
)
from umbra.services.buffer.store.run_mark import NAME as MARK
from umbra.services.buffer.store.run_mark import read_mark
from umbra.services.buffer.store.segments import Replay, segment_path
from umbra.services.config.trajectory_rules import RunFacts, find_fault
from umbra.services.environments.tools import parse_tool_calls
from umbra.services.generator.agents.calls import CallRules, read_chat, read_text
from umbra.services.generator.agents.errors import ApiError
from umbra.services.generator.agents.messages_api import read_messages
from umbra.services.generator.agents.responses_api import read_responses
from umbra.services.monitor.feed import Feed
from umbra.services.process.jsonl import read_jsonl
from umbra.services.process.metrics import parse_row
from umbra.services.trainer.batch import make_batch
from umbra.services.trainer.checkpoints.index import NAME as CHECKPOINT
from umbra.services.trainer.checkpoints.index import read_index
from umbra.services.trainer.recorded import token_versions
from umbra.services.weights import delta
from umbra.services.weights import manifest as layouts
from umbra.services.weights.manifest import (
    build_manifest,
    check_manifest,
    item_bytes,
    owned_buckets,
    owned_ranges,
)
from umbra.services.weights.planes.assembly import Assembly, Holdings, SequentialAssembly

NAMES = tuple(TYPES)
VOCABULARY = 64
_kept: list[TemporaryDirectory[str]] = []
OF_RUN = ("origin.json", "config.json", "buffer.json", "summary.json")
ROLES = (
    "generator", "scorer", "trainer", "weight_hub", "part", "relay", "monitor",
)  # fmt: skip
TRAJECTORIES = msgspec.msgpack.Decoder(Trajectory)


def read(kind: type[Message], body: bytes, raw: list[bytes] | None = None) -> Message:
    """The message that a server makes of it."""
    frames = [header_of(kind.__name__), body]
    stated = decode_header(frames)
    return decode_body(stated, kind_of(stated), frames, body_bytes(kind), raw or ()).body


def message(data: bytes) -> None:
    """A message of any type is refused, or means the same once it is packed and read again."""
    kind = TYPES[NAMES[data[0] % len(NAMES)]] if data else Message
    try:
        body = read(kind, data[1:])
    except WireError as error:
        assert len(str(error)) < 4096, "a refusal as long as what is refused"
        return
    packed = msgspec.msgpack.encode(body)
    if len(packed) > body_bytes(kind):  # numbers may have come in a shorter form
        return
    assert msgspec.msgpack.encode(read(kind, packed)) == packed


def envelope(data: bytes) -> None:
    """Frames of any number and content: the header decides, or refuses."""
    frames: list[bytes] = []
    while data and len(frames) < 5:
        size = data[0] if len(frames) else max(1, data[0])
        frames.append(data[1 : 1 + size])
        data = data[1 + size :]
    try:
        stated = decode_header(frames)
        assert isinstance(stated, Header) and stated.major == PROTOCOL_MAJOR
        kind = kind_of(stated)
        decode_body(stated, kind, frames, body_bytes(kind))
    except WireError:
        return


def sound_trajectory(data: bytes) -> None:
    """What the rules let through, the trainer makes tensors of."""
    try:
        found = TRAJECTORIES.decode(data)
    except UNREADABLE:
        return
    facts = RunFacts(VOCABULARY, 4096)
    if find_fault(found, facts) is not None:
        return
    batch = make_batch([found, found], VOCABULARY, 4096)
    assert batch.tokens.ids.min() >= 0 and batch.tokens.ids.max() < VOCABULARY
    assert batch.behaviour.isfinite().all() and batch.rewards.square().float().isfinite().all()
    assert batch.temperature.isfinite().all() and (batch.temperature > 0).all()
    assert token_versions(batch).shape == batch.oldest.shape == batch.leading(0).shape
    assert found.finish_reason.isprintable() and found.generator.isprintable()


def layout(data: bytes) -> None:
    """A manifest of any content, with the digest that its content has."""
    try:
        body = read(RegisterManifest, data)
        assert isinstance(body, RegisterManifest)
        found = body.manifest
        digest = layouts._digest(  # pyright: ignore[reportPrivateUsage]
            found.tensors, found.buckets, found.owners, found.adapter
        )
        found = msgspec.structs.replace(found, digest=digest)
        check_manifest(found)
    except WireError:
        return
    sizes = item_bytes(found)
    assert len(sizes) == len(found.buckets) and set(sizes) <= {2, 4}
    owned = owned_buckets(found)
    assert sorted(b for buckets in owned.values() for b in buckets) == list(range(len(sizes)))
    assert all(0 <= owner < OWNERS for owner in owned)
    ranges = sorted(part for owner in owned for part in owned_ranges(found, owner))
    assert [start for start, _ in ranges] == [0, *(end for _, end in ranges[:-1])]
    assert ranges[-1][1] == found.total_bytes
    assert all(
        0 <= one.offset <= one.offset + one.nbytes <= found.total_bytes for one in found.tensors
    )


def difference(data: bytes) -> None:
    """A delta of any bytes never touches what lies beside its bucket."""
    _apply(data[1:], 16 * data[0] if data else 0)


def planes(data: bytes) -> None:
    """The same with streams that are compressed as they should be."""
    if len(data) < 5:
        return
    size, kinds, count, cut = data[0] * 16, data[1], data[2] + 256 * (data[3] & 1), data[4]
    streams = [
        zstandard.ZstdCompressor().compress(one) for one in (data[5 : 5 + cut], data[5 + cut :])
    ]
    widths = [(1, 2, 4, 8)[kinds >> shift & 3] for shift in (0, 2, 4)]
    _apply(delta.HEADER.pack(*widths, 0, count, len(streams[0])) + b"".join(streams), size)


def _apply(change: bytes, size: int) -> None:
    memory = bytearray(b"\xa5" * (size + 128))
    view = memoryview(memory)
    try:
        delta.apply(change, view[64 : 64 + size])
    except WireError:
        pass
    assert memory[:64] == memory[-64:] == b"\xa5" * 64, "beside the bucket"


@cache
def _layout() -> Manifest:
    tensors = [("a", "BF16", (8, 16)), ("b", "F32", (4, 16)), ("c", "BF16", (3,))]
    return build_manifest(tensors, 256)


def pieces(data: bytes) -> None:
    """Pieces of buckets in any order: none counts that has another content than was wanted."""
    found = _layout()
    wanted = [xxh3_64_intdigest(b"\0" * (end - start)) for start, end in found.buckets]
    buffers = [memoryview(bytearray(b"\1" * found.total_bytes)) for _ in range(2)]
    assembly = Assembly(Holdings(found, buffers), 0, wanted, deltas=True)
    lane = SequentialAssembly(found, wanted)
    for gathering in (assembly, lane):
        gathering.order(1, 1 << 20, 1 << 20)
    while len(data) >= 4:
        bucket, kind, low, size = data[:4]
        raw = bytes(size) if kind & 1 else data[4 : 4 + size]
        data = data[4 + (0 if kind & 1 else size) :]
        base = 0 if kind & 2 else low
        result = wanted[bucket % len(wanted)] if kind & 4 else low
        offset = -low if kind & 8 else low * 2
        piece = Piece(bucket=bucket - 4, result=result, base=base, offset=offset)
        for gathering in (assembly, lane):
            try:
                gathering.take(piece, raw)
            except WireError:
                gathering.order(1, 1 << 20, 1 << 20)
    for bucket, (start, end) in enumerate(found.buckets):
        if bucket not in assembly.missing:
            assert not any(buffers[0][start:end])


def records(data: bytes) -> None:
    """A segment of any records, sound ones with other contents among them."""
    segment = SegmentHeader(1, 0, 0, 0).pack() + _summed(data)
    at = SEGMENT_HEADER_BYTES
    for found in scan(memoryview(segment)):
        assert found.offset == at < found.end, "bytes that are neither sound nor named"
        at = found.end
        assert not isinstance(found, Entry) or isinstance(found.key, str)
    assert at == len(segment)


def _summed(data: bytes) -> bytes:
    """Records with right lengths and checksums: of each length byte, that many bytes of content."""
    made: list[bytes] = []
    while len(data) > 4:
        size, name, kind, commit = data[:4]
        rest = struct.pack("<QIHB", commit, max(0, size - name), min(name, size), kind)
        body = rest + data[4 : 4 + size]
        if len(body) < len(rest) + size:
            made.append(data)
            break
        made.append(struct.pack("<4sQ", RECORD_MAGIC, xxh3_64_intdigest(body)) + body)
        data = data[4 + size :]
    return b"".join(made)


@cache
def _folder() -> Path:
    _kept.append(TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    return Path(_kept[0].name)


def store(data: bytes) -> None:
    """A store of any files is sound, damaged in a way that is named, or of another version."""
    if len(data) < 4:
        return
    folder = _folder()
    for old in folder.glob("*.seg"):
        old.unlink()
    (folder / "head").unlink(missing_ok=True)
    oldest, newest, end, flags = data[:4]
    content = _summed(data[4:])
    cut = len(content) // 2 if flags & 4 else len(content)
    for number, part in ((0, content[:cut]), (1, content[cut:])):
        if flags >> number & 1:
            name = segment_path(folder, number)
            name.write_bytes(SegmentHeader(1, number, number * (flags >> 5), 0).pack() + part)
    if flags & 8:
        facts = Head(1, 2, oldest % 3, newest % 3, end * 4, flags >> 6, data[0])
        (folder / "head").write_bytes(facts.pack() if flags & 16 else data)
    for salvage in (False, True):
        try:
            image = Replay(folder, salvage=salvage).run()
        except StoreError:
            continue
        assert all(place.offset < place.end for place in image.places.values())


def feed(data: bytes) -> None:
    """Telemetry of any content is shown, or counted as bad."""
    try:
        event = read(Event, data)
    except WireError:
        return
    assert isinstance(event, Event)
    heard = Feed()
    heard.heard(decode_header([header_of("Event"), b""]), event)
    heard.heard(decode_header([header_of("Event"), b""]), event)
    assert heard.bad in (0, 2)
    for spans in heard.spans().values():
        assert all(isfinite(span.start) and isfinite(span.end) for span in spans)
        assert all(no_control(span.name) for span in spans)
    assert all(no_control(push.receiver + push.plane) for push in heard.pushes())
    for sample in (*heard.samples(), *heard.slow()):
        assert no_control(sample.sample + sample.finish_reason) and isfinite(sample.seconds)
        lines = [*sample.prompt.split("\n"), *sample.response.split("\n")]
        assert all(map(no_control, lines))


def no_control(text: str) -> bool:
    """Whether `text` may be printed as it is."""
    return one_line(text) == text or len(text) > TEXT_CHARS


def files(data: bytes) -> None:
    """A file of a run with any content is read, or refused with a sentence that names it."""
    folder = _folder() / "files"
    folder.mkdir(exist_ok=True)
    for name in (*OF_RUN, CHECKPOINT, MARK, "rows.jsonl"):
        (folder / name).write_bytes(data)
    run = RunFolder(folder)
    read_status(run)
    reading: list[Callable[[], object]] = [
        lambda: read_index(folder),
        lambda: read_mark(folder),
        run.read_origin,
        lambda: RunFolder.existing(folder),
        lambda: read_jsonl(folder / "rows.jsonl"),
    ]
    for one in reading:
        try:
            one()
        except UmbraError as error:
            assert str(folder) in str(error)
    for line in data.decode(errors="replace").splitlines():
        parse_row(line)


def chat(data: bytes) -> None:
    """The body of a request to the agents' endpoint."""
    rules = CallRules(Sampling(), ("</s>",))
    for read_call in (read_chat, read_text, read_responses, read_messages):
        try:
            read_call(data, rules)
        except ApiError:
            continue


def tool_calls(data: bytes) -> None:
    """What a model wrote, in which calls are looked for."""
    text = data.decode(errors="replace")
    parse_tool_calls(text)
    parse_tool_calls(f"<tool_call>{text}</tool_call>")


def broker(data: bytes) -> None:
    """Messages of members, one after the other, and a restart: the broker lives, by its own checks.

    It compares its ledger with its samples at every event.
    """
    world = World(steps=4, durable=True)
    for role in ROLES:
        world.join(role, role)
    world.lease("generator", 4, 0)
    while len(data) > 4:
        name, kind, low, high = data[:4]
        size = low + 256 * (high & 7)
        body, data = data[4 : 4 + size], data[4 + size :]
        try:
            found = read(TYPES[NAMES[kind % len(NAMES)]], body)
        except WireError:
            continue
        sender = ROLES[name % len(ROLES)]
        world.ask(sender, found)
        world.pass_time((name >> 4) / 2)
    world.restart_broker()  # goes on with what it has written


TARGETS: tuple[Callable[[bytes], None], ...] = (
    message, envelope, sound_trajectory, layout, difference, planes, pieces, records, store, feed,
    files, chat, tool_calls, broker,
)  # fmt: skip


def try_input(data: bytes) -> str:
    """Run the target that `data` names; its name. Raises what the target raises."""
    target = TARGETS[data[0] % len(TARGETS)] if data else message
    target(data[1:])
    return target.__name__
