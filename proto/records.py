"""The records that messages carry: samples, trajectories and the weight manifest.

Token ids, logprobs and masks are little-endian arrays in `bytes` fields (int32, float32 and uint8):
one frame of plain bytes is several times cheaper to pack than a list of numbers.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from umbra.proto.bounds import (
    BRANCHES,
    BUCKETS,
    DIMENSIONS,
    PARTS,
    SPANS,
    STAGES,
    TENSORS,
    Blob,
    Counts,
    Experts,
    Figures,
    Float32s,
    Id,
    Int32s,
    Mask,
    Name,
    Number,
    Row,
    Size,
    Sizes,
    Supported,
    Text,
    keep_to_bounds,
)

PROTOCOL_MAJOR = 7
PROTOCOL_MINOR = 0


class Record(msgspec.Struct, kw_only=True, frozen=True):
    """Base of all records: immutable, keyword-only, unknown fields are skipped when decoded."""


DType = Literal["F32", "BF16", "F16"]


class Kept(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of records that the buffer passes on as they came: it has looked at all in them."""


class Told(Record, frozen=True, kw_only=True):
    """Base of records with sentences or figures, which the sender keeps within their bounds."""

    def __post_init__(self) -> None:
        keep_to_bounds(self)


class Sampling(Kept, frozen=True, kw_only=True):
    """Sampling parameters of tokens. Behaviour logprobs are under exactly this distribution."""

    temperature: Number = 1.0
    top_p: Number = 1.0
    top_k: int = 0
    min_p: Number = 0.0
    max_tokens: int = 256

    @property
    def distribution(self) -> tuple[float, float, int, float]:
        """Return the parameters that determine the distribution of logprobs."""
        return self.temperature, self.top_p, self.top_k, self.min_p

    @property
    def cuts_off(self) -> bool:
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


class VersionSpan(Kept, frozen=True, kw_only=True):
    """Response tokens `[start, end)` were sampled by policy version `version`."""

    version: int
    start: int
    end: int


class Routing(Kept, frozen=True, kw_only=True):
    """Which experts an engine chose for the first R tokens of prompt and response, layer by layer.

    The first pass that read a token decides; one that read it again, after a resume say, does not.
    """

    layers: int  # those with a router, in order
    choices: int  # experts of a token in a layer
    experts: int  # of a layer
    chosen: Experts  # uint8 [R, layers, choices], or uint16 where there are more than 256 experts

    @property
    def token_bytes(self) -> int:
        return routing_bytes(self.layers, self.choices, self.experts)


def routing_bytes(layers: int, choices: int, experts: int) -> int:
    return layers * choices * (1 if experts <= 256 else 2)


class Support(Kept, frozen=True, kw_only=True):
    """Ids that could have been drawn in place of each of T response tokens, K in all.

    Of a distribution that cuts off tokens these are all that it left in. Of any other they are its
    likeliest, the head that score centering asks for, in which the drawn one need not be.
    """

    sizes: Sizes  # uint16 [T], how many of the ids are a token's; 0 where its mask is 0
    ids: Supported  # int32 [K], the likeliest of each token first
    logprobs: Supported | None = None  # float32 [K] by the sampler, if anybody asks for them

    def part(self, start: int, end: int) -> Support:
        sizes = memoryview(self.sizes).cast("H")
        first = 4 * sum(sizes[:start])
        last = first + 4 * sum(sizes[start:end])
        return Support(
            sizes=self.sizes[2 * start : 2 * end],
            ids=self.ids[first:last],
            logprobs=self.logprobs and self.logprobs[first:last],
        )

    @property
    def nbytes(self) -> int:
        return len(self.sizes) + len(self.ids) + len(self.logprobs or b"")


class Branch(Kept, frozen=True, kw_only=True):
    """One more line of tokens of a sample whose conversation has several; fields of `Trajectory`.

    Tokens that it shares with another line are in both.
    """

    prompt_ids: Int32s  # int32 [P]
    response_ids: Int32s  # int32 [T]
    loss_mask: Mask  # uint8 [T]
    logprobs: Float32s  # float32 [T], behaviour logprobs
    spans: Annotated[list[VersionSpan], Meta(max_length=SPANS)]
    support: Support | None = None


