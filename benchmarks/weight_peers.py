"""What others do: gloo broadcasts, safetensors files in /dev/shm; and a plain socket.

They start from the same float32 tensors as we do, change before each push and warm up as often. The
socket casts and loads nothing: it is what a link, or the loopback, carries.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from weight_links import Links
from weight_model import Model
from weight_processes import Role
from weight_pushes import WARM_UPS, Pushed, step
from weight_roles import GLOO_BUCKET, broadcast_model

INTERFACE = "GLOO_SOCKET_IFNAME"


def push_gloo(model: Model, count: int, passes: int, links: Links | None = None) -> list[Pushed]:
    """Broadcasts of 64 MiB buckets to `count` receivers.

    Over `links` the sender is this process, which has no limit of its own: one receiver.
    """
    host = links.gateway if links else "127.0.0.1"
    with socket.socket() as probe:
        probe.bind((host, 0))
        address = f"{host}:{probe.getsockname()[1]}"
    with ExitStack() as stack:
        receivers: list[Role] = []
        for rank in range(1, count + 1):
            namespace, environ = "", dict[str, str]()
            if links:
                namespace, environ = links.namespace(rank), {INTERFACE: "eth0"}
            arguments = ("gloo", rank, count + 1, address, model.size, model.share)
            made = Role(*arguments, namespace=namespace, environ=environ)
            receivers.append(stack.enter_context(closing(made)))
        if links:
            os.environ[INTERFACE] = links.bridge
            stack.callback(os.environ.pop, INTERFACE)
        dist.init_process_group(
            "gloo", init_method=f"tcp://{address}", rank=0, world_size=count + 1
        )
        stack.callback(dist.destroy_process_group)
        bucket = torch.zeros(GLOO_BUCKET // 2, dtype=torch.bfloat16)
        for receiver in receivers:
            receiver.hear()
        runs: list[Pushed] = []
        for version in range(passes + WARM_UPS):
            step(model, None)
            began = time.monotonic()
            dist.broadcast(torch.tensor([version]), 0)
            broadcast_model(model, bucket, source=True)
            sent_s = time.monotonic() - began
            done = max(receiver.hear()["done_at"] for receiver in receivers)
            runs.append(_pushed(model, done - began, sent_s, done - began))
        dist.broadcast(torch.tensor([-1]), 0)
        return runs[WARM_UPS:]


def _pushed(model: Model, push_s: float, snapshot_s: float, commit_s: float) -> Pushed:
    size = model.nbytes
    floors = model.cast_seconds(), model.copy_seconds()
    return Pushed(push_s, snapshot_s, commit_s, size, size, 0.0, *floors)


def push_files(model: Model, count: int, passes: int) -> list[Pushed]:
    """One safetensors file per version in /dev/shm, read by `count` receivers."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        receivers = [stack.enter_context(closing(Role("files", model.size))) for _ in range(count)]
        for receiver in receivers:
            receiver.hear()
        runs: list[Pushed] = []
        for version in range(passes + WARM_UPS):
            path = folder / f"{version}.safetensors"
            step(model, None)
            began = time.monotonic()
            save_file(model.cast(), path)
            saved_s = time.monotonic() - began
            for receiver in receivers:
                receiver.tell(str(path))
            done = max(receiver.hear()["done_at"] for receiver in receivers)
            path.unlink()
            runs.append(_pushed(model, done - began, saved_s, done - began - saved_s))
        return runs[WARM_UPS:]


def send_plainly(model: Model, passes: int, links: Links) -> list[Pushed]:
    """As many bytes as the model has over one socket, from node 0 to node 1."""
    runs: list[Pushed] = []
    for _ in range(passes):
        with ExitStack() as stack:
            where = links.address(1)
            sink = Role("sink", where, namespace=links.namespace(1))
            stack.callback(sink.close)
            port = sink.hear()["port"]
            source = Role("source", where, port, model.nbytes, namespace=links.namespace(0))
            stack.callback(source.close)
            began = source.hear()["began"]
            runs.append(_pushed(model, sink.hear()["done_at"] - began, 0.0, 0.0))
    return runs
