"""Which member may ask for what on the data socket; the rest is for everyone."""

from __future__ import annotations

from umbra.proto.messages import (
    CheckpointSaved,
    CommitBatch,
    FinishRun,
    FlushPartials,
    LeaseBatch,
    LeaseSamples,
    LeaseScoring,
    Message,
    RenewLeases,
    ReturnSamples,
    Role,
    SubmitScores,
    SubmitTrajectories,
)

ROLES: dict[type[Message], tuple[Role, ...]] = {
    LeaseSamples: ("generator",),
    SubmitTrajectories: ("generator",),
    ReturnSamples: ("generator",),
    FlushPartials: ("generator",),
    RenewLeases: ("generator", "scorer"),
    LeaseScoring: ("scorer",),
    SubmitScores: ("scorer",),
    LeaseBatch: ("trainer",),
    CommitBatch: ("trainer",),
    CheckpointSaved: ("trainer",),
    FinishRun: ("trainer",),
}
