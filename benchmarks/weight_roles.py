"""The processes of `weight_push.py`, forked from a server that has imported torch already.

Each has a pipe to the benchmark. Times are of `time.monotonic`, one clock for the whole machine.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
import uuid
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import zmq
from safetensors.torch import load_file
from weight_model import Model

from umbra.proto.net.io_thread import IoThread
from umbra.proto.net.keys import OPEN
from umbra.proto.net.server import Server
from umbra.services.config import WeightHubConfig as HubConfig
from umbra.services.process.metrics import MetricsFile
from umbra.services.weight_hub.service import ACCEPTS, CHANNEL, WeightHub
from umbra.services.weights.planes.receiving import StagedPlanes
from umbra.services.weights.receiver import Receiver

DEADLINE_S = 600.0
END_S = 10.0
GLOO_BUCKET = 64 << 20
END = "end"

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["weight_roles"])


class Role:
    """A process of the benchmark that runs `body(pipe, *arguments)`."""

    def __init__(self, body: Callable[..., None], *arguments: object) -> None:
        self._pipe, theirs = _context.Pipe()
        self._process = _context.Process(target=body, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    def hear(self) -> dict[str, Any]:
        """Return its next message.

        Raises:
            EOFError: it has ended.
        """
        return self._pipe.recv()

    def tell(self, text: str) -> None:
        self._pipe.send(text)

    def close(self) -> None:
        try:
            self.tell(END)
        except OSError:
            pass  # it has ended
        self._process.join(END_S)
        self._process.kill()
        self._pipe.close()


def hub(pipe: Connection, plane: str, delta: str, metrics: Path) -> None:
    """Run a weight hub without a broker."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server = Server(context, "weight-hub", uuid.uuid4().hex, OPEN)
    endpoint = server.bind(CHANNEL, "tcp://127.0.0.1:*", ACCEPTS)
    config = HubConfig(plane=plane, delta=delta, deadline_s=DEADLINE_S)  # type: ignore[arg-type]
    run_id = f"bench-{uuid.uuid4().hex[:6]}"
    served = WeightHub(server, run_id, config, MetricsFile(metrics, "hub"))
    pipe.send({"endpoint": endpoint})
    while not pipe.poll():
        served.step(0.05)
    served.close()
    server.close()
    context.term()


def receiver(
    pipe: Connection, name: str, endpoint: str, plane: str, size: int, versions: int
) -> None:
    """Receive `versions` versions of a model of `size` bytes, as a generator without an engine.

    After each version it waits for a message and loads the same bytes once more while nothing else
    is under way: the floor of the commit, with as many receivers at once.
    """
    torch.set_num_threads(1)
    model = Model(size)
    link = IoThread(name, uuid.uuid4().hex, security=OPEN)
    channel = link.channel(endpoint, "weight hub", server="weight_hub")
    taker = Receiver(channel, StagedPlanes([plane]))
    taker.subscribe(DEADLINE_S)
    pipe.send({"subscribed": name})
    ended = threading.Event()
    for _ in range(versions):
        staged = taker.wait_first(DEADLINE_S, ended)
        assert staged is not None
        data = staged.data
        assert isinstance(data, memoryview)
        began = time.monotonic()
        taker.load(staged, model.load_staged, DEADLINE_S, ended)
        done = time.monotonic()
        whole = model.equals(staged.manifest, data)
        pipe.send(
            {"version": staged.version, "done_at": done, "commit_s": done - began, "whole": whole}
        )
        pipe.recv()
        began = time.monotonic()
        model.load(staged.manifest, data)
        pipe.send({"load_s": time.monotonic() - began})
    taker.close()
    link.close()


def gloo(pipe: Connection, rank: int, world: int, address: str, size: int) -> None:
    """Receive gloo broadcasts: 64 MiB buckets, unpacked into the tensors of a model."""
    torch.set_num_threads(1)
    model = Model(size)
    dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=world)
    bucket = torch.zeros(GLOO_BUCKET // 2, dtype=torch.bfloat16)
    pipe.send({"subscribed": rank})
    command = torch.zeros(1, dtype=torch.int64)
    while True:
        dist.broadcast(command, 0)
        if command.item() < 0:
            break
        broadcast_model(model, bucket, source=False)
        pipe.send({"version": int(command.item()), "done_at": time.monotonic()})
    dist.destroy_process_group()


def broadcast_model(model: Model, bucket: torch.Tensor, *, source: bool) -> None:
    """Pack tensors, or rows of them, into `bucket` with a cast, broadcast it, unpack it."""
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


def files(pipe: Connection, size: int) -> None:
    """Load each safetensors file whose path comes into a model."""
    torch.set_num_threads(1)
    model = Model(size)
    pipe.send({"subscribed": "files"})
    while (path := pipe.recv()) != END:
        loaded = load_file(path)
        for name, tensor in model.named_parameters():
            tensor.copy_(loaded[name])
        pipe.send({"done_at": time.monotonic()})
