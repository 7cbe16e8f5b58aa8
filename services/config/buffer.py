"""The broker's section."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from umbra.services.config.base import Section

Port = Annotated[int, Meta(ge=0, le=65535)]


class BufferConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The broker: groups, batches, staleness and leases."""

    ports: Annotated[
        tuple[Port, Port, Port],
        Meta(description="of data, events in and events out, beside run.broker; 0 = any free one"),
    ] = (0, 0, 0)
    advertise: Annotated[
        str,
        Meta(
            description="host name or address by which others reach these ports, where it is not "
            "the one that is bound (containers); empty = the bound one, or this host's name"
        ),
    ] = ""
    group_size: Annotated[int, Meta(description="samples per prompt", ge=1)] = 8
    batch_groups: Annotated[int, Meta(description="groups per optimizer step", ge=1)] = 32
    run_ahead: Annotated[
        int, Meta(description="batches generation may be ahead; 0 = synchronous", ge=0)
    ] = 1
    min_ess: Annotated[
        float,
        Meta(
            description="run_ahead is lowered while the trainer's effective share of samples (ess) "
            "is below this, and raised again after; 0 = never",
            ge=0,
            lt=1,
        ),
    ] = 0.0
    max_staleness: Annotated[
        int, Meta(description="bound on trainer version - version of a sample's oldest token", ge=0)
    ] = 2
    stale_policy: Annotated[
        Literal["drop", "restart", "wait"],
        Meta(
            description="what is past max_staleness: its group is dropped and replaced, its stale "
            "samples are generated anew, or training waits so that nothing gets there"
        ),
    ] = "drop"
    partial_policy: Annotated[
        Literal["restart", "drop"],
        Meta(description="a partial past a limit: its sample starts anew, or its group is dropped"),
    ] = "restart"
    partial_max_segments: Annotated[
        int, Meta(description="times a sample may come back unfinished; 0 = any number", ge=0)
    ] = 0
    partial_max_age_s: Annotated[
        float, Meta(description="seconds from the first token of a partial; 0 = any age", ge=0)
    ] = 0.0
    oversample: Annotated[
        int, Meta(description="groups issued beyond those that batches need", ge=0)
    ] = 0
    on_batch: Annotated[
        Literal["continue", "interrupt", "cut"],
        Meta(
            description="samples under way when a batch is full: go on, come back as partials to "
            "go on later, or (cut) the oversampled groups that lag behind are cancelled"
        ),
    ] = "continue"
    straggler: Annotated[
        Literal["wait", "survivors"],
        Meta(description="a group with slow samples waits, or is trained without them"),
    ] = "wait"
    straggler_s: Annotated[
        float, Meta(description="seconds that a group's first sample waits for the rest", gt=0)
    ] = 60.0
    min_survivors: Annotated[
        int, Meta(description="samples without which a group waits nevertheless", ge=1)
    ] = 2
    dynamic_sampling: Annotated[
        bool, Meta(description="replace groups whose rewards are all equal (DAPO)")
    ] = False
    max_filtered: Annotated[
        int, Meta(description="groups replaced in a row until one is trained on anyway", ge=1)
    ] = 256
    max_failed_share: Annotated[
        float,
        Meta(
            description="the run ends when more than this share of the samples of the last batches "
            "failed for reasons of their own (a reward that raises, say); 1 = never",
            ge=0,
            le=1,
        ),
    ] = 0.5
    prompt_attempts: Annotated[
        int,
        Meta(
            description="failed or filtered groups of a prompt until it is drawn no more; 0 = any",
            ge=0,
        ),
    ] = 0
    sampling: Annotated[
        Literal["fifo", "freshest", "replay"],
        Meta(
            description="groups of a batch: first complete first, newest tokens first, or (replay) "
            "first complete first, filled up with groups that were trained on before"
        ),
    ] = "fifo"
    replay_times: Annotated[
        int,
        Meta(description="batches that a group may be in while it is fresh; for replay", ge=2),
    ] = 2
    batch_tokens: Annotated[
        int,
        Meta(
            description="response tokens that fill a batch, batch_groups being the most groups; "
            "0 = always batch_groups",
            ge=0,
        ),
    ] = 0
    stages: Annotated[
        list[Literal["reward", "ref_logp", "logp"]],
        Meta(description="scoring stages between generation and training, in order"),
    ] = []
    score_lease_s: Annotated[
        float, Meta(description="seconds without a renewal until a scorer loses a sample", gt=0)
    ] = 60.0
    score_attempts: Annotated[
        int, Meta(description="attempts to score a sample until it ends as failed", ge=1)
    ] = 3
    lease_s: Annotated[
        float, Meta(description="seconds without a renewal until a sample is taken back", gt=0)
    ] = 30.0
    batch_lease_s: Annotated[
        float, Meta(description="seconds the trainer may hold a batch without a heartbeat", gt=0)
    ] = 120.0
    max_attempts: Annotated[
        int, Meta(description="leases of one sample until it ends as failed", ge=1)
    ] = 5
    heartbeat_s: Annotated[
        float,
        Meta(
            description="seconds between heartbeats of a service; longer with many members, "
            "up to a third of dead_after_s",
            gt=0,
        ),
    ] = 1.0
    dead_after_s: Annotated[
        float, Meta(description="seconds of silence until a member counts as dead", gt=0)
    ] = 15.0
    stall_s: Annotated[
        float, Meta(description="seconds without progress until a member counts as stuck", gt=0)
    ] = 60.0
    store: Annotated[
        str,
        Meta(description='folder of the durable store; empty = <run dir>/store, or "memory"'),
    ] = ""
    store_max_bytes: Annotated[
        int, Meta(description="disk space of the store; no new groups beyond it", ge=64 << 20)
    ] = 8 << 30
