"""Many rollouts at once, through one engine and a pool of environments; no socket, no buffer.

What a rollout waits for is its `phase`; this class brings engine outputs and environment outcomes
to the rollouts they belong to. A dropped rollout leaves nothing but answers that nobody wants.
"""

from __future__ import annotations

from collections.abc import Iterable

from umbra.proto.messages import ReturnedSample
from umbra.proto.records import SampleTask, Trajectory
from umbra.services.generator.engine import Engine, EngineOutput
from umbra.services.generator.environment_pool import EnvironmentPool, Outcome
from umbra.services.generator.environments import EnvironmentFactory, SampleError
from umbra.services.generator.rollout import Phase, Rollout, RolloutSettings


class RolloutRunner:
    """Runs `SampleTask`s to trajectories.

    Args:
        engine: where model turns are made.
        pool: where environments run.
        make_environment: a fresh environment for each sample.
        settings: what all rollouts share.
    """

    def __init__(
        self,
        engine: Engine,
        pool: EnvironmentPool,
        make_environment: EnvironmentFactory,
        settings: RolloutSettings,
    ) -> None:
        self._engine = engine
        self._pool = pool
        self._make_environment = make_environment
        self._settings = settings
        self._rollouts: dict[str, Rollout] = {}
        self._finished: list[Trajectory] = []
        self._failed: list[ReturnedSample] = []

    @property
    def active(self) -> int:
        """Samples under way, in the engine or with their environment."""
        return len(self._rollouts)

    @property
    def busy(self) -> bool:
        """Whether the engine has something to do."""
        return self._engine.busy

    @property
    def wanting(self) -> int:
        """Of those, the ones that take a slot of the engine, or will at once."""
        return sum(r.phase in (Phase.RESET, Phase.GENERATE) for r in self._rollouts.values())

    @property
    def leases(self) -> list[tuple[str, int]]:
        """`(sample_id, attempt)` of the samples under way."""
        return [(r.task.sample_id, r.task.attempt) for r in self._rollouts.values()]

    def add(self, tasks: Iterable[SampleTask]) -> None:
        """Begin these samples; one that is under way already starts over."""
        for task in tasks:
            if (old := self._rollouts.get(task.sample_id)) is not None:
                self.drop([(task.sample_id, old.task.attempt)])
            try:
                environment = self._make_environment()
            except Exception as error:  # noqa: BLE001 - a user's constructor may raise anything
                self._fail(task, f"the environment's constructor raised {error!r}")
                continue
            rollout = Rollout(task, environment, self._settings)
            self._rollouts[task.sample_id] = rollout
            self._advance(rollout)

    def collect(self) -> None:
        """Take in what the environments have answered."""
        for outcome in self._pool.collect():
            self._environment_answered(outcome)

    def poll(self, timeout_s: float) -> None:
        """One step of the engine, and what follows from it."""
        self.collect()
        if self._engine.busy:
            self.take(self._engine.poll(timeout_s))
            self.collect()

    def take(self, outputs: Iterable[EngineOutput]) -> None:
        """Outputs of the engine go to their rollouts."""
        for output in outputs:
            rollout = self._rollouts.get(output.request_id)
            if rollout is not None:
                rollout.generated(output)
                self._advance(rollout)

    def results(self) -> tuple[list[Trajectory], list[ReturnedSample]]:
        """Finished samples and failed ones since the last call."""
        finished, self._finished = self._finished, []
        failed, self._failed = self._failed, []
        return finished, failed

    def drop(self, leases: Iterable[tuple[str, int]]) -> None:
        """Forget these `(sample_id, attempt)`: their lease is not ours any more."""
        gone: list[str] = []
        for sample_id, attempt in leases:
            rollout = self._rollouts.get(sample_id)
            if rollout is not None and rollout.task.attempt == attempt:
                del self._rollouts[sample_id]
                gone.append(sample_id)
        if gone:
            self._engine.abort(gone)

    def drain(self, reason: str) -> list[ReturnedSample]:
        """Stop everything and hand back what is unfinished, with the tokens there are."""
        for output in self._engine.abort(None):
            if (rollout := self._rollouts.get(output.request_id)) is not None:
                rollout.generated(output)
        returned = [
            ReturnedSample(
                sample_id=rollout.task.sample_id,
                attempt=rollout.task.attempt,
                reason=reason,
                partial=rollout.partial(),
            )
            for rollout in self._rollouts.values()
        ]
        self._rollouts.clear()
        return returned

    def _advance(self, rollout: Rollout) -> None:
        """Do what the rollout waits for."""
        sample_id = rollout.task.sample_id
        environment = rollout.environment
        name = type(environment).__name__
        instant = bool(getattr(environment, "instant", False))
        match rollout.phase:
            case Phase.RESET:
                row = rollout.task.row
                self._pool.submit(
                    _key(rollout), f"{name}.reset", lambda: environment.reset(row), instant=instant
                )
            case Phase.GENERATE:
                self._engine.submit([rollout.request()])
            case Phase.STEP:
                text = rollout.step_text()
                self._pool.submit(
                    _key(rollout), f"{name}.step", lambda: environment.step(text), instant=instant
                )
            case Phase.DONE:
                del self._rollouts[sample_id]
                self._finished.append(rollout.trajectory())

    def _environment_answered(self, outcome: Outcome) -> None:
        rollout = self._rollouts.get(outcome.key.rpartition("/")[0])
        if rollout is None or _key(rollout) != outcome.key:
            return  # dropped meanwhile
        try:
            if outcome.error:
                raise SampleError(outcome.error)
            if rollout.phase is Phase.RESET:
                rollout.reset_done(outcome.value)
            else:
                rollout.stepped(outcome.value)
        except SampleError as error:
            del self._rollouts[rollout.task.sample_id]
            self._fail(rollout.task, str(error))
        else:
            self._advance(rollout)

    def _fail(self, task: SampleTask, reason: str) -> None:
        self._failed.append(
            ReturnedSample(
                sample_id=task.sample_id,
                attempt=task.attempt,
                reason=f"sample {task.sample_id}: {reason}",
                failed=True,
            )
        )


def _key(rollout: Rollout) -> str:
    return f"{rollout.task.sample_id}/{rollout.task.attempt}"
