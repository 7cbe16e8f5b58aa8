"""What the buffer is measured against: the same 9 KB records by other means, none of them durable.

Access patterns, not code, of the projects that are named. Where those pickle, MessagePack takes its
place here, which is faster; so the comparison is the kinder one.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import shutil
import socket
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
from traffic import template

PRODUCERS = 2
CEILING = "raw PUSH/PULL, the ceiling"
REDIS = "Redis stream as PipelineRL uses it"
RAY = "Ray actor queue as verl's"
STOP = b"stop"
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


def record() -> dict[str, Any]:
    """A trajectory in plain values."""
    return msgspec.to_builtins(template(), builtin_types=(bytes,))


def free_port() -> int:
    """A port that nobody uses at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def push(pipe: Connection, port: int, seconds: float) -> None:
    """Producer of the ceiling."""
    context = zmq.Context()
    out = context.socket(zmq.PUSH)
    out.set(zmq.SNDTIMEO, 200)
    out.connect(f"tcp://127.0.0.1:{port}")
    one = record()
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


def xadd(pipe: Connection, port: int, seconds: float) -> None:
    """Producer: one XADD round trip per record."""
    import redis

    client = redis.Redis(port=port)
    one = record()
    pipe.recv()
    until, index = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        fields = {"index": index, "data": msgpack.packb(one)}
        client.xadd("stream", fields, maxlen=20_000, approximate=True)
        index += 1
    pipe.send(time.process_time())


def xread(pipe: Connection, port: int, seconds: float) -> None:
    """Consumer: one XREAD round trip per record."""
    import redis

    client = redis.Redis(port=port)
    pipe.send("ready")
    pipe.recv()
    count, last, until = 0, "0", time.monotonic() + seconds
    while time.monotonic() < until:
        for _, entries in client.xread({"stream": last}, count=1, block=100) or ():
            for entry, fields in entries:
                last = entry
                msgpack.unpackb(fields[b"data"])
                count += 1
    pipe.send((count, time.process_time()))


def run(
    producer: Callable[..., None], consumer: Callable[..., None], port: int, seconds: float
) -> tuple[int, float]:
    """Records that arrived, and CPU seconds of all these processes."""
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    for body in (consumer, *(PRODUCERS * [producer])):
        ours, theirs = context.Pipe()
        context.Process(target=body, args=(theirs, port, seconds), daemon=True).start()
        pipes.append(ours)
    pipes[0].recv()
    time.sleep(1.0)  # imports of the producers
    for pipe in pipes:
        pipe.send("go")
    count, cpu_s = pipes[0].recv()
    return count, cpu_s + sum(pipe.recv() for pipe in pipes[1:])


def measure_ceiling(seconds: float) -> dict[str, float]:
    """PUSH to PULL."""
    count, cpu_s = run(push, pull, free_port(), seconds)
    return {"per_s": count / seconds, "cpu_s_per_1k": 1e3 * cpu_s / count}


def measure_redis(seconds: float) -> dict[str, float]:
    """A Redis server of our own, without persistence."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        server = subprocess.Popen(
            ["redis-server", "--port", str(port), "--save", "", "--appendonly", "no"],
            cwd=folder,
            stdout=subprocess.DEVNULL,
        )
        try:
            import redis

            deadline = time.monotonic() + 10
            while True:
                try:
                    redis.Redis(port=port).ping()
                    break
                except redis.exceptions.ConnectionError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.05)
            count, cpu_s = run(xadd, xread, port, seconds)
            with open(f"/proc/{server.pid}/stat", encoding="ascii") as stat:
                fields = stat.read().rpartition(")")[2].split()
            cpu_s += (int(fields[11]) + int(fields[12])) / CLOCK_TICKS
        finally:
            server.terminate()
            server.wait()
    return {"per_s": count / seconds, "cpu_s_per_1k": 1e3 * cpu_s / count}


def measure_ray(seconds: float) -> dict[str, float]:
    """An async actor around a deque; 16 puts under way per producer, gets one by one."""
    import ray

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")

    @ray.remote
    class Queue:
        def __init__(self) -> None:
            self.items: deque[bytes] = deque(maxlen=10_000)
            self.changed = asyncio.Condition()

        async def put(self, item: bytes) -> None:
            async with self.changed:
                self.items.append(item)
                self.changed.notify()

        async def get(self) -> bytes:
            async with self.changed:
                await self.changed.wait_for(lambda: bool(self.items))
                return self.items.popleft()

    @ray.remote
    def produce(queue: Any, seconds: float) -> float:
        one, under_way = record(), []
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            under_way.append(queue.put.remote(msgpack.packb(one)))
            if len(under_way) >= 16:
                _, under_way = ray.wait(under_way, num_returns=1)
        ray.get(under_way)
        return time.process_time()

    queue = Queue.remote()
    one = msgpack.packb(record())
    ray.get(queue.put.remote(one))
    ray.get(queue.get.remote())
    producers = [produce.remote(queue, seconds + 1) for _ in range(PRODUCERS)]
    msgpack.unpackb(ray.get(queue.get.remote()))  # they are up
    count, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        msgpack.unpackb(ray.get(queue.get.remote()))
        count += 1
    cpu_s = sum(ray.get(producers)) + time.process_time()
    ray.shutdown()
    return {"per_s": count / seconds, "cpu_s_per_1k": 1e3 * cpu_s / count}


def measure_all(seconds: float, *, with_ray: bool) -> Iterator[tuple[str, dict[str, float]]]:
    """All that this machine has; says what is missing."""
    yield CEILING, measure_ceiling(seconds)
    if shutil.which("redis-server") is None:
        print("redis-server is missing: apt-get install redis-server")
    else:
        try:
            yield REDIS, measure_redis(seconds)
        except ImportError:
            print("the client of Redis is missing: pip install redis")
    if with_ray:
        try:
            yield RAY, measure_ray(seconds)
        except ImportError:
            print("ray is missing: pip install ray")
