"""The process that enters NCCL: `python -m umbra.services.weight_hub.nccl_agent DEVICE`.

Orders come as JSON lines on stdin, one answer each goes to stdout:

    {"op": "facts"}                                        -> {"facts": {...}}
    {"op": "unique_id"}                                    -> {"uid": hex}
    {"op": "attach", "path": P, "slot_bytes": N, "bucket_bytes": N}
    {"op": "join", "epoch": E, "uid": hex, "rank": R, "size": N}
    {"op": "transfer", "epoch": E, "slot": S, "buckets": [[start, end], ...], "deadline_s": T}
                                                           -> {"seconds": ...}
    {"op": "abort"}

Rank 0 sends the slot of its arena, the others receive into theirs. An answer with "error" says what
went wrong. A thread watches stdin while an order is carried out: `abort` works at any time, and the
process ends at once when its owner is gone. If it hangs in NCCL, its owner kills it.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import IO, Any

from umbra.proto.errors import UmbraError, UsageError
from umbra.services.runtime.arena import Arena
from umbra.services.weight_hub import nccl_plane
from umbra.services.weight_hub.nccl_transfer import broadcast

LANES = 2  # device buffers


class Agent:
    """One GPU's end of the communicators, one at a time.

    Args:
        device: index of the GPU.
    """

    def __init__(self, device: int) -> None:
        self._index = device
        self._device: nccl_plane.Device | None = None
        self._communicator: nccl_plane.NcclCommunicator | None = None
        self._epoch = 0
        self._rank = 0
        self._arena: Arena | None = None
        self._pinned: list[int] = []
        self._ring: list[int] = []
        self._orders: dict[str, Callable[..., dict[str, Any]]] = {
            "facts": self.facts,
            "unique_id": self.unique_id,
            "attach": self.attach,
            "join": self.join,
            "transfer": self.transfer,
        }

    def carry_out(self, order: dict[str, Any]) -> dict[str, Any]:
        """Answer one order; whatever goes wrong is in the answer."""
        arguments = dict(order)
        try:
            act = self._orders.get(str(arguments.pop("op", "")))
            if act is None:
                raise UsageError(f"no such order: {order}")
            return act(**arguments)
        except Exception as error:  # noqa: BLE001 - CUDA and NCCL raise what they like
            return {"error": str(error) if isinstance(error, UmbraError) else repr(error)}

    def facts(self) -> dict[str, Any]:
        """What must agree between all agents."""
        found = nccl_plane.facts(self._index)
        return {"facts": {name: getattr(found, name) for name in found.__struct_fields__}}

    def unique_id(self) -> dict[str, Any]:
        """A fresh id for a communicator."""
        return {"uid": nccl_plane.unique_id().hex()}

    def attach(self, path: str, slot_bytes: int, bucket_bytes: int) -> dict[str, Any]:
        """Use the arena at `path`: pin its slots, and have device buffers of a bucket each."""
        device = self._open()
        self._let_go()
        self._arena = Arena.attach(path, slot_bytes=slot_bytes)
        self._pinned = [device.pin(self._arena.slot(i)) for i in range(self._arena.slots)]
        self._ring = [device.allocate(bucket_bytes) for _ in range(LANES)]
        return {}

    def join(self, epoch: int, uid: str, rank: int, size: int) -> dict[str, Any]:
        """Enter the communicator of `epoch`; blocks until all its ranks do."""
        self.abort()
        self._communicator = nccl_plane.NcclCommunicator(
            self._open(), size, bytes.fromhex(uid), rank
        )
        self._epoch, self._rank = epoch, rank
        return {}

    def transfer(
        self, epoch: int, slot: int, buckets: list[tuple[int, int]], deadline_s: float
    ) -> dict[str, Any]:
        """Send or receive one version."""
        if self._communicator is None or epoch != self._epoch or not self._pinned:
            raise UsageError(f"no communicator of epoch {epoch}, or no arena")
        began = time.perf_counter()
        broadcast(
            buckets,
            self._open(),
            self._communicator,
            host=self._pinned[slot],
            ring=self._ring,
            sends=self._rank == 0,
            deadline_s=deadline_s,
        )
        return {"seconds": time.perf_counter() - began}

    def abort(self) -> None:
        """Leave the communicator; if that hangs as well, end the process."""
        communicator, self._communicator = self._communicator, None
        if communicator is not None and not communicator.abort():
            os._exit(UmbraError.exit_code)

    def _open(self) -> nccl_plane.Device:
        if self._device is None:
            self._device = nccl_plane.Device(self._index)
        return self._device

    def _let_go(self) -> None:
        device = self._open()
        for address in self._pinned:
            device.unpin(address)
        for address in self._ring:
            device.free(address)
        self._pinned, self._ring = [], []
        if self._arena is not None:
            self._arena.close()
            self._arena = None


def serve(agent: Agent, orders: IO[str], answers: IO[str]) -> None:
    """Carry out orders until the owner hangs up."""
    waiting: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def watch() -> None:
        for line in orders:
            order = json.loads(line)
            if order.get("op") == "abort":
                agent.abort()  # now, and not when the order before it is done
            waiting.put(order)
        os._exit(0)  # the owner is gone; there may be a thread in NCCL that never returns

    threading.Thread(target=watch, name="orders", daemon=True).start()
    while True:
        order = waiting.get()
        answer = {} if order.get("op") == "abort" else agent.carry_out(order)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    serve(Agent(int(sys.argv[1])), sys.stdin, sys.stdout)
