"""The state of the whole run for its monitors, with the work that a batch waits for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from umbra.proto.messages import Status, Stuck
from umbra.proto.net.server import Refusals
from umbra.proto.net.session import FAILED
from umbra.services.buffer.health import Throughput
from umbra.services.buffer.samples.groups import Group, Sample, State
from umbra.services.buffer.state import DiskQuota, RunState

RETURN_S = 600.0  # for a generator to take the place of one that others started and that failed
SHOWN = 20  # scorers named at once
FRESH_S = 0.2  # all who ask within this time get the same: any number may watch


class StallReport:
    """The work that `run` waits for, in words and as overdue entries."""

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._members = run.members
        self._config = run.buffer

    def missing(self, now: float) -> str:
        run, wanted = self._run, self._config.batch_groups
        complete = len(run.pool.complete)
        text = f"{min(complete, wanted)} of {wanted} groups complete; "
        if run.evals.pausing:
            return text + "training waits for an evaluation (eval.mode = pause)"
        _, late = run.batches.urgent()
        if late and complete >= wanted:
            text += f"group {late[0].group_id} would be stale after it (stale_policy = wait); "
            return text + self._open_group(late[0], now)
        for group in run.pool.groups.values():
            if not group.completed:
                return text + self._open_group(group, now)
        if absence := self._absence:
            return text + absence
        if run.pool.filtered_in_a_row:
            return text + f"the last {run.pool.filtered_in_a_row} groups were filtered"
        return text + "no generator has asked for the next samples with new enough weights"

    @property
    def _absence(self) -> str:
        """Return why there is no generator; empty if there is one."""
        members = self._members
        if any(peer.role == "generator" for peer in members.peers.values()):
            return ""
        if (last := members.last_generator) is None:
            return "no generator has joined"
        return f"no generator is left ({last.name}: {members.departed.get(last.name, 'gone')})"

    def stuck(self, now: float) -> list[Stuck]:
        return [
            *self._generators(now),
            *self._batches(now),
            *self._scoring(now),
            *self._run.evals.stuck(now, self._config.stall_s),
        ]

    def _open_group(self, group: Group, now: float) -> str:
        sample = next(sample for sample in group.samples if sample.state is not State.READY)
        return self._open_sample(sample, now)

    def _open_sample(self, sample: Sample, now: float) -> str:
        pool, name = self._run.pool, sample.sample_id
        age_s = now - sample.leased_at
        if sample.state is State.GENERATING:
            return f"waiting for sample {name} held by {sample.holder} for {age_s:.1f} s"
        if sample.state is State.SCORING:
            stage = pool.stage_of(sample)
            if not pool.scored_with(sample):
                missing = next(
                    other
                    for other in sample.group.samples
                    if other.state is not State.SCORING or other.stage != sample.stage
                )
                why = self._open_sample(missing, now)
                return f"stage {stage} waits for all of its group: {why}"
            if not sample.holder:
                return f"sample {name} waits for a scorer of stage {stage}"
            return (
                f"waiting for sample {name} in stage {stage}, held by {sample.holder} for "
                f"{age_s:.1f} s"
            )
        if absence := self._absence:
            return absence
        version = max(self._run.batches.required_version(sample), 0)
        return (
            f"sample {name} is queued for a generator that has room and serves version {version} "
            "or newer"
        )

    def _generators(self, now: float) -> Iterator[Stuck]:
        """Yield an entry if none is left and others start them; a run restarts its own."""
        last, what = self._members.last_generator, self._absence
        if last is None or not what or self._run.config.generator.count:
            return
        age_s, failed = now - last.heard_at, f"({last.name}: {FAILED}" in what
        hopeless = what if failed and age_s > RETURN_S else ""
        action = "none: start one"
        yield Stuck(what=what, holder="nobody", age_s=age_s, action=action, hopeless=hopeless)

    def _batches(self, now: float) -> Iterator[Stuck]:
        batches, since = self._run.batches, self._run.wanted_since
        trainer = self._members.single.get("trainer")
        name = trainer.name if trainer is not None else "nobody"
        if since is not None and now - since > self._config.stall_s:
            what = f"batch of step {batches.next_step}: {self.missing(now)}"
            yield Stuck(what=what, holder=name, age_s=now - since, action="none: it waits")
        batch = batches.leased
        if batch is not None and (age_s := now - batch.formed_at) > self._config.batch_lease_s:
            what = f"batch of step {batch.step}, not committed"
            action = f"{name} gets it again when it asks"
            yield Stuck(what=what, holder=name, age_s=age_s, action=action)

    def _scoring(self, now: float) -> Iterator[Stuck]:
        """Yield stages without a scorer, or in which trajectories wait too long."""
        for stage in self._config.stages:
            since = min(
                (
                    sample.unscored_since
                    for pool in self._run.pools
                    for sample in pool.unscored.get(stage, ())
                    if pool.is_unscored(sample, stage)
                ),
                default=None,
            )
            peers = self._members.peers.values()
            at_work = sorted(peer.name for peer in peers if peer.stage == stage)
            if since is None or (at_work and now - since <= self._config.stall_s):
                continue
            what = f"stage {stage}: {self._run.waiting(stage)} samples wait"
            what += "" if at_work else ", but no scorer of it has joined"
            action = f"none: start {'more of ' if at_work else ''}`umbra scorer --stage {stage}`"
            holder = ", ".join(at_work[:SHOWN]) or "nobody"
            yield Stuck(what=what, holder=holder, age_s=now - since, action=action)


@dataclass(eq=False)
class StatusPage:
    run: RunState
    room: DiskQuota
    run_id: str
    events: str
    started_at: float
    wire_counters: Mapping[str, int]
    refusals: Refusals

    def __post_init__(self) -> None:
        self.throughput = Throughput(self.run.counts, self.started_at)
        self._report = StallReport(self.run)
        self._last: Status | None = None
        self._last_at = 0.0

    def recent(self, now: float) -> Status:
        """Return the status, at most `FRESH_S` old; the state is current."""
        if self._last is None or now - self._last_at >= FRESH_S:
            self._last, self._last_at = self.status(now), now
        run = self.run
        return replace(
            self._last,
            state=run.state,
            ending=run.ending,
            finished=bool(run.finished),
        )

    def status(self, now: float) -> Status:
        run, members = self.run, self.run.members
        last = run.batches.last.figures()
        return Status(
            run_id=self.run_id,
            state=run.state,
            uptime_s=now - self.started_at,
            version=run.batches.version,
            steps=run.config.run.steps,
            ledger=run.pool.ledger.snapshot(),
            members=[peer.record(now) for peer in members.peers.values()],
            departed=dict(members.departed),
            staleness={
                **run.batches.trained.figures(),
                "last_mean": last["mean"],
                "last_max": last["max"],
                "bound": float(run.policy.bound),
                "typical": float(run.policy.typical),
            },
            counters=dict(Counter(run.counters) + Counter(self.wire_counters)),
            stuck=[*members.stuck(now), *self.room.stuck(now), *self._report.stuck(now)],
            evals=run.evals.status(),
            weights=members.hub[0],
            staleness_counts=list(run.batches.trained.counts),
            curves=run.curves.record(),
            events=self.events,
            refused=dict(self.refusals.counts),
            rates=self.throughput.rates(now),
            health=run.health.figures(),
            warnings=run.health.warnings(),
            ending=run.ending,
            finished=bool(run.finished),
        )
