"""The processes of the benchmark of weight pushes, each started as `weight_push.py ROLE ...`.

They talk to the benchmark in lines of JSON on stdout. Times are `time.monotonic`, which all
processes of a machine share.
"""

from __future__ import annotations

import json
import os
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

from umbra.services.runtime.config import WeightHubConfig as HubConfig
from umbra.services.runtime.net.io_thread import IoThread
from umbra.services.runtime.net.server import Server
from umbra.services.runtime.planes.bucket_server import BucketServer
from umbra.services.runtime.planes.receiving import StagedPlanes
from umbra.services.runtime.process.metrics import MetricsFile
from umbra.services.runtime.weights.receiver import Receiver
from umbra.services.weight_hub.relay import Relay
from umbra.services.weight_hub.service import ACCEPTS, CHANNEL, WeightHub

DEADLINE_S = 600.0
GLOO_BUCKET = 64 << 20
NO_PORT = 1  # nobody listens there


def say(**fields: Any) -> None:
    """One line to the benchmark."""
    print(json.dumps(fields), flush=True)


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
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    while not ended.is_set():
        served.step(0.05)
    served.close()
    server.close()
    context.term()


def receiver(name: str, endpoint: str, plane: str, size: str) -> None:
    """A generator without an engine: its model is `size` bytes, loaded at each commit."""
    torch.set_num_threads(1)
    model = Model(int(size))
    link = IoThread(name, uuid.uuid4().hex, security=security_of("generator"))
    channel = link.channel(endpoint, "weight hub", server="weight_hub")
    taker = Receiver(channel, StagedPlanes([plane]))
    taker.subscribe(DEADLINE_S)
    say(subscribed=name)
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    while not ended.is_set():
        staged = taker.wait_first(DEADLINE_S, ended)
        if staged is None:
            break
        (data,) = staged.parts()
        assert isinstance(data, memoryview)
        began = time.monotonic()
        model.load(staged.manifest, data)
        done = time.monotonic()
        taker.committed(staged, done - began)
        whole = model.equals(staged.manifest, data)
        say(
            version=staged.version,
            staged_at=began,
            done_at=done,
            commit_s=done - began,
            whole=whole,
        )
    taker.close()
    link.close()


def relay(name: str, endpoint: str, listen: str) -> None:
    """A relay, until stdin ends."""
    config = HubConfig(deadline_s=DEADLINE_S)
    security = security_of("weight_hub")
    served = Relay(name, endpoint, listen, config, MetricsFile(None, name), security=security)
    say(endpoint=served.endpoint)
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    served.run(ended, DEADLINE_S)


def gloo(rank: str, world: str, port: str, size: str) -> None:
    """A receiver of gloo broadcasts: 64 MiB buckets, unpacked into the tensors of a model."""
    torch.set_num_threads(1)
    model = Model(int(size))
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=int(rank), world_size=int(world)
    )
    bucket = torch.zeros(GLOO_BUCKET // 2, dtype=torch.bfloat16)
    say(subscribed=rank)
    command = torch.zeros(1, dtype=torch.int64)
    while True:
        dist.broadcast(command, 0)
        if command.item() < 0:
            break
        broadcast_model(model, bucket, source=False)
        say(version=int(command.item()), done_at=time.monotonic(), staged_at=0.0, commit_s=0.0)
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
        say(version=0, done_at=time.monotonic(), staged_at=0.0, commit_s=0.0)


ROLES = {"hub": hub, "receiver": receiver, "relay": relay, "gloo": gloo, "files": files}
