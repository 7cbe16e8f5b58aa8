"""The weight hub's section."""

from __future__ import annotations

from typing import ClassVar, Literal

from umbra.proto.deadline import LEAST_RATE, Pace
from umbra.services.config.keys import Section, key

START_S = 600.0  # for all processes of a run to start, besides what their weights take


class WeightHubConfig(Section):
    """Versions, arena and pushes."""

    listen: str = key(
        "tcp://127.0.0.1:*",
        "address the hub binds, with the next port for plane tcp; port * picks free ones",
    )
    plane: Literal["auto", "shm", "tcp", "nccl", "cuda_ipc"] = key(
        "auto", "how weights travel; auto = best that both sides have"
    )
    bucket_bytes: int = key(4 << 20, "bytes per bucket (one checksum each)", ge=1024)
    receive_bucket_bytes: int = key(
        4 << 20, "bytes per message over plane tcp, chosen by the receiver", ge=1024
    )
    connections: ClassVar[int] = 2  # of a receiver to one source over plane tcp
    delta: Literal["auto", "always", "off"] = key(
        "auto", "plane tcp sends lossless differences: over slow links, over all, never"
    )
    device: ClassVar[int] = 0  # index of the GPU that the hub and each relay use
    chunk_bytes: ClassVar[int] = 64 << 20  # of a broadcast over plane nccl; two in device memory
    slots: int = key(2, "versions held in the arena", ge=2)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key(
        "auto", "what is served; auto = bfloat16 from and to GPUs, float32 on CPUs"
    )
    deadline_s: float = key(
        30.0,
        "seconds a receiver may take per phase until it is dropped, besides those for its bytes"
        " (least_rate)",
        gt=0,
    )
    least_rate: ClassVar[float] = LEAST_RATE  # bytes per second; deadlines grow with bytes by it

    @property
    def pace(self) -> Pace:
        return Pace(self.deadline_s, self.least_rate)

    def first_version_s(self, nbytes: int) -> float:
        """How long a receiver may wait for its first version, if the trainer has yet to start.

        Args:
            nbytes: of the model, which is read, has `slots` of its size allocated, and is written
                to one of these and brought to the receiver.
        """
        return self.pace.after(START_S).limit_s((3 + self.slots) * nbytes)

    def dtype_on(self, kind: str) -> Literal["float32", "bfloat16", "float16"]:
        if self.dtype == "auto":
            return "bfloat16" if kind == "cuda" else "float32"
        return self.dtype

    def expected_on(self, kind: str) -> str:
        """The dtype that such a process has to be served; "" if it takes what there is.

        With "auto" trainer and receivers decide each for itself, and may differ.
        """
        return self.dtype_on(kind) if self.dtype == "auto" else ""
