"""The hub's end of plane `nccl`: its agent is rank 0, and sends from the hub's arena.

The agent's orders run on a thread, one round after another: get an id if a communicator is to be
built, tell the receivers, enter the communicator, send. What a round does not bring to a receiver,
it fetches over the plane `tcp` of this same hub.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import msgspec

from umbra.proto.errors import UmbraError
from umbra.proto.messages import Prepare, Ready, Subscribe
from umbra.proto.records import NcclRound
from umbra.services.runtime.gpu.worker_process import GpuWorkerProcess
from umbra.services.runtime.weights.arena import Arena
from umbra.services.weight_hub.background_plane import Background, Deliver, GiveUp, Late
from umbra.services.weight_hub.nccl_group import NcclGroup
from umbra.services.weight_hub.nccl_rounds import Round, Rounds

PATIENCE = 4  # a phase of a push has room for that many waits
GATHER_S = 1.0  # at most, for others to be ready for a broadcast

log = logging.getLogger(__name__)


class NcclPlane:
    """Rounds of broadcasts.

    Args:
        agent: of the hub.
        chunk_bytes: of device memory, and of a broadcast.
        deadline_s: of a phase of a push (`weight_hub.deadline_s`).
        first_epoch: communicators count from the one after it.
        fetch: completes a Prepare so that its receiver fetches the version over plane `tcp`.
    """

    def __init__(
        self,
        agent: GpuWorkerProcess,
        chunk_bytes: int,
        deadline_s: float,
        first_epoch: int,
        fetch: Callable[[str, Prepare], Prepare],
    ) -> None:
        self.broken = ""
        self.group = NcclGroup(first_epoch)
        self._wait_s = deadline_s / PATIENCE
        self._rounds = Rounds(self.group, min(GATHER_S, self._wait_s), self._wait_s)
        self._agent = agent
        self._chunk_bytes = chunk_bytes
        self._fetch = fetch
        self._thread: Background[bytes] = Background("umbra-nccl")
        self._uid = b""  # of the communicator made last
        self._announced: Round | None = None  # the round whose members know of it
        self._cancelled = threading.Event()  # what the agent does is of no use any more
        self._late: list[Late] = []
        self._held = False

    @property
    def busy(self) -> bool:
        """Whether `poll` will have something soon."""
        return self._held or self._thread.busy

    @property
    def agent_pid(self) -> int | None:
        """Process id of the hub's agent, if it runs."""
        return self._agent.pid

    def layout(self, arena: Arena) -> None:
        """What is sent from now on lies in `arena`."""
        current = self._rounds.current
        self._give_up(current, self._rounds.failed(), "the trainer registered another layout")
        self._free_agent()
        self._rounds.ready_at = None
        self._agent.use(arena, self._chunk_bytes)
        self._thread.start(self._attach)

    def subscribed(self, name: str, incarnation: str, message: Subscribe) -> None:
        """A receiver is in the group from the next communicator on."""
        self.left(name)
        self.group.join(name, incarnation)

    def hold(self, name: str, prepare: Prepare, now: float) -> None:
        """A version is to go to `name`."""
        self._rounds.offer(name, prepare, now)
        self._held = True

    def staged(self, name: str, message: Ready) -> None:
        """A receiver has got its version, or not."""
        current = self._rounds.current
        others = self._rounds.reported(name, message.epoch, well=not message.error)
        self._give_up(current, others, f"{name} could not receive: {message.error}")

    def left(self, name: str) -> None:
        """A receiver is not subscribed any longer."""
        current = self._rounds.current
        self._give_up(current, self._rounds.dropped(name), f"{name} has left the broadcast")

    def granted(self, slot: int) -> None:
        """`slot` will be written anew: nobody waits for what lies there any more."""
        current = self._rounds.current
        if current is not None and current.slot == slot:
            self._give_up(current, self._rounds.failed(), "the version was overtaken")

    def poll(self, now: float) -> list[Late]:
        """Prepares that go out now, and rounds that came to nothing."""
        done = self._thread.take()
        if done is not None:
            self._step_done(done, now)
        fetching, begun = self._rounds.settle(now, idle=not self._thread.busy)
        self._late += [Deliver(name, self._fetch(name, held)) for name, held in fetching]
        if begun is not None:
            self._begin(begun)
        self._held = self._rounds.next_due() is not None
        late, self._late = self._late, []
        return late

    def close(self) -> None:
        """End the agent."""
        self._free_agent()
        self._thread.close()
        self._agent.kill()

    # -- a round ----------------------------------------------------------------------------------

    def _begin(self, begun: Round) -> None:
        self._cancelled.clear()
        self._announced = None
        if begun.communicator.fresh:
            self._thread.start(self._new_id)
        else:
            self._announce(begun)

    def _step_done(self, done: bytes | UmbraError, now: float) -> None:
        current = self._rounds.current
        if self._rounds.ready_at is None:
            self._attached(done, now)
        elif current is None:
            log.debug("the hub's agent has left a broadcast: %s", done)
        elif self._announced is current and isinstance(done, UmbraError):
            self._give_up(current, self._rounds.failed(), f"the hub's own agent: {done}")
        elif self._announced is current:
            self._rounds.sent()
        elif isinstance(done, UmbraError):
            self._give_up(current, self._rounds.failed(), f"no id for a communicator: {done}")
        else:
            self._uid = done
            self._announce(current)

    def _attached(self, done: bytes | UmbraError, now: float) -> None:
        if isinstance(done, UmbraError):
            self.broken = f"the hub's GPU agent does not work: {done}"
            log.error("plane nccl: %s; everyone fetches", self.broken)
        else:
            self._rounds.ready_at = now

    def _announce(self, current: Round) -> None:
        self._announced = current
        communicator = current.communicator
        for name, prepare in current.prepares.items():
            if name in current.open:
                group = NcclRound(
                    epoch=communicator.epoch,
                    uid=self._uid,
                    rank=communicator.ranks[name],
                    size=communicator.size,
                    chunk_bytes=self._chunk_bytes,
                    deadline_s=self._wait_s,
                )
                held = msgspec.structs.replace(prepare, round=group)
                self._late.append(Deliver(name, held))
        self._thread.start(lambda: self._send(current, self._uid))

    def _give_up(self, current: Round | None, names: Sequence[str], reason: str) -> None:
        if current is None or not current.failed:
            return  # there is none, or it goes on, or it went well
        self._cancelled.set()
        log.warning("broadcast of epoch %d was given up: %s", current.communicator.epoch, reason)
        for name in names:
            self._late.append(GiveUp(name, current.prepares[name], reason))

    def _free_agent(self) -> None:
        """End what the thread does, so that the agent is ours."""
        self._cancelled.set()
        self._thread.wait()
        self._thread.take()

    # -- on the thread ----------------------------------------------------------------------------

    def _attach(self) -> bytes:
        self._agent.finish_begin()
        return b""

    def _new_id(self) -> bytes:
        self._agent.finish_begin(self._cancelled.is_set)
        return bytes.fromhex(self._agent.call("unique_id", self._wait_s)["uid"])

    def _send(self, current: Round, uid: bytes) -> bytes:
        communicator = current.communicator
        try:
            if communicator.fresh:
                self._agent.order(
                    "join", epoch=communicator.epoch, uid=uid.hex(), rank=0, size=communicator.size
                )
                self._agent.answer(self._wait_s, self._cancelled.is_set, abortable=False)
            self._agent.order(
                "transfer",
                epoch=communicator.epoch,
                slot=current.slot,
                deadline_s=self._wait_s,
            )
            self._agent.answer((PATIENCE - 1) * self._wait_s, self._cancelled.is_set)
        except UmbraError:
            self._agent.begin()  # if it was killed, so that it is there for the next round
            raise
        return uid
