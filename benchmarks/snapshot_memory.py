"""How much memory a rank of a sharded trainer needs beyond its shard while it takes a snapshot.

    python benchmarks/snapshot_memory.py [--json FILE] [--size-mib 512] [--ranks 1,2,3]
        [--bucket-mib 4]

A float32 model, sharded by FSDP2 over gloo ranks, is written as bfloat16 into an arena: by
`write_shards`, and by gathering every parameter and then all of them on rank 0, as is often done.
The kernel's own peak of the resident set is taken (`VmHWM`, reset before each method). The arena is
mapped and in the page tables before, so that what grows is private memory alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from report import Report
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from umbra.services.trainer.snapshot import tensor_layout, write_shards
from umbra.services.weights.arena import Arena
from umbra.services.weights.manifest import build_manifest

MIB = 1 << 20
WIDTH, LAYERS = 1024, 8
SLACK_MIB = 2.0  # page tables, the interpreter's own
METHODS = ("write_shards", "gather each", "gather all")


def make_model(size_mib: int) -> nn.Module:
    """Layers of two matrices with a row count that no number of ranks divides."""
    rows = size_mib * MIB // (4 * LAYERS * 2 * WIDTH) + 1
    layers = [nn.Sequential(nn.Linear(WIDTH, rows), nn.Linear(rows, WIDTH)) for _ in range(LAYERS)]
    return nn.Sequential(*layers)


def memory(field: str) -> int:
    """Bytes of a line of /proc/self/status."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def reset_peak() -> int:
    """Let the peak begin anew; the resident set now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return memory("VmRSS")


@torch.no_grad()
def write(
    method: str, model: nn.Module, arena: Arena, manifest: Any, rank: int, world: int
) -> None:
    """Fill slot 0."""
    slot = arena.slot(0)
    if method == "write_shards":
        write_shards(model, manifest, slot, rank, world)
        return
    parameters = dict(model.named_parameters())
    if method == "gather all":
        parameters = {name: _full(p) for name, p in parameters.items()}
    for entry in manifest.tensors:
        full = _full(parameters[entry.name])
        if rank == 0:
            area = slot[entry.offset : entry.offset + entry.nbytes]
            torch.frombuffer(area, dtype=torch.bfloat16).view(entry.shape).copy_(full)


def _full(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()


def run_rank(rank: int, world: int, folder: str, path: str, size_mib: int, bucket: int) -> None:
    """Measure each method; print a JSON line for each."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/group", rank=rank, world_size=world
    )
    model = make_model(size_mib)
    if world > 1:
        mesh = init_device_mesh("cpu", (world,))
        for layer in model.children():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    manifest = build_manifest(tensor_layout(model, "bfloat16"), bucket)
    arena = Arena.attach(path, slot_bytes=manifest.total_bytes)
    shard = sum((p.to_local() if isinstance(p, DTensor) else p).nbytes for p in model.parameters())
    for method in METHODS:
        dist.barrier()
        before = reset_peak()
        began = time.perf_counter()
        write(method, model, arena, manifest, rank, world)
        seconds = time.perf_counter() - began
        extra = memory("VmHWM") - before
        print(json.dumps({"method": method, "shard": shard, "extra": extra, "seconds": seconds}))
    dist.barrier()
    arena.close()
    dist.destroy_process_group()


def measure(world: int, size_mib: int, bucket: int) -> dict[str, list[dict[str, Any]]]:
    """Each method's line of every rank."""
    manifest = build_manifest(tensor_layout(make_model(size_mib), "bfloat16"), bucket)
    run_id = f"bench-{uuid.uuid4().hex[:8]}"
    arena = Arena.create(run_id, "weights", slot_bytes=manifest.total_bytes, slots=1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            ranks = [
                subprocess.Popen(
                    [sys.executable, __file__, "--rank", str(rank), str(world), folder,
                     str(arena.path), str(size_mib), str(bucket)],
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
                )
                for rank in range(world)
            ]  # fmt: skip
            texts = [rank.communicate()[0] for rank in ranks]
    finally:
        arena.unlink()
        arena.close()
    rows = [json.loads(line) for text in texts for line in text.splitlines()]
    return {method: [row for row in rows if row["method"] == method] for method in METHODS}


def summarise(report: Report) -> None:
    """The table, and the goal: one bucket, and what the interpreter needs."""
    extra = {(row["ranks"], row["method"]): row["extra_mib"] for row in report.rows}
    shards = {row["ranks"]: row["shard_mib"] for row in report.rows}
    rows = [[n, shard, *(extra[n, method] for method in METHODS)] for n, shard in shards.items()]
    columns = ["gather-free", "gather each tensor", "gather all on rank 0"]
    report.table("memory", ["ranks", "shard MiB", *columns], rows)
    bound = report.facts["bucket_mib"] + SLACK_MIB
    for ranks in shards:
        name = f"MiB beyond the shard, {ranks} rank{'s' if ranks > 1 else ''}"
        report.goal(name, extra[ranks, METHODS[0]], "<=", bound)


def main() -> int:
    """Run it; 1 if a goal is missed."""
    if sys.argv[1:2] == ["--rank"]:
        rank, world, folder, path, size_mib, bucket = sys.argv[2:]
        run_rank(int(rank), int(world), folder, path, int(size_mib), int(bucket))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--size-mib", type=int, default=512)
    parser.add_argument("--ranks", default="1,2,3")
    parser.add_argument("--bucket-mib", type=int, default=4)
    options = parser.parse_args()
    report = Report("snapshot_memory")
    for world in map(int, options.ranks.split(",")):
        measured = measure(world, options.size_mib, options.bucket_mib * MIB)
        for method, rows in measured.items():
            worst = max(row["extra"] for row in rows) / MIB
            report.add(
                method=method,
                ranks=world,
                model_mib=options.size_mib,
                shard_mib=max(row["shard"] for row in rows) / MIB,
                extra_mib=worst,
                seconds=max(row["seconds"] for row in rows),
            )
    report.facts["bucket_mib"] = options.bucket_mib
    report.restate(summarise)
    return 0 if report.show(options.json) else 1


if __name__ == "__main__":
    sys.exit(main())
