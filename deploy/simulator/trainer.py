"""A simulated trainer: the trainer's loop, with seconds in place of the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from umbra.deploy.simulator.answers import size_of
from umbra.deploy.simulator.desk import Client, SimulatedBroker
from umbra.deploy.simulator.hub import Hub
from umbra.deploy.simulator.tables import TrainingSpeed
from umbra.deploy.simulator.timeline import Shares, Timeline
from umbra.proto.errors import DeadlineError
from umbra.proto.messages import (
    BatchLease,
    CheckpointSaved,
    CommitAck,
    CommitBatch,
    FinishRun,
    LeaseBatch,
    Ok,
    RunFinished,
)
from umbra.services.config import RunConfig
from umbra.services.weight_hub.effects import HubPeer

LEASE_SLICE_S = 1.0  # how long a question for a batch stays open, as the trainer's loop has it


@dataclass(frozen=True, slots=True)
class SimStep:
    """A step that was committed. Tokens are those of responses."""

    step: int
    at: float  # simulated seconds
    samples: int
    tokens: float


class SimTrainer:
    """Trains to `run.steps`, then ends the run.

    Args:
        timeline: of the simulation.
        desk: of the broker.
        hub: gets new versions.
        config: of the run.
        speed: of a step, by all its GPUs.
        stepped: called after every commit.
        expelled: called when the broker took it for dead.
    """

    def __init__(
        self,
        timeline: Timeline,
        desk: SimulatedBroker,
        hub: Hub,
        config: RunConfig,
        speed: TrainingSpeed,
        stepped: Callable[[SimStep], None],
        expelled: Callable[[], object],
    ) -> None:
        self.version = 0
        self.finished: RunFinished | None = None
        self.repeated = 0  # steps that were lost with the trainer
        self.published_at: dict[int, float] = {}
        self.shares = Shares(timeline)
        self.client = Client(desk, timeline, "trainer", "trainer", lambda _body: None, expelled)
        self._timeline = timeline
        self._hub = hub
        self._config = config
        self._speed = speed
        self._stepped = stepped
        self._saved = 0  # step of the last checkpoint
        self._asked_at = 0.0

    @property
    def is_alive(self) -> bool:
        return self.client.is_alive

    @property
    def _peer(self) -> HubPeer:
        return HubPeer("trainer", self.client.incarnation)

    def start(self) -> None:
        """Join, and go on after the last checkpoint."""
        self.repeated += self.version - self._saved
        self.version = self._saved
        self.shares.to("starting")

        def joined() -> None:
            self._hub.register(self._peer)
            self._publish()

        self.client.join(joined)

    def die(self) -> None:
        self.client.die()
        self.shares.to("down")

    def seconds(self, tokens: float) -> float:
        """What a step over `tokens`, prompts included, takes."""
        speed = self._speed
        return speed.step_s + (tokens / speed.tokens_per_s if speed.tokens_per_s else 0.0)

    # -- one step ---------------------------------------------------------------------------------

    def _lease(self) -> None:
        self._asked_at = self._timeline.now
        self.shares.to("wait_batch")
        self._ask()

    def _ask(self) -> None:
        body = LeaseBatch(step=self.version + 1, wait_s=LEASE_SLICE_S)
        self.client.ask(body, BatchLease, self._leased)

    def _leased(self, lease: BatchLease) -> None:
        if not lease.trajectories:
            limit_s = self._config.trainer.batch_wait_s
            if self._timeline.now - self._asked_at > limit_s:
                raise DeadlineError(
                    f"no batch for step {lease.step} within {limit_s:g} simulated seconds "
                    f"(trainer.batch_wait_s): waiting for {lease.waiting_for or 'trajectories'}"
                )
            self._ask()
            return
        sizes = [size_of(trajectory) for trajectory in lease.trajectories]
        tokens = sum(response for response, _ in sizes)
        prompts = sum(prompt for _, prompt in sizes)
        self._next("switch", self._speed.switch_s, lambda: self._train(len(sizes), tokens, prompts))

    def _train(self, samples: int, tokens: float, prompts: float) -> None:
        self._next("train", self.seconds(tokens + prompts), lambda: self._commit(samples, tokens))

    def _commit(self, samples: int, tokens: float) -> None:
        self.shares.to("commit")

        def committed(ack: CommitAck) -> None:
            self.version = ack.version
            self._stepped(SimStep(self.version, self._timeline.now, samples, tokens))
            self._next("switch", self._speed.switch_s, self._after_step)

        self.client.ask(CommitBatch(step=self.version + 1), CommitAck, committed)

    def _after_step(self) -> None:
        every = self._config.checkpoint.every
        if every and self.version % every == 0:
            self._next("checkpoint", self._speed.checkpoint_s, self._save)
        else:
            self._publish()

    def _save(self) -> None:
        self._saved = self.version
        body = CheckpointSaved(step=self.version, newest=self.version)
        self.client.ask(body, Ok, lambda _reply: self._publish())

    def _publish(self) -> None:
        version = self.version
        self.shares.to("wait_slot")

        def granted(slot: int) -> None:
            self._next("snapshot", self._speed.snapshot_s, lambda: write(slot))

        def write(slot: int) -> None:
            self.published_at[version] = self._timeline.now
            self._hub.publish(self._peer, version, slot, self._speed.snapshot_s)
            self._go_on()

        peer = self._peer
        self._hub.acquire(peer, version, lambda slot: granted(slot) if self._is(peer) else None)

    def _go_on(self) -> None:
        if self.version < self._config.run.steps:
            self._lease()
            return
        self.shares.to("done")

        def finished(reply: RunFinished) -> None:
            self.finished = reply

        self.client.ask(FinishRun(reason="all steps are done"), RunFinished, finished)

    def _next(self, state: str, seconds: float, action: Callable[[], None]) -> None:
        """Be in `state` for `seconds`, then do `action`, unless it has died meanwhile."""
        peer = self._peer
        self.shares.to(state)
        self._timeline.after(seconds, lambda: action() if self._is(peer) else None)

    def _is(self, peer: HubPeer) -> bool:
        return self.is_alive and self._peer == peer
