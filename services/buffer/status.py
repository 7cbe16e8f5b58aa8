"""The state of the whole run, for those who watch it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from msgspec.structs import replace

from umbra.proto.messages import State, Status
from umbra.proto.net.zap import Refusals
from umbra.services.buffer.meter import Throughput
from umbra.services.buffer.stalls import StallReport
from umbra.services.buffer.state import RunState
from umbra.services.buffer.store.quota import DiskQuota

FRESH_S = 0.2  # all who ask within this time get the same: any number may watch


class StatusPage:
    """Looks at a broker; changes nothing.

    Args:
        wire_counters: counted by the sockets' side; shown with the broker's own.
        refusals: of those who lack the right key.
    """

    def __init__(
        self,
        run: RunState,
        report: StallReport,
        room: DiskQuota,
        *,
        run_id: str,
        events: str,
        started_at: float,
        wire_counters: Mapping[str, int],
        refusals: Refusals,
    ) -> None:
        self.state: State = "ready"
        self.ending = ""  # why the run ends, once it does
        self._run = run
        self._members = run.members
        self._report = report
        self._room = room
        self._run_id = run_id
        self._events = events
        self._started_at = started_at
        self._wire_counters = wire_counters
        self._refusals = refusals
        self._throughput = Throughput(run.counts, started_at)
        self._last: Status | None = None
        self._last_at = 0.0

    def tick(self, now: float) -> None:
        """Take note of the time at which counts change."""
        self._throughput.see(now)

    def recent(self, now: float, *, finished: bool) -> Status:
        """The state of a moment ago at the oldest; state and pause are always those of now."""
        if self._last is None or now - self._last_at >= FRESH_S:
            self._last, self._last_at = self.status(now, finished=finished), now
        return replace(
            self._last,
            state=self.state,
            paused=self._run.paused,
            ending=self.ending,
            finished=finished,
        )

    def status(self, now: float, *, finished: bool) -> Status:
        """The state at `now`; `finished` says whether the run has reached its goal."""
        run = self._run
        last = run.batches.last.figures()
        return Status(
            run_id=self._run_id,
            state=self.state,
            uptime_s=now - self._started_at,
            version=run.batches.version,
            steps=run.config.run.steps,
            ledger=run.pool.ledger.snapshot(),
            members=[peer.record(now) for peer in self._members.peers.values()],
            departed=dict(self._members.departed),
            staleness={
                **run.batches.trained.figures(),
                "last_mean": last["mean"],
                "last_max": last["max"],
                "bound": float(run.policy.bound),
                "typical": float(run.policy.typical),
            },
            counters=dict(Counter(run.counters) + Counter(self._wire_counters)),
            stuck=[
                *self._members.stuck(now),
                *self._room.stuck(now),
                *self._report.stuck(now),
            ],
            evals=run.evals.status(),
            eval_ledger=run.evals.pool.ledger.snapshot(),
            weights=self._members.hub[0],
            staleness_counts=list(run.batches.trained.counts),
            curves=run.curves.record(),
            events=self._events,
            refused=dict(self._refusals.counts),
            rates=self._throughput.rates(now),
            health=run.health.figures(),
            warnings=run.health.warnings(),
            paused=run.paused,
            ending=self.ending,
            finished=finished,
        )
