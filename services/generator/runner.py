"""Many rollouts at once, through one engine and a pool of environments; no socket, no buffer.

What a rollout waits for is its `phase`; this class brings engine outputs and environment outcomes
to the rollouts they belong to. A dropped rollout leaves nothing but answers that nobody wants.
"""

from __future__ import annotations

from collections.abc import Iterable

from umbra.proto.messages import ReturnedSample
from umbra.proto.records import SampleTask, Trajectory
from umbra.services.environments.pool import EnvironmentPool, EpisodeOutcome
from umbra.services.environments.protocol import Opening, SampleError, StepResult
from umbra.services.environments.turn_request import Ask, Begun, Lost, RefusedError
from umbra.services.generator.engines.engine import Engine, EngineOutput
from umbra.services.generator.rollout import Phase, Rollout, RolloutSettings


class RolloutRunner:
    """Runs `SampleTask`s to trajectories.

    Args:
        engine: where model turns are made.
        pool: where environments run.
        settings: what all rollouts share.
        flush_tokens: tokens by which a sample grows until `flush` gives a partial of it; 0 = never.
    """

    def __init__(
        self,
        engine: Engine,
        pool: EnvironmentPool,
        settings: RolloutSettings,
        flush_tokens: int = 0,
    ) -> None:
        self.engine = engine
        self._pool = pool
        self._settings = settings
        each = (settings, *settings.several.values())
        self._timed = any(one.limits.seconds for one in each)
        self._flush_tokens = flush_tokens
        self._rollouts: dict[str, Rollout] = {}
        self._flushed: dict[str, int] = {}  # by sample: its tokens when it was flushed last
        self._due: dict[str, int] = {}  # by sample in the engine: tokens there when it is due again
        self._grown: list[str] = []  # samples that ended a turn and are due
        self._watched: dict[str, int] = {}  # by sample in the engine: tokens there to look at next
        self._prompt_tokens = 0
        self._turn_lengths: list[int] = []
        self._leaving: dict[str, str] = {}  # by sample to be handed back: why
        self._moved: list[ReturnedSample] = []
        self._finished: list[Trajectory] = []
        self._failed: list[ReturnedSample] = []

    @property
    def active(self) -> int:
        """Samples under way, in the engine or with their environment."""
        return len(self._rollouts)

    @property
    def busy(self) -> bool:
        """Whether the engine has something to do."""
        return self.engine.busy

    @property
    def wanting(self) -> int:
        """Of those, the ones that take a slot of the engine, or will at once.

        One whose agent has begun asks for a turn when it likes, as between two turns.
        """
        return sum(
            r.phase is Phase.GENERATE or (r.phase is Phase.RESET and not r.begun)
            for r in self._rollouts.values()
        )

    @property
    def pinned(self) -> bool:
        """Whether samples are under way that only the weights of now may generate."""
        return any(rollout.task.pinned_version >= 0 for rollout in self._rollouts.values())

    @property
    def prompt_tokens(self) -> int:
        """Tokens that the engine was given to read so far."""
        return self._prompt_tokens

    @property
    def leases(self) -> list[tuple[str, int]]:
        """`(sample_id, attempt)` of the samples under way."""
        return [_lease(rollout) for rollout in self._rollouts.values()]

    def add(self, tasks: Iterable[SampleTask]) -> None:
        """Begin these samples; one that is under way already starts over."""
        for task in tasks:
            if (old := self._rollouts.get(task.sample_id)) is not None:
                self.drop([(task.sample_id, old.task.attempt)])
            try:
                rollout = Rollout(task, self._settings.of(task.row))
            except SampleError as error:
                self._fail(task, str(error))
                continue
            self._rollouts[task.sample_id] = rollout
            self._flushed[task.sample_id] = rollout.tokens
            self._advance(rollout)

    def collect(self) -> None:
        """Take in what the environments have answered."""
        for outcome in self._pool.collect():
            self._environment_answered(outcome)

    def poll(self, timeout_s: float) -> None:
        """One step of the engine, and what follows from it."""
        self.collect()
        self._expire()
        if self.engine.busy:
            self.take(self.engine.poll(timeout_s))
            self._look()
            self.collect()

    def take(self, outputs: Iterable[EngineOutput]) -> None:
        """Outputs of the engine go to their rollouts."""
        for output in outputs:
            rollout = self._rollouts.get(output.request_id)
            if rollout is not None:
                self._due.pop(output.request_id, None)
                self._watched.pop(output.request_id, None)
                rollout.generated(output)
                if output.finish_reason != "abort" or rollout.phase is not Phase.GENERATE:
                    self._turn_lengths.append(rollout.turn_tokens)
                if self._may_flush(rollout) and self._unsaved(rollout) >= self._flush_tokens:
                    self._grown.append(output.request_id)
                self._advance(rollout)

    def turn_lengths(self) -> list[int]:
        """Tokens of each turn that the engine ended since the last call."""
        lengths, self._turn_lengths = self._turn_lengths, []
        return lengths

    def results(self) -> tuple[list[Trajectory], list[ReturnedSample]]:
        """Finished samples and failed ones since the last call."""
        finished, self._finished = self._finished, []
        failed, self._failed = self._failed, []
        return finished, failed

    def drop(self, leases: Iterable[tuple[str, int]]) -> None:
        """Forget these `(sample_id, attempt)`: their lease is not ours any more."""
        gone: list[Rollout] = []
        for sample_id, attempt in dict.fromkeys(leases):  # two answers may name the same
            rollout = self._rollouts.get(sample_id)
            if rollout is not None and rollout.task.attempt == attempt:
                gone.append(rollout)
        if gone:
            self.engine.abort([rollout.task.sample_id for rollout in gone])
        for rollout in gone:
            self._forget(rollout)

    def flush(self) -> list[Trajectory]:
        """Partials of the samples that have grown by `flush_tokens` since they were flushed last.

        Call it after every `poll`, so that none grows much further unseen.
        """
        partials: list[Trajectory] = []
        for output in self.engine.peek(self._due) if self._due else ():
            rollout = self._rollouts[output.request_id]
            self._flushed[output.request_id] = rollout.tokens + len(output.token_ids)
            self._due[output.request_id] = len(output.token_ids) + self._flush_tokens
            partials.append(rollout.trajectory(output))
        # Turns that end as soon as they begin are never seen in the engine.
        for name in self._grown:
            rollout = self._rollouts.get(name)
            if rollout is None or rollout.branched:
                continue
            if self._unsaved(rollout) >= self._flush_tokens:
                self._flushed[name] = rollout.tokens
                partials.append(rollout.trajectory())
                if name in self._due:
                    self._due[name] = self._flush_tokens
        self._grown.clear()
        return partials

    def interrupt(self, leases: Iterable[tuple[str, int]], reason: str) -> None:
        """Stop these `(sample_id, attempt)`; `moved` gives them back, with the tokens there are.

        Those whose environment was told something go on until it has answered the turn under way:
        what it did for that turn would have to be done again elsewhere.
        """
        wanted = set(leases)
        hit = [rollout for rollout in self._rollouts.values() if _lease(rollout) in wanted]
        self._moved += self._hand_back([r for r in hit if r.movable], reason)
        later = (rollout for rollout in hit if not rollout.movable)
        self._leaving.update((rollout.task.sample_id, reason) for rollout in later)

    def moved(self) -> list[ReturnedSample]:
        """The interrupted samples that stopped since the last call."""
        moved, self._moved = self._moved, []
        return moved

    def drain(self, reason: str) -> list[ReturnedSample]:
        """Stop everything and hand back what is unfinished, with the tokens there are."""
        return self._hand_back(list(self._rollouts.values()), reason)

    def _hand_back(self, rollouts: list[Rollout], reason: str) -> list[ReturnedSample]:
        for output in self.engine.abort([r.task.sample_id for r in rollouts]) if rollouts else ():
            self._rollouts[output.request_id].generated(output)
        for rollout in rollouts:
            self._forget(rollout)
        return [
            ReturnedSample(
                sample_id=rollout.task.sample_id,
                attempt=rollout.task.attempt,
                reason=reason,
                partial=rollout.partial() if rollout.task.pinned_version < 0 else None,
            )
            for rollout in rollouts
        ]

    def _forget(self, rollout: Rollout) -> None:
        del self._rollouts[rollout.task.sample_id]
        del self._flushed[rollout.task.sample_id]
        self._leaving.pop(rollout.task.sample_id, None)
        self._due.pop(rollout.task.sample_id, None)
        self._watched.pop(rollout.task.sample_id, None)
        self._pool.forget(rollout.session)
        for session in rollout.engine_sessions:
            self.engine.forget(session)

    def _advance(self, rollout: Rollout) -> None:
        """Do what the rollout waits for."""
        match rollout.phase:
            case Phase.RESET:
                self._pool.play(rollout.session, rollout.task.row, [])
            case Phase.GENERATE:
                self._generate(rollout)
            case Phase.STEP if rollout.ask is not None:
                rollout.ask.reply(rollout.turn())
            case Phase.STEP:
                self._pool.play(rollout.session, rollout.task.row, rollout.responses())
            case Phase.DONE:
                self._forget(rollout)
                self._finished.append(rollout.trajectory())

    def _generate(self, rollout: Rollout) -> None:
        request = rollout.request()
        try:
            self.engine.submit([request])
        except ValueError as error:
            self._forget(rollout)
            self._fail(rollout.task, f"prompt {rollout.task.prompt_id}: {error}")
        else:
            self._prompt_tokens += len(request.prompt_ids)
            if rollout.watched:
                self._watched[request.request_id] = 1
            if self._may_flush(rollout):
                due = self._flush_tokens - self._unsaved(rollout)
                self._due[request.request_id] = max(1, due)

    def _look(self) -> None:
        """End the turns in which a stop string was said."""
        ended: list[str] = []
        for output in self.engine.peek(self._watched) if self._watched else ():
            if self._rollouts[output.request_id].under_way(output):
                ended.append(output.request_id)
            else:
                self._watched[output.request_id] = len(output.token_ids) + 1
        if ended:
            self.take(self.engine.abort(ended))

    def _may_flush(self, rollout: Rollout) -> bool:
        """Pinned samples are made by one version at one go; nobody goes on with several lines."""
        return self._flush_tokens > 0 and rollout.task.pinned_version < 0 and not rollout.branched

    def _unsaved(self, rollout: Rollout) -> int:
        """Tokens that nobody but us has, without those of a turn under way in the engine."""
        return rollout.tokens - self._flushed[rollout.task.sample_id]

    def _environment_answered(self, outcome: EpisodeOutcome) -> None:
        rollout = self._rollouts.get(outcome.key.rpartition("/")[0])
        if rollout is None or rollout.session != outcome.key:
            return  # dropped meanwhile
        before = rollout.tokens
        try:
            match rollout.phase, outcome.value:
                case _, None:
                    raise SampleError(outcome.error)
                case _, Begun():
                    rollout.begun = True
                    return
                case _, Lost():
                    self._begin_again(rollout)
                case Phase.RESET, Opening() as opening:
                    rollout.reset_done(opening)
                case Phase.STEP, StepResult() as result:
                    rollout.stepped(result)
                case Phase.RESET | Phase.STEP, Ask() as ask:
                    try:
                        rollout.asked(ask)
                    except (RefusedError, SampleError) as error:
                        ask.reply(error)  # the agent's mistake; its sample goes on
                        return
                case _:
                    return  # of the same lease, begun anew meanwhile
        except SampleError as error:
            self.engine.abort([rollout.task.sample_id])  # its agent may end in the midst of a turn
            self._forget(rollout)
            self._fail(rollout.task, str(error))
        else:
            reason = self._leaving.get(rollout.task.sample_id)
            answered = rollout.phase is Phase.GENERATE and rollout.tokens > before
            # Nobody can go on with several lines: such a sample ends here.
            if reason is not None and answered and not rollout.branched:
                self._moved += self._hand_back([rollout], reason)
            else:
                self._advance(rollout)

    def _begin_again(self, rollout: Rollout) -> None:
        name = rollout.task.sample_id
        for output in self.engine.abort([name]):
            rollout.generated(output)
        self._due.pop(name, None)
        self._watched.pop(name, None)
        rollout.begin_again()
        self._flushed[name] = min(self._flushed[name], rollout.tokens)

    def _expire(self) -> None:
        """End the samples whose time is over."""
        if not self._timed:
            return
        late = [rollout for rollout in self._rollouts.values() if rollout.overdue()]
        if not late:
            return
        for output in self.engine.abort([rollout.task.sample_id for rollout in late]):
            self._rollouts[output.request_id].generated(output)
        for rollout in late:
            try:
                rollout.expire()
            except SampleError as error:
                self._forget(rollout)
                self._fail(rollout.task, str(error))
            else:
                self._advance(rollout)

    def _fail(self, task: SampleTask, reason: str) -> None:
        self._failed.append(
            ReturnedSample(
                sample_id=task.sample_id,
                attempt=task.attempt,
                reason=reason,
                failed=True,
            )
        )


def _lease(rollout: Rollout) -> tuple[str, int]:
    return rollout.task.sample_id, rollout.task.attempt
