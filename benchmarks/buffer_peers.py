"""Transports that the buffer is measured against: the same records, none of them durable.

Access patterns, not code, of the projects that are named. PipelineRL's shared stream writer sends
JSON of lists (by orjson; msgspec's JSON takes its place), its other one pickles lists; a round trip
a record. The other row of Redis is what neither does: MessagePack with arrays as bytes, and records
sent and read BATCH at a time, as the buffer's clients send theirs. verl's queue drops the oldest
item when it is full; ours lets the producers wait, as puts would starve the gets otherwise. Here a
put carries BATCH records too, and a get takes as many.
"""

from __future__ import annotations

import asyncio
import importlib
import shutil
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import msgpack
import msgspec
import zmq
from buffer_clients import PRODUCERS, run_workers, template
from report import cpu_seconds, free_port

from umbra.proto.records import unpack_float32, unpack_int32

CEILING = "raw PUSH/PULL, the ceiling"
REDIS = "Redis stream as PipelineRL uses it (JSON of lists)"
REDIS_KIND = "Redis stream, MessagePack, records in batches"
RAY = "Ray actor queue as verl's, a record a call"
RAY_KIND = "Ray actor queue, records in batches"
BATCH = 32  # records in a message of the buffer's clients
BATCHES = {REDIS: 1, REDIS_KIND: BATCH, RAY: 1, RAY_KIND: BATCH}
RAY_QUEUE = 64  # items in the actor


def record() -> dict[str, Any]:
    """Return a trajectory in plain values."""
    return msgspec.to_builtins(template(), builtin_types=(bytes,))


def lists() -> dict[str, Any]:
    """The same with lists of numbers."""
    one = record()
    for name in ("prompt_ids", "response_ids"):
        one[name] = unpack_int32(one[name])
    return one | {"loss_mask": list(one["loss_mask"]), "logprobs": unpack_float32(one["logprobs"])}


CODECS: dict[str, tuple[Callable[[], Any], Callable[[Any], bytes], Callable[[bytes], Any]]] = {
    REDIS: (lists, msgspec.json.encode, msgspec.json.decode),
    REDIS_KIND: (record, msgpack.packb, msgpack.unpackb),
}


def push(pipe: Connection, port: int, seconds: float) -> None:
    """Producer of the ceiling."""
    context = zmq.Context()
    out = context.socket(zmq.PUSH)
    out.set(zmq.SNDTIMEO, 200)
    out.connect(f"tcp://127.0.0.1:{port}")
    one = record()
    pipe.send("ready")
    pipe.recv()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            out.send(msgpack.packb(one))
        except zmq.Again:
            break  # the consumer has ended
    out.close(linger=0)
    context.term()
    pipe.send(time.process_time())


def pull(pipe: Connection, port: int, seconds: float) -> None:
    """Consumer of the ceiling."""
    context = zmq.Context()
    socket_in = context.socket(zmq.PULL)
    socket_in.bind(f"tcp://127.0.0.1:{port}")
    pipe.send("ready")
    pipe.recv()
    count, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        if socket_in.poll(50):
            msgpack.unpackb(socket_in.recv())
            count += 1
    socket_in.close(linger=0)
    context.term()
    pipe.send((count, time.process_time()))


def optional(name: str) -> Any:
    """Return a peer's package, which nothing here installs."""
    return importlib.import_module(name)


def xadd(pipe: Connection, port: int, seconds: float, kind: str) -> None:
    """Producer: a round trip for so many records as go together."""
    client = optional("redis").Redis(port=port)
    make, encode, _ = CODECS[kind]
    one = make()
    pipe.send("ready")
    pipe.recv()
    until, index = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        together = client.pipeline(transaction=False)
        for _ in range(BATCHES[kind]):
            fields = {"index": index, "data": encode(one)}
            together.xadd("stream", fields, maxlen=20_000, approximate=True)
            index += 1
        together.execute()
    pipe.send(time.process_time())


def xread(pipe: Connection, port: int, seconds: float, kind: str) -> None:
    """Consumer: a round trip for so many records as go together, at most."""
    _, _, decode = CODECS[kind]
    client = optional("redis").Redis(port=port)
    pipe.send("ready")
    pipe.recv()
    count, last, until = 0, "0", time.monotonic() + seconds
    while time.monotonic() < until:
        for _, entries in client.xread({"stream": last}, count=BATCHES[kind], block=100) or ():
            for entry, fields in entries:
                last = entry
                decode(fields[b"data"])
                count += 1
    pipe.send((count, time.process_time()))


