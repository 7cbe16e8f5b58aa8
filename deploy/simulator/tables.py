"""The sections of a simulated cluster's file that a run file does not have."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from umbra.deploy.simulator.lengths import Lengths

_Seconds = Annotated[float, Meta(ge=0)]
_Rate = Annotated[float, Meta(gt=0)]
_Count = Annotated[int, Meta(ge=1)]


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections."""


class ClusterTable(Table, frozen=True, kw_only=True):
    """The machines. GPUs of the trainer come first, then those of `ref_logp` and `logp` scorers."""

    gpus: _Count
    gpus_per_node: _Count = 8
    # 0 = colocated: training and generation take turns on all GPUs, which needs run_ahead = 0.
    trainer_gpus: Annotated[int, Meta(ge=0)]
    generator_gpus: _Count = 1  # of one engine
    scorer_gpus: Annotated[int, Meta(ge=0)] = 0  # in all, one scorer on each


class DecodeSpeed(Table, frozen=True, kw_only=True):
    """One engine. A step over n sequences takes `step_s + token_s * n` and, for prompt tokens that
    it reads, `prompt_token_s` each; as `services/generator/replay_model.py`, whose file may be
    named instead of the numbers.
    """

    replay: str = ""
    step_s: Annotated[float, Meta(ge=0)] = 0.0
    token_s: _Seconds = 0.0
    prompt_token_s: _Seconds = 0.0
    pause_s: _Seconds = 0.0  # new weights stop decoding for so long


class TrainingSpeed(Table, frozen=True, kw_only=True):
    """An optimizer step over n tokens, prompts included: `step_s + n / (tokens_per_s * GPUs)`."""

    step_s: _Seconds = 0.0
    tokens_per_s: Annotated[float, Meta(ge=0)] = 0.0  # of one GPU; 0 = tokens cost nothing
    snapshot_s: _Seconds = 0.0
    checkpoint_s: _Seconds = 0.0  # what training waits for one
    switch_s: _Seconds = 0.0  # colocated: from generation to training, and back again

    def of(self, gpus: int, colocated: bool) -> TrainingSpeed:
        """The speed of a trainer on `gpus`, which takes turns with the generators or does not."""
        return msgspec.structs.replace(
            self,
            tokens_per_s=self.tokens_per_s * gpus,
            switch_s=self.switch_s if colocated else 0.0,
        )


class ScoringSpeed(Table, frozen=True, kw_only=True):
    """A scorer. Trajectories of n tokens together take `seconds + n / tokens_per_s`."""

    workers: _Count = 1  # of stage "reward"; the others have `cluster.scorer_gpus`
    seconds: _Seconds = 0.0
    tokens_per_s: Annotated[float, Meta(ge=0)] = 0.0


class Network(Table, frozen=True, kw_only=True):
    """Between nodes and within them, and what travels."""

    weight_bytes: Annotated[float, Meta(ge=0)] = 0.0
    wire_share: Annotated[float, Meta(gt=0, le=1)] = 1.0  # of them travels: less with deltas
    bytes_per_s: _Rate = 12.5e9  # of a node's link
    local_bytes_per_s: _Rate = 10e9  # from a node's arena into an engine's memory
    latency_s: _Seconds = 100e-6  # of a message
    spread_s: _Seconds = 0.0  # engines have a version up to so much later than they could


class BrokerSpeed(Table, frozen=True, kw_only=True):
    """The buffer's one thread. A request takes `message_s`, and `trajectory_s` for each trajectory
    in it; its bytes pass link and disk at `bytes_per_s`, in and out. Replies leave `commit_s` after
    that, when what they promise is on the disk. Defaults: docs/benchmarks.md.
    """

    message_s: _Seconds = 60e-6
    trajectory_s: _Seconds = 60e-6
    commit_s: _Seconds = 5e-3
    bytes_per_s: _Rate = 1.0e9


class Speed(Table, frozen=True, kw_only=True):
    """How long everything takes."""

    decode: DecodeSpeed
    training: TrainingSpeed
    scoring: dict[Literal["reward", "ref_logp", "logp"], ScoringSpeed] = {}
    network: Network = Network()
    broker: BrokerSpeed = BrokerSpeed()


class Samples(Table, frozen=True, kw_only=True):
    """What is generated."""

    lengths: Lengths | None = None  # of responses; not needed with speed.decode.replay
    prompt_tokens: Annotated[int, Meta(ge=0)] = 256
    environment_s: _Seconds = 0.0  # mean (exponential) until the answer is rewarded, without a slot
    level_share: Annotated[float, Meta(ge=0, le=1)] = 0.0  # of groups: all rewards are equal


class FailureTable(Table, frozen=True, kw_only=True):
    """How often each process of a kind dies, and when it has started again."""

    mtbf_s: _Rate  # mean time between failures (exponential)
    recovery_s: _Seconds


Kind = Literal["generator", "node", "trainer", "buffer"]


class Tables(Table, frozen=True, kw_only=True):
    """All of them."""

    cluster: ClusterTable
    speed: Speed
    samples: Samples = Samples()
    failures: dict[Kind, FailureTable] = {}
