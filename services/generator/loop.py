"""The generator's main loop: keeps the engine full, and changes its weights between two tokens.

One turn: answers of the buffer, new weights, a question for more work, one step of the engine,
results out. Nothing in a turn waits, unless there is nothing to do at all. New weights wait for an
evaluation of the version that is served: its samples must be of that version alone.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from umbra.proto.errors import UmbraError, foreseen
from umbra.proto.net.session import Session
from umbra.proto.net.task_client import TaskClient
from umbra.proto.records import Task
from umbra.services.config import GeneratorConfig
from umbra.services.generator.activity import Activity, StallWatch
from umbra.services.generator.engines.engine import EngineError, KvPolicy
from umbra.services.generator.runner import RolloutRunner, returned
from umbra.services.weights.receiver import Receiver, StagedVersion

DRAIN_S = 10.0  # to hand back unfinished samples
RELOAD_S = 60.0  # for another version, where one changed while it was loaded
_IDLE_WAIT_S, _REST_S = 0.005, 0.1  # with samples, without: buffer and receiver wake us
_STATS_EVERY_S = 1.0
_FAILURES_LOGGED = 20
# Samples that wait for slow environments take no slot; more than this many times the slots are not
# leased unless `generator.sessions` says so, or an environment that is too slow would pile them up.
_MOST_ACTIVE = 4

log = logging.getLogger(__name__)


class GeneratorLoop:
    """The loop over engine, rollouts, buffer and weights.

    With `kv_policy` "drain", samples under way are ended before new weights are loaded, and none
    are begun.
    """

    def __init__(
        self,
        *,
        session: Session,
        receiver: Receiver,
        buffer: TaskClient,
        runner: RolloutRunner,
        config: GeneratorConfig,
        watch: StallWatch,
        activity: Activity,
    ) -> None:
        self._session, self._receiver, self._buffer = session, receiver, buffer
        self._engine, self._runner = runner.engine, runner
        self._watch, self._activity, self._clock = watch, activity, activity.clock
        self._drains = config.kv_policy == "drain"
        self._kv_policy: KvPolicy = "keep" if config.kv_policy == "drain" else config.kv_policy
        self._staged: StagedVersion | None = None  # to be loaded once all samples have ended
        self._prefetch = config.prefetch
        self._most = config.sessions or _MOST_ACTIVE * runner.engine.slots + config.prefetch
        self._finished = self._failed = 0
        self._stats_at = self._clock()
        self._stats_tokens = 0

    def run(self) -> None:
        """Turn until asked to stop, then hand back unfinished samples.

        Raises:
            EngineError: the engine broke, or an unforeseen error occurred. Finished samples are
                delivered; others go on with the rest from where it was flushed last.
            UmbraError: the buffer refused our work, or the weights do not fit.
        """
        try:
            while not self._session.stopping.is_set():
                self.turn()
        except UmbraError as error:
            if isinstance(error, EngineError):
                self._deliver_last()
            raise
        except Exception as error:
            self._deliver_last()
            raise EngineError(str(foreseen(error, "the generator"))) from error
        if self._session.failure is None:  # else nobody is there to take anything back
            self.drain(self._session.stop_reason or "stopped")

    def turn(self) -> None:
        """Do one turn; wait a few milliseconds if there is nothing to do."""
        started = self._clock()
        tasks, lost = self._buffer.poll()
        self._runner.drop(lost)
        self._take(tasks)
        self._load_weights()
        for interrupt in self._buffer.interrupts():
            self._runner.interrupt(interrupt.leases, interrupt.reason)
        self._buffer.ask(self._asked(), self._engine.version)
        if self._engine.busy:
            self._session.waits("decoding")
        before = self._engine.decoded_tokens
        self._runner.poll(_IDLE_WAIT_S)
        tokens = self._engine.decoded_tokens - before
        self._deliver()
        self._buffer.save(self._runner.flush())
        self._buffer.renew(lambda: self._runner.leases)
        if tokens or self._engine.busy:
            if tokens:
                self._session.progress("decoding", tokens)
            self._activity.decoding(started, tokens)
        else:
            self._idle(started)
        self._report()

    def drain(self, reason: str) -> None:
        """Deliver finished samples and give back the rest, partials included."""
        self._activity.close()
        self._deliver()
        self._buffer.give_back(self._runner.drain(reason))
        late = self._buffer.flush(DRAIN_S)
        self._buffer.give_back([returned(task, reason) for task in late])
        self._buffer.flush(DRAIN_S)

    def _deliver_last(self) -> None:
        """Deliver finished samples before an engine that broke is lost."""
        try:
            self._deliver()
            self._buffer.flush(DRAIN_S)
        except Exception:
            log.exception("finished samples could not be submitted")

    def _load_weights(self) -> None:
        self._receiver.check()  # also while no weights are wanted
        if self._staged is None and not self._keeps_version():
            self._staged = self._receiver.poll()
        if self._staged is None or (self._drains and self._runner.active):
            return
        staged, self._staged = self._staged, None
        self._buffer.deliver()  # the trainer may wait for just these
        start = self._clock()

        def apply(staged: StagedVersion) -> None:
            manifest, version = staged.manifest, staged.version
            self._session.progress(f"loading version {version}", 0)
            self._watch.loading = manifest.total_bytes
            self._engine.load(manifest, staged.data, version, self._kv_policy, staged.guard)
            self._watch.loading = 0
            self._session.progress("decoding", 0)

        loaded = self._receiver.load(staged, apply, RELOAD_S, self._session.stopping)
        if loaded is None:
            return
        end = self._clock()
        self._activity.loaded(start, end, loaded.version)
        self._session.emit("weights", version=loaded.version, commit_s=end - start)

    def _keeps_version(self) -> bool:
        """True while an evaluation of the served version needs us: new weights wait so long.

        The buffer ends it in time: then its leases are lost, and with them the reason to wait.
        """
        if self._runner.pinned:
            return True
        return self._buffer.more_pinned(self._engine.version) and self._capacity() > 0

    def _take(self, tasks: Sequence[Task]) -> None:
        """Begin these samples, but for those that only other weights than ours may generate.

        None while new weights wait for those under way.
        """
        version = self._engine.version
        versions = (-1, version) if self._staged is None else ()
        self._runner.add(task for task in tasks if task.pinned_version in versions)
        why = f"the generator is about to replace version {version}"
        others = [task for task in tasks if task.pinned_version not in versions]
        self._buffer.give_back([returned(task, why) for task in others])

    def _asked(self) -> int:
        """Return how many samples to ask for: none before weights are loaded or while some wait."""
        return self._capacity() if self._engine.version >= 0 and self._staged is None else 0

    def _capacity(self) -> int:
        room = self._engine.slots + self._prefetch - self._runner.wanting
        return min(room, self._most - self._runner.active)

    def _deliver(self) -> None:
        finished, back = self._runner.results()
        self._buffer.submit(finished, self._asked(), self._engine.version)
        self._buffer.give_back(back)
        self._finished += len(finished)
        for sample in back:
            if sample.failed:
                self._failed += 1
                if self._failed <= _FAILURES_LOGGED:
                    log.warning("sample %s: %s", sample.sample_id, sample.reason)
                self._session.emit("sample_failed", sample=sample.sample_id, reason=sample.reason)

    def _idle(self, started: float) -> None:
        if self._engine.version < 0:
            reason, activity = "weights", "waiting for weights"
        elif self._runner.active:
            reason, activity = "environment", "waiting for environments"
        else:
            reason, activity = "work", "waiting for samples"
        self._session.progress(activity, 0)
        self._buffer.wait(_IDLE_WAIT_S if self._runner.active else _REST_S)
        self._activity.idle(started, reason)

    def _report(self) -> None:
        engine, now = self._engine, self._clock()
        elapsed = now - self._stats_at
        if elapsed < _STATS_EVERY_S:
            return
        tokens = engine.decoded_tokens
        self._session.stats(
            decoded_per_s=(tokens - self._stats_tokens) / elapsed,
            live=min(self._runner.wanting, engine.slots),
            active=self._runner.active,
            version=engine.version,
            finished=self._finished,
            failed=self._failed,
            refused=self._buffer.refused,
        )
        self._stats_at, self._stats_tokens = now, tokens