class Trajectory(Kept, frozen=True, kw_only=True):
    """A rollout of one sample, complete or partial. P prompt and T response tokens.

    Environment tokens of later turns are response tokens too, with mask 0 and logprob 0. `spans`
    cover `[0, T)` exactly, in order.

    A sample whose agent has edited its history, or talked several times, is several lines of
    tokens: this one and its `branches`. Reward and all else belong to the sample.
    """

    sample_id: Id
    group_id: Id
    prompt_id: Id
    attempt: int
    prompt_ids: Int32s  # int32 [P]
    response_ids: Int32s  # int32 [T]
    loss_mask: Mask  # uint8 [T]
    logprobs: Float32s  # float32 [T], behaviour logprobs
    spans: Annotated[list[VersionSpan], Meta(max_length=SPANS)]
    finish_reason: Name  # "stop", "length", "turns", or "partial"
    reward: float = 0.0
    reward_parts: Annotated[dict[Id, float], Meta(max_length=PARTS)] = {}
    turns: int = 1
    ref_logprobs: Float32s | None = None  # float32 [T]; further lines follow
    proximal_logprobs: Float32s | None = None  # the same
    proximal_version: int = -1  # of the policy that gave proximal_logprobs
    routing: Routing | None = None  # of all tokens, at most P + T - 1, that a learned one follows
    support: Support | None = None  # of the first line
    scored: Annotated[list[Id], Meta(max_length=STAGES)] = []  # stages that are done, in order
    sampling: Sampling = Sampling()
    generator: Name = ""
    started_at: Number = 0.0  # seconds since the epoch
    finished_at: Number = 0.0
    branches: Annotated[list[Branch], Meta(max_length=BRANCHES - 1)] = []  # further lines

    @property
    def response_tokens(self) -> int:
        """Return T, environment tokens included, without the tokens of `branches`."""
        return len(self.response_ids) // 4

    @property
    def sample_tokens(self) -> int:
        """Return the response tokens of all branches; shared ones count twice."""
        return self.response_tokens + sum(len(branch.response_ids) // 4 for branch in self.branches)

    @property
    def lines(self) -> list[Trajectory]:
        """Return each line of the sample as a trajectory of its own; itself if there is one."""
        if not self.branches:
            return [self]
        lines: list[Trajectory] = []
        start = 0
        for line in (self, *self.branches):
            end = start + len(line.response_ids)  # four bytes per token, as float32 have
            lines.append(
                replace(
                    self,
                    **{name: getattr(line, name) for name in Branch.__struct_fields__},
                    ref_logprobs=self.ref_logprobs and self.ref_logprobs[start:end],
                    proximal_logprobs=self.proximal_logprobs and self.proximal_logprobs[start:end],
                    branches=[],
                )
            )
            start = end
        return lines

    @property
    def oldest_version(self) -> int:
        """Policy version of the oldest token of any line; staleness is measured from it."""
        spans = self._spans  # mostly one
        return spans[0].version if len(spans) == 1 else min([span.version for span in spans])

    @property
    def newest_version(self) -> int:
        spans = self._spans
        return spans[0].version if len(spans) == 1 else max([span.version for span in spans])

    @property
    def _spans(self) -> list[VersionSpan]:
        if not self.branches:
            return self.spans
        return [*self.spans, *(span for branch in self.branches for span in branch.spans)]


def array_bytes(trajectory: Trajectory | None) -> int:
    if trajectory is None:
        return 0
    routing = trajectory.routing
    total = len(trajectory.ref_logprobs or b"") + len(trajectory.proximal_logprobs or b"")
    total += len(routing.chosen) if routing is not None else 0
    for line in (trajectory, *trajectory.branches):
        total += len(line.prompt_ids) + len(line.response_ids) + len(line.loss_mask)
        total += len(line.logprobs) + (line.support.nbytes if line.support is not None else 0)
    return total


SAMPLE = "sample"  # kind of a task to generate; the others are scoring stages


class Task(Record, frozen=True, kw_only=True):
    """A sample to generate or score, and the lease on it: `(kind, sample_id, attempt)`."""

    kind: Name = SAMPLE  # or a scoring stage
    sample_id: Id
    attempt: int  # counts leases, to generators or to scorers; results under older ones are refused
    group_id: Id
    prompt_id: Id
    row: Row  # the JSONL row: "prompt" and whatever else the environment needs
    lease_s: Number
    trajectory: Trajectory | None = None  # to score, or to continue from
    pinned_version: int = -1  # of an eval sample: every token must be of this version

    @property
    def made(self) -> Trajectory:
        assert self.trajectory is not None
        return self.trajectory


class Score(Told, Kept, frozen=True, kw_only=True):
    """A scorer's result for one trajectory of T response tokens, or the `error` it ran into."""

    sample_id: Id
    attempt: int
    reward: float = 0.0
    reward_parts: Annotated[dict[Id, float], Meta(max_length=PARTS)] = {}
    logprobs: Float32s | None = None  # float32 [T], 0 where loss_mask is 0; line by line
    version: int = -1  # of the weights, in stage "logp"
    error: Text = ""


def with_score(trajectory: Trajectory, stage: str, score: Score) -> Trajectory:
    """Return `trajectory` with the result of `stage`: the reward is added, logprobs are set."""
    if stage == "reward":
        parts = trajectory.reward_parts | score.reward_parts
        found: dict[str, Any] = {"reward": trajectory.reward + score.reward, "reward_parts": parts}
    elif stage == "ref_logp":
        found = {"ref_logprobs": score.logprobs}
    else:
        found = {"proximal_logprobs": score.logprobs, "proximal_version": score.version}
    return replace(trajectory, scored=[*trajectory.scored, stage], **found)


class TensorEntry(Record, frozen=True, kw_only=True, gc=False):
    name: Name
    dtype: DType  # safetensors' names: "F32", "BF16", ...
    shape: Annotated[list[Size], Meta(max_length=DIMENSIONS)]
    offset: Size  # in a version's slot
    nbytes: Size


class AdapterFacts(Record, frozen=True, kw_only=True):
    """Factors of a version: each weight W of the base becomes W + alpha / rank * B A."""

    base: Name  # checksum of the base's files (`weights_checksum`), in hex
    rank: Size
    alpha: Number


class Manifest(Record, frozen=True, kw_only=True):
    """Layout of one version of the weights; agreed once between trainer, hub and receivers.

    `buckets` are byte ranges `[start, end)` that cover `[0, total_bytes)` in order; each has a
    checksum of its own in a push. `owners` says which trainer host holds each, if not all host 0.
    """

    tensors: Annotated[list[TensorEntry], Meta(max_length=TENSORS)]
    buckets: Annotated[list[tuple[Size, Size]], Meta(max_length=BUCKETS)]
    total_bytes: Size
    digest: Name  # of the layout: xxh3-128, hex
    owners: Annotated[list[Size], Meta(max_length=BUCKETS)] = []
    adapter: AdapterFacts | None = None  # whose factors the tensors are; None: whole weights


class GpuFacts(Record, frozen=True, kw_only=True):
    """Facts that must agree before two processes enter NCCL together, and this process's GPU."""

    nccl: int  # version code of the library that is loaded, 0 where there is none
    cuda_major: int
    # The NCCL_* that decide how ranks communicate.
    variables: Annotated[dict[Name, Text], Meta(max_length=128)] = {}
    device: Name = ""  # which of its host


class BucketsAt(Record, frozen=True, kw_only=True):
    endpoint: Name
    key: Blob  # to the hub the source's secret; to a receiver a grant made of it, for it alone


class NcclRound(Record, frozen=True, kw_only=True):
    """One broadcast over plane `nccl`, as one rank takes part; the hub is rank 0 and sends."""

    epoch: int  # names the communicator; a rank that is not in it yet enters it first
    uid: Blob  # by which it is made, once
    rank: int
    size: int
    chunk_bytes: int
    deadline_s: Number  # for entering, and for each chunk


class Ledger(Record, frozen=True, kw_only=True):
    """Samples by state. `issued == trained + sum(ended) + in_flight` at every moment."""

    issued: int = 0
    trained: int = 0
    ended: Counts = {}  # by reason: stale, filtered, failed, cancelled
    in_flight: Counts = {}  # by state: queued, generating, scoring, ready, training

    @property
    def balance(self) -> int:
        return self.issued - self.trained - sum(self.ended.values()) - sum(self.in_flight.values())


class EvalReport(Told, frozen=True, kw_only=True):
    """An evaluation of one policy version; it is final when `done`."""

    version: int
    done: bool
    samples: int  # to be drawn
    answered: int = 0
    ended: Counts = {}  # the others that are over, by reason
    accuracy: Number = 0.0  # mean reward of the answered samples, a failed one counting as 0
    scores: Figures = {}  # pass@k and mean@k over the prompts, by name


assert sys.byteorder == "little", "umbra needs a little-endian machine, as the wire is"


def pack_int32(values: Sequence[int]) -> bytes:
    return array("i", values).tobytes()


def pack_float32(values: Sequence[float]) -> bytes:
    return array("f", values).tobytes()


def unpack_int32(data: bytes) -> list[int]:
    return memoryview(data).cast("i").tolist()


def unpack_float32(data: bytes) -> list[float]:
    return array("f", data).tolist()


Role = Literal["buffer", "generator", "scorer", "trainer", "weight_hub", "part", "relay", "monitor"]
State = Literal["starting", "joining", "ready", "draining", "stopped", "failed"]


class Header(Record, frozen=True, kw_only=True):
    """First frame of every message."""

    major: int
    minor: int
    type: Name
    id: int  # counts up per sender and incarnation; a resend keeps its id
    sender: Name
    incarnation: Name  # changes at every start of a process: a new one supersedes the old
    reply_to: int | None = None
    sent_at: Number = 0.0  # seconds since the epoch


class Message(Told, frozen=True, kw_only=True):
    """Base of all message bodies; the name of the class is the header's `type`."""