def run(
    producer: Callable[..., None],
    consumer: Callable[..., None],
    port: int,
    seconds: float,
    *more: str,
) -> tuple[int, float]:
    """Records that arrived, and CPU seconds of all these processes."""
    bodies = (consumer, *(PRODUCERS * [producer]))
    found = run_workers([(body, (port, seconds, *more)) for body in bodies])
    (count, cpu_s), *others = found
    return count, cpu_s + sum(others)


def rates(count: int, cpu_s: float, seconds: float) -> dict[str, float]:
    """Return the records per second, and the CPU seconds of 1,000."""
    return {"per_s": count / seconds, "cpu_s_per_1k": 1e3 * cpu_s / count}


def measure_ceiling(seconds: float) -> dict[str, float]:
    """PUSH to PULL."""
    count, cpu_s = run(push, pull, free_port(), seconds)
    return rates(count, cpu_s, seconds)


def measure_redis(kind: str, seconds: float) -> dict[str, float]:
    """Measure a Redis server of our own, without persistence."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        server = subprocess.Popen(
            ["redis-server", "--port", str(port), "--save", "", "--appendonly", "no"],
            cwd=folder,
            stdout=subprocess.DEVNULL,
        )
        try:
            redis = optional("redis")
            deadline = time.monotonic() + 10
            while True:
                try:
                    redis.Redis(port=port).ping()
                    break
                except redis.ConnectionError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.05)
            count, cpu_s = run(xadd, xread, port, seconds, kind)
            cpu_s += cpu_seconds(server.pid)
        finally:
            server.terminate()
            server.wait()
    return rates(count, cpu_s, seconds)


def measure_ray(kind: str, seconds: float) -> dict[str, float]:
    """Measure an async actor around a deque; 16 puts in flight per producer, gets one by one."""
    ray = optional("ray")
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")

    @ray.remote
    class Queue:
        def __init__(self) -> None:
            self.items: deque[list[bytes]] = deque()
            self.changed = asyncio.Condition()

        async def put(self, item: list[bytes]) -> None:
            async with self.changed:
                await self.changed.wait_for(lambda: len(self.items) < RAY_QUEUE)
                self.items.append(item)
                self.changed.notify_all()

        async def get(self) -> list[bytes]:
            async with self.changed:
                await self.changed.wait_for(lambda: bool(self.items))
                self.changed.notify_all()
                return self.items.popleft()

    one, together = record(), BATCHES[kind]

    @ray.remote
    class Generator:
        def is_up(self) -> bool:
            return True

        def produce(self, queue: Any, seconds: float) -> None:
            under_way: deque[Any] = deque()
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                records = [msgpack.packb(one) for _ in range(together)]
                under_way.append(queue.put.remote(records))
                if len(under_way) >= 16:
                    ray.get(under_way.popleft())

    queue = Queue.remote()
    generators = [Generator.remote() for _ in range(PRODUCERS)]
    ray.get([generator.is_up.remote() for generator in generators])
    for generator in generators:
        generator.produce.remote(queue, seconds + 2)
    for _ in range(2 * RAY_QUEUE):  # the queue is full, and nothing starts any more
        ray.get(queue.get.remote())
    began, count, until = cpu_seconds(), 0, time.monotonic() + seconds
    while time.monotonic() < until:
        for item in ray.get(queue.get.remote()):
            msgpack.unpackb(item)
            count += 1
    used_s = cpu_seconds()
    ray.shutdown()  # Ray waits for no worker, so that its CPU seconds vanish with it
    lost_s = max(0.0, used_s - cpu_seconds())
    return rates(count, used_s - began, seconds) | {"lost_s": lost_s}


def measure_all(seconds: float, *, with_ray: bool) -> Iterator[tuple[str, dict[str, float]]]:
    """Measure every transport of this machine; print the missing programs."""
    yield CEILING, measure_ceiling(seconds)
    if shutil.which("redis-server") is None:
        print("redis-server is missing: apt-get install redis-server")
    else:
        try:
            for kind in CODECS:
                yield kind, measure_redis(kind, seconds)
        except ImportError:
            print("the client of Redis is missing: pip install redis")
    if with_ray:
        try:
            for kind in (RAY, RAY_KIND):
                yield kind, measure_ray(kind, seconds)
        except ImportError:
            print("ray is missing: pip install ray")
