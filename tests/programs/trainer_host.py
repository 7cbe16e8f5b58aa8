"""Ranks of one trainer host: they write their share of a version, and compute its checksums.

Usage: trainer_host.py MANIFEST OWNER

Reads a line of JSON per version: the arena's path, the slot, and a file with all bytes. Answers
with the checksum of each bucket of its own, and how many bytes of memory the arena takes.
"""

import json
import sys
from pathlib import Path

import msgspec

from umbra.proto.records import Manifest
from umbra.services.weights.arena import Arena
from umbra.services.weights.manifest import checksum, owned_buckets

manifest = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Manifest)
own = owned_buckets(manifest)[int(sys.argv[2])]
arena: Arena | None = None
print("up", flush=True)
for line in sys.stdin:
    order = json.loads(line)
    if arena is None or str(arena.path) != order["path"]:
        arena = Arena.attach(order["path"], slot_bytes=manifest.total_bytes)
    data, slot = Path(order["file"]).read_bytes(), arena.slot(order["slot"])
    sums: dict[int, int] = {}
    for bucket in own:
        start, end = manifest.buckets[bucket]
        slot[start:end] = data[start:end]
        sums[bucket] = checksum(slot[start:end])
    print(json.dumps({"sums": sums, "memory": arena.path.stat().st_blocks * 512}), flush=True)
