"""What the broker tells people: what a batch waits for, and what is overdue."""

from __future__ import annotations

from umbra.proto.messages import Stuck
from umbra.services.buffer.leases import Leases
from umbra.services.buffer.membership import Membership
from umbra.services.buffer.samples import Pool, Sample, State

SHOWN = 20  # overdue samples named at once, the oldest


def waiting_for(
    pool: Pool, leases: Leases, members: Membership, batch_groups: int, now: float
) -> str:
    """Why the batch is not there, in words: how much of it is, and the oldest sample missing."""
    text = f"{min(len(pool.complete), batch_groups)} of {batch_groups} groups complete; "
    generators = [peer for peer in members.peers.values() if peer.role == "generator"]
    sample = _oldest_open(pool)
    if sample is not None and sample.state is State.GENERATING:
        who, age_s = sample.holder, now - sample.leased_at
        return text + f"waiting for sample {sample.sample_id} held by {who} for {age_s:.1f} s"
    if not generators:
        return text + "no generator has joined"
    if sample is None:
        return text + "no generator has asked for the next samples with new enough weights"
    version = leases.required_version(sample)
    return text + (
        f"sample {sample.sample_id} is queued for a generator that has room and serves "
        f"version {max(version, 0)} or newer"
    )


def overdue_samples(pool: Pool, lease_s: float, now: float) -> list[Stuck]:
    """Samples that were held, and renewed, for more than two leases; the oldest `SHOWN`."""
    overdue = [
        sample
        for held in pool.held.values()
        for sample in held.values()
        if now - sample.leased_at > 2 * lease_s
    ]
    overdue.sort(key=lambda sample: sample.leased_at)
    return [
        Stuck(
            what=f"sample {sample.sample_id} of group {sample.group.group_id}, "
            f"attempt {sample.attempt}",
            holder=sample.holder,
            age_s=now - sample.leased_at,
            action=f"goes to another after {lease_s:g} s without a renewal",
        )
        for sample in overdue[:SHOWN]
    ]


def _oldest_open(pool: Pool) -> Sample | None:
    for group in pool.groups.values():
        if group.group_id not in pool.complete:
            return next(s for s in group.samples if s.state is not State.READY)
    return None
