"""What others do: gloo broadcasts, and safetensors files in /dev/shm.

They start from the same float32 tensors as we do, learn before each push and warm up as often.
"""

from __future__ import annotations

import socket
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from weight_model import Model
from weight_pushes import WARM_UPS, Pushed, role
from weight_roles import GLOO_BUCKET, broadcast_model


def push_gloo(model: Model, count: int, passes: int, lr: float) -> list[Pushed]:
    """Broadcasts of 64 MiB buckets to `count` receivers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with ExitStack() as stack:
        receivers = [
            stack.enter_context(closing(role("gloo", rank, count + 1, port, model.size)))
            for rank in range(1, count + 1)
        ]
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=count + 1
        )
        stack.callback(dist.destroy_process_group)
        bucket = torch.zeros(GLOO_BUCKET // 2, dtype=torch.bfloat16)
        for receiver in receivers:
            receiver.hear()
        runs: list[Pushed] = []
        for version in range(passes + WARM_UPS):
            changed = model.learn(lr)
            began = time.monotonic()
            dist.broadcast(torch.tensor([version]), 0)
            broadcast_model(model, bucket, source=True)
            sent_s = time.monotonic() - began
            done = max(receiver.hear()["done_at"] for receiver in receivers)
            runs.append(_pushed(model, done - began, sent_s, done - began, changed))
        dist.broadcast(torch.tensor([-1]), 0)
        return runs[WARM_UPS:]


def _pushed(
    model: Model, push_s: float, snapshot_s: float, commit_s: float, changed: float
) -> Pushed:
    size = model.nbytes
    floors = model.cast_seconds(), model.copy_seconds()
    return Pushed(push_s, snapshot_s, commit_s, size, size, changed, *floors)


def push_files(model: Model, count: int, passes: int, lr: float) -> list[Pushed]:
    """One safetensors file per version in /dev/shm, read by `count` receivers."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        receivers = [stack.enter_context(closing(role("files", model.size))) for _ in range(count)]
        for receiver in receivers:
            receiver.hear()
        runs: list[Pushed] = []
        for version in range(passes + WARM_UPS):
            path = folder / f"{version}.safetensors"
            changed = model.learn(lr)
            began = time.monotonic()
            save_file(model.cast(), path)
            saved_s = time.monotonic() - began
            for receiver in receivers:
                receiver.tell(str(path))
            done = max(receiver.hear()["done_at"] for receiver in receivers)
            path.unlink()
            runs.append(_pushed(model, done - began, saved_s, done - began - saved_s, changed))
        return runs[WARM_UPS:]
