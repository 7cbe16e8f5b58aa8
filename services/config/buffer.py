"""The broker's section."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from umbra.services.config.keys import Section, key


class BufferConfig(Section):
    """The broker: groups, batches, staleness and leases."""

    ports: tuple[int, int, int] = key(
        (0, 0, 0),
        "of data, events in and events out, beside run.broker; 0 = any free one",
        ge=0,
        le=65535,
    )
    group_size: int = key(8, "samples per prompt", ge=1)
    batch_groups: int = key(32, "groups per optimizer step", ge=1)
    run_ahead: int = key(1, "batches generation may be ahead; 0 = synchronous", ge=0)
    max_staleness: int = key(
        2, "bound on trainer version - version of a sample's oldest token", ge=0, le=65535
    )
    stale_policy: Literal["drop", "wait"] = key(
        "wait",
        "training waits so that no group gets past max_staleness, or one that does is dropped and "
        "replaced, which favours short answers",
    )
    oversample: int = key(0, "groups issued beyond those that batches need", ge=0)
    on_batch: Literal["continue", "interrupt"] = key(
        "continue",
        "samples under way when a batch is full: go on, or come back as partials to go on later",
    )
    straggler_s: float = key(
        0.0,
        "seconds that a group's first sample waits for slow ones, until the group is trained"
        " without them; 0 = it waits for all",
        ge=0,
    )
    min_survivors: ClassVar[int] = 2  # without which a group waits nevertheless
    dynamic_sampling: bool = key(False, "replace groups whose rewards are all equal (DAPO)")
    max_filtered: int = key(256, "groups replaced in a row until one is trained on anyway", ge=1)
    max_failed_share: float = key(
        0.5,
        "the run ends when more than this share of the samples of the last batches failed for "
        "reasons of their own (a reward that raises, say); 1 = never",
        ge=0,
        le=1,
    )
    stages: list[Literal["reward", "ref_logp", "logp"]] = key(
        [], "scoring stages between generation and training, in order"
    )
    lease_s: float = key(30.0, "seconds without a renewal until a sample is taken back", gt=0)
    batch_lease_s: ClassVar[float] = 120.0  # that the trainer may hold a batch in silence
    max_attempts: int = key(5, "leases of one sample until it ends as failed", ge=1)
    dead_after_s: float = key(15.0, "seconds of silence until a member counts as dead", gt=0)
    stall_s: float = key(
        60.0,
        "seconds without progress until a member counts as stuck; a generator whose engine makes"
        " no token in ten times as many ends with exit code 6",
        gt=0,
    )
    store: str = key("", 'folder of the durable store; empty = <run dir>/store, or "memory"')
    store_max_bytes: int = key(
        8 << 30, "bytes in use of the store; no new groups beyond it", ge=64 << 20
    )

    @property
    def engine_stall_s(self) -> float:
        """Seconds that an engine may be busy without a token, until its generator ends itself.

        Or load one version, for which it has those of its bytes at 20 MB/s besides.
        """
        return 10 * self.stall_s

    @property
    def heartbeat_s(self) -> float:
        """Seconds between heartbeats of a service; longer with many members."""
        return min(1.0, self.dead_after_s / 15)

    def faults(self) -> Iterator[str]:
        size = self.group_size
        if self.dynamic_sampling and size == 1:
            yield (
                "buffer.dynamic_sampling replaces every group of one sample, so no batch is ever "
                "full: set buffer.group_size to 2 or more"
            )
        if self.straggler_s and self.min_survivors > size:
            yield (
                f"buffer.straggler_s = {self.straggler_s:g} is for groups of {self.min_survivors} "
                f"samples and more, and buffer.group_size = {size}: set straggler_s to 0"
            )
        bound = self.max_staleness if self.run_ahead else 0
        if self.on_batch == "interrupt" and bound == 0:
            yield (
                "buffer.on_batch = interrupt cannot continue a partial that is strictly on-policy: "
                "set buffer.run_ahead and buffer.max_staleness to 1 or more, or buffer.on_batch to "
                "continue"
            )
        if self.stale_policy == "wait" and self.oversample:
            yield (
                "buffer.stale_policy = wait waits for the spare groups of buffer.oversample as "
                "well: set buffer.oversample to 0, or buffer.stale_policy to drop"
            )
        for stage in sorted(set(self.stages)):
            if self.stages.count(stage) > 1:
                yield f"buffer.stages has {stage} twice"
