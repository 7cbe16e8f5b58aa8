"""One rank of a sharded trainer: takes a step, then writes its rows of two snapshots.

Started as torchrun would. Arguments: the hub's endpoint and a folder, in which rank 0,
which publishes, leaves the gathered weights of each version as `<version>.safetensors`.
"""

from __future__ import annotations

import os
import sys
import uuid
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from umbra.proto.net.io_thread import IoThread
from umbra.services.trainer.distributed.ranks import Ranks
from umbra.services.trainer.snapshot import Snapshots, tensor_layout, write_shards
from umbra.services.weights.manifest import build_manifest
from umbra.services.weights.publisher import Publisher

WAIT_S = 600.0  # the test that started it gives up first
BUCKET = 512  # smaller than many rows, so that buckets hold rows of several ranks


class Block(nn.Module):
    """Seven rows, one row, a bias of five: none is divisible by the number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 7)
        self.middle = nn.Linear(7, 1, bias=False)
        self.down = nn.Linear(1, 12)
        self.register_buffer("scale", torch.linspace(0.1, 1.7, 12))
        self.register_buffer("hidden", torch.ones(3), persistent=False)
        self.register_buffer("steps", torch.tensor(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.middle(self.up(x))) * self.get_buffer("scale")


class Model(nn.Module):
    """Embedding and head are one tensor; its rows are larger than a bucket of `BUCKET` bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 12)
        self.wide = nn.Linear(300, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(12, 31, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x).sum() + self.wide(x.new_ones(300)).sum()


def gathered(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights that a gather would send: collective, all ranks must call it."""
    whole = {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().bfloat16().clone()
        for name, p in model.named_parameters()
    }
    return whole | {name: b.clone() for name, b in model.named_buffers() if name.endswith("scale")}


def main(endpoint: str, folder: Path) -> None:
    """Two versions: one before any forward pass, one after a step and one more forward pass."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    torch.manual_seed(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/group", rank=rank, world_size=world
    )
    ranks = Ranks(rank, world)
    mesh = init_device_mesh("cpu", (world,))
    model = Model()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    manifest = build_manifest(tensor_layout(model, "bfloat16"), BUCKET)
    snapshots = Snapshots(model, manifest, ranks)
    link = IoThread("trainer", uuid.uuid4().hex)
    publisher = Publisher(link.channel(endpoint, "weight hub"), manifest)
    if rank == 0:
        publisher.register(WAIT_S)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for version in range(2):
        if version:
            model(torch.arange(6) + rank).backward()
            optimizer.step()
            model(torch.arange(6))  # leaves the root gathered
        slot = place = None
        if rank == 0:
            slot = publisher.slot(version, WAIT_S)
            place = publisher.place
            if version == 0:
                slot[:] = b"\xaa" * len(slot)  # every byte of a tensor must be written
        place = ranks.spread(place, tuple[str, int])
        assert place is not None
        sums = snapshots.write(place, slot)
        if rank == 0:
            publisher.publish(version, 0.0, sums)
        whole = gathered(model)
        if rank == 0:
            save_file(whole, folder / f"{version}.safetensors")
    memory = memoryview(bytearray(manifest.total_bytes))
    written = write_shards(model, manifest, memory, rank, world)
    (folder / f"written-{rank}").write_text(str(written))
    publisher.close()
    snapshots.close()
    link.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
