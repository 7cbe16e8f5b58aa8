"""The broker as a whole in the store: written after every poll, read at the start."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from umbra.proto.errors import UsageError
from umbra.services.buffer.data.prompts import Prompts
from umbra.services.buffer.endpoints.evaluation import Evaluations
from umbra.services.buffer.endpoints.trainer import TrainerEndpoint
from umbra.services.buffer.health import Health
from umbra.services.buffer.membership import Membership
from umbra.services.buffer.policy.batches import Batches
from umbra.services.buffer.policy.pause import PauseSwitch
from umbra.services.buffer.policy.run_ahead import RunAhead
from umbra.services.buffer.policy.staleness import StalenessStats
from umbra.services.buffer.samples.pool import SamplePool
from umbra.services.buffer.store.api import StoreError
from umbra.services.buffer.store.journal import Journal

REPAIRED = "repaired"  # key that tells that the store was mended: see `repair`
PROMPTS = "c/"  # prefix of the keys of what is known about prompts
MEMBER = "m/"  # prefix of the keys of members

log = logging.getLogger(__name__)


class Recovery:
    """Saves and restores the parts of one broker.

    Args:
        run: what must be the same when the run goes on, `run_id` and sizes.
    """

    def __init__(
        self,
        journal: Journal,
        *,
        run: dict[str, Any],
        pool: SamplePool,
        batches: Batches,
        members: Membership,
        training: TrainerEndpoint,
        run_ahead: RunAhead,
        health: Health,
        evals: Evaluations,
        gate: PauseSwitch,
        prompts: Prompts,
        counters: Counter[str],
    ) -> None:
        self.finished = ""  # why the run is over, once it is
        self._journal = journal
        self._run = run
        self._pool = pool
        self._batches = batches
        self._members = members
        self._training = training
        self._run_ahead = run_ahead
        self._health = health
        self._evals = evals
        self._gate = gate
        self._prompts = prompts
        self._counters = counters
        self._last: dict[str, Any] = {}

    def save(self) -> None:
        """Write what has changed since the last time; the caller commits."""
        for name in self._members.changed:
            record = self._members.record(name)
            if record is None:
                self._journal.store.delete(MEMBER + name)
            else:
                self._journal.write(MEMBER + name, record)
        self._members.changed.clear()
        changed = self._journal.save()
        changed |= self._evals.journal.save()
        for name, value in self._prompts.changes().items():
            self._journal.write(PROMPTS + name, value)
        now = self._now()
        if changed or now != self._last:
            self._last = now
            self._journal.write("now", now)

    def restore(self, now: float) -> bool:
        """Take over the state in the store; whether there was any.

        Raises:
            UsageError: the store is of another run, or of one with other sizes.
            StoreError: the store does not fit together.
        """
        run = self._journal.read("run")
        if run is None:
            self._journal.write("run", self._run)
            return False
        _check_same(run, self._run)
        record = self._journal.read("now")
        if record is None:
            return False
        repaired = self._journal.read(REPAIRED) is not None
        self._restore_counts(record)
        groups, mended = self._journal.load(mend=repaired)
        live = {group.group_id: group for group in groups}
        mended += self._batches.restore(live, self._journal.trajectories(), now)
        groups = list(live.values())
        self._pool.restore(groups, now)
        mended += self._evals.restore(record["evals"], mend=repaired, now=now)
        members = self._journal.store.keys(MEMBER)
        self._members.restore([self._journal.read(key) for key in sorted(members)], now)
        kept = self._journal.store.keys(PROMPTS)
        self._prompts.seek(
            record["prompts"], {key.removeprefix(PROMPTS): self._journal.read(key) for key in kept}
        )
        if mended and not repaired:
            raise StoreError(f"the store does not fit together: {mended[0]}")
        for line in mended:
            log.warning("%s", line)
        self._settle(repaired=repaired)
        if repaired:
            self._journal.store.delete(REPAIRED)
        return True

    def _now(self) -> dict[str, Any]:
        pool, batches = self._pool, self._batches
        return {
            "issued": pool.ledger.issued,
            "trained": pool.ledger.trained,
            "replayed": pool.ledger.replayed,
            "ended": dict(pool.ledger.ended),
            "next_group": pool.next_group,
            "next_sample": pool.next_sample,
            "completions": pool.completions,
            "filtered_in_a_row": pool.filtered_in_a_row,
            "evals": self._evals.record(),
            "version": batches.version,
            "newest": batches.newest,
            "checkpoint": batches.checkpoint,
            "staleness": batches.trained.sums(),
            "last_staleness": batches.last.sums(),
            "committer": self._training.committer,
            "run_ahead": self._run_ahead.record(),
            "health": self._health.record(),
            "prompts": self._prompts.position(),
            "finished": self.finished,
            "paused": self._gate.reason,
            "vocabulary": self._training.facts.vocabulary,
            "counters": dict(self._counters),
        }

    def _restore_counts(self, record: dict[str, Any]) -> None:
        pool, batches = self._pool, self._batches
        pool.ledger.issued = record["issued"]
        pool.ledger.trained = record["trained"]
        pool.ledger.replayed = record["replayed"]
        pool.ledger.ended.update(record["ended"])
        pool.next_group = record["next_group"]
        pool.next_sample = record["next_sample"]
        pool.completions = record["completions"]
        pool.filtered_in_a_row = record["filtered_in_a_row"]
        batches.version = record["version"]
        batches.newest = record["newest"]
        batches.checkpoint = record["checkpoint"]
        batches.trained = StalenessStats(**record["staleness"])
        batches.last = StalenessStats(**record["last_staleness"])
        self._training.committer = record["committer"]
        self._run_ahead.restore(record["run_ahead"])
        self._health.restore(record.get("health", {}))
        self.finished = record["finished"]
        self._gate.shut(record["paused"])
        self._training.facts.learn(record.get("vocabulary", 0))
        self._counters.update(record["counters"])

    def _settle(self, *, repaired: bool) -> None:
        """Balance the ledger: what a repair has lost ends as `lost`, anything else is a fault."""
        ledger = self._pool.ledger
        missing = ledger.snapshot().balance
        if missing < 0 and repaired:  # the newest counts were lost, what they counted was not
            log.warning("%d samples are taken up that the ledger had not counted yet", -missing)
            ledger.issued -= missing
        elif missing > 0 and repaired:
            ledger.ended["lost"] += missing
            log.warning("%d samples were lost with the damaged part of the store", missing)
        elif missing:
            raise StoreError(
                f"the store does not fit together: {missing} samples are unaccounted for"
            )


def _check_same(before: dict[str, Any], now: dict[str, Any]) -> None:
    for key, value in now.items():
        if before.get(key) != value:
            raise UsageError(
                f"the store is of a run with {key} = {before.get(key)}, this one has {value}: "
                "choose another --run-dir, or go on with the settings of before"
            )
