"""What the processes of the benchmark of weight pushes do (`weight_processes.py` starts them).

They talk to the benchmark in lines of JSON on stdout. Times are `time.monotonic`, which all
processes of a machine share.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import zmq
from bench_keys import SOCKET, security_of
from safetensors.torch import load_file
from weight_model import Model

from umbra.proto.net.io_thread import IoThread
from umbra.proto.net.server import Server
from umbra.services.config import WeightHubConfig as HubConfig
from umbra.services.process.metrics import MetricsFile
from umbra.services.weight_hub.relay import Relay
from umbra.services.weight_hub.service import ACCEPTS, CHANNEL, WeightHub
from umbra.services.weights.planes.bucket_server import BucketServer
from umbra.services.weights.planes.receiving import StagedPlanes
from umbra.services.weights.receiver import Receiver

DEADLINE_S = 600.0
GLOO_BUCKET = 64 << 20
SOCKET_PIECE = 1 << 20
NO_PORT = 1  # nobody listens there


def say(**fields: Any) -> None:
    """One line to the benchmark."""
    print(json.dumps(fields), flush=True)


class Told:
    """What the benchmark says on stdin, line by line, and whether it has ended."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def line(self) -> str:
        """The next line; "" at the end."""
        return self._lines.get()

    def _read(self) -> None:
        for line in sys.stdin:
            self._lines.put(line)
        self.ended.set()
        self._lines.put("")


def hub(plane: str, delta: str, listen: str, metrics: str) -> None:
    """A weight hub without a broker, until stdin ends."""
    if os.environ.get(SOCKET):
        BucketServer.port = property(lambda _self: NO_PORT)  # type: ignore[assignment]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server = Server(context, "weight-hub", uuid.uuid4().hex, security_of("weight_hub"))
    endpoint = server.bind(CHANNEL, listen, ACCEPTS)
    config = HubConfig(plane=plane, delta=delta, deadline_s=DEADLINE_S)  # type: ignore[arg-type]
    served = WeightHub(
        server, f"bench-{uuid.uuid4().hex[:6]}", config, MetricsFile(Path(metrics), "hub")
    )
    say(endpoint=endpoint)
    told = Told()
    while not told.ended.is_set():
        served.step(0.05)
    served.close()
    server.close()
    context.term()


def receiver(name: str, endpoint: str, plane: str, size: str, share: str = "1") -> None:
    """A generator without an engine: its model is `size` bytes, loaded at each commit.

    After each version it waits for a line, and then loads the same bytes once more while nothing
    else goes on: what the commit takes at the least, with as many engines at once.
    """
    torch.set_num_threads(1)
    model = Model(int(size), share=int(share))
    link = IoThread(name, uuid.uuid4().hex, security=security_of("generator"))
    channel = link.channel(endpoint, "weight hub", server="weight_hub")
    taker = Receiver(channel, StagedPlanes([plane]))
    taker.subscribe(DEADLINE_S)
    say(subscribed=name)
    told = Told()
    while not told.ended.is_set():
        staged = taker.wait_first(DEADLINE_S, told.ended)
        if staged is None:
            break
        (data,) = staged.parts()
        assert isinstance(data, memoryview)
        began = time.monotonic()
        model.load(staged.manifest, data)
        done = time.monotonic()
        taker.committed(staged, done - began)
        whole = model.equals(staged.manifest, data)
        say(version=staged.version, done_at=done, commit_s=done - began, whole=whole)
        if not told.line():
            break
        began = time.monotonic()
        model.load(staged.manifest, data)
        say(load_s=time.monotonic() - began)
    taker.close()
    link.close()


def relay(name: str, endpoint: str, listen: str) -> None:
    """A relay, until stdin ends."""
    config = HubConfig(deadline_s=DEADLINE_S)
    security = security_of("weight_hub")
    served = Relay(name, endpoint, listen, config, MetricsFile(None, name), security=security)
    say(endpoint=served.endpoint)
    served.run(Told().ended, DEADLINE_S)


def gloo(rank: str, world: str, address: str, size: str, share: str = "1") -> None:
    """A receiver of gloo broadcasts: 64 MiB buckets, unpacked into the tensors of a model."""
    torch.set_num_threads(1)
    model = Model(int(size), share=int(share))
    dist.init_process_group(
        "gloo", init_method=f"tcp://{address}", rank=int(rank), world_size=int(world)
    )
    bucket = torch.zeros(GLOO_BUCKET // 2, dtype=torch.bfloat16)
    say(subscribed=rank)
    command = torch.zeros(1, dtype=torch.int64)
    while True:
        dist.broadcast(command, 0)
        if command.item() < 0:
            break
        broadcast_model(model, bucket, source=False)
        say(version=int(command.item()), done_at=time.monotonic())
    dist.destroy_process_group()


def broadcast_model(model: Model, bucket: torch.Tensor, *, source: bool) -> None:
    """Pack tensors (or rows of them) into the bucket, cast on the way, broadcast, unpack."""
    pieces: list[torch.Tensor] = []
    room = bucket.numel()
    for tensor in model.parameters():
        flat = tensor.view(-1)
        start = 0
        while start < flat.numel():
            piece = flat[start : start + room]
            pieces.append(piece)
            room -= piece.numel()
            start += piece.numel()
            if room == 0:
                _broadcast(pieces, bucket, source)
                pieces, room = [], bucket.numel()
    _broadcast(pieces, bucket, source)


def _broadcast(pieces: list[torch.Tensor], bucket: torch.Tensor, source: bool) -> None:
    used = 0
    for piece in pieces if source else ():
        bucket[used : used + piece.numel()].copy_(piece)
        used += piece.numel()
    count = sum(piece.numel() for piece in pieces)
    dist.broadcast(bucket[:count].view(torch.uint8), 0)
    used = 0
    for piece in () if source else pieces:
        piece.copy_(bucket[used : used + piece.numel()])
        used += piece.numel()


def files(size: str) -> None:
    """A receiver of safetensors files: a path per line on stdin, loaded into a model."""
    torch.set_num_threads(1)
    model = Model(int(size))
    say(subscribed="files")
    for line in sys.stdin:
        loaded = load_file(line.strip())
        for name, tensor in model.named_parameters():
            tensor.copy_(loaded[name])
        say(version=0, done_at=time.monotonic())


def sink(host: str) -> None:
    """Take bytes from one plain socket into memory that is in use, until it ends."""
    into = memoryview(bytearray(SOCKET_PIECE))
    with socket.create_server((host, 0)) as listening:
        say(port=listening.getsockname()[1])
        peer, _ = listening.accept()
        with peer:
            while peer.recv_into(into):
                pass
        say(done_at=time.monotonic())


def source(host: str, port: str, size: str) -> None:
    """Send `size` bytes over a plain socket, from memory that is in use."""
    piece, left = memoryview(bytearray(SOCKET_PIECE)), int(size)
    with socket.create_connection((host, int(port))) as peer:
        say(began=time.monotonic())
        while left > 0:
            left -= peer.send(piece[:left])


ROLES = {
    "hub": hub, "receiver": receiver, "relay": relay, "gloo": gloo, "files": files,
    "sink": sink, "source": source,
}  # fmt: skip
