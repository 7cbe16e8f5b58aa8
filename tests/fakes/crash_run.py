"""A real buffer process that is killed again and again, with peers that remember every ack."""

from __future__ import annotations

import json
import random
import time
import uuid
from pathlib import Path

import zmq
from fakes.broker_world import trajectory
from fakes.commands import UMBRA, fork_server
from fakes.slowness import limit, reserved_port, until

from umbra.proto import messages as m
from umbra.proto import sockets
from umbra.proto.codec import Encoder, decode
from umbra.proto.net.keys import Security, load_keys
from umbra.proto.records import Trajectory
from umbra.services.process.child import ChildProcess

WAIT_S = limit(20.0)
RESEND_S = 0.25
CONFIG = """
[run]
steps = 100000
[buffer]
group_size = 2
batch_groups = 4
run_ahead = 2
max_staleness = 65535
dead_after_s = 900.0  # peers do not beat
"""


class BufferProcess:
    """`umbra buffer`, started again at the same place after each kill; `fork` saves its imports."""

    def __init__(self, folder: Path, config: str = CONFIG, *, fork: bool = False) -> None:
        self.folder = folder
        self._server = fork_server() if fork else None
        self._ports = [reserved_port() for _ in range(3)]  # nobody's while it is dead
        (folder / "prompts.jsonl").write_text(
            "".join(json.dumps({"prompt": f"row {n}"}) + "\n" for n in range(1, 51))
        )
        (folder / "run.toml").write_text(config)
        self.start()

    def start(self) -> None:
        control, *others = (port.getsockname()[1] for port in self._ports)
        self.broker, log = f"tcp://127.0.0.1:{control}", self.folder / "buffer.log"
        argv = [
            *UMBRA, "buffer", "--config", str(self.folder / "run.toml"), "--broker", self.broker,
            "--run-dir", str(self.folder / "run"), "--set", f"buffer.ports={others}",
            "--set", f"data.prompts={self.folder / 'prompts.jsonl'}",
        ]  # fmt: skip
        self.process = ChildProcess(argv, stdout=log, stderr=log, server=self._server)
        ready = until(self.process.ready, log.read_text)
        assert ready["broker"] == self.broker, "it is not where it was"

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        """`kill -9`, in the middle of whatever it does."""
        self.process.kill()
        self.process.wait(WAIT_S)

    def close(self) -> None:
        self.kill()
        for port in self._ports:
            port.close()


def memory(pid: int, which: str) -> int:
    """`VmRSS` or `VmHWM` (the peak) of a process, bytes."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(which):
            return int(line.split()[1]) << 10
    raise AssertionError(which)


class Peer:
    """A member with one request at a time, resent until it is answered."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        broker: str,
        role: m.Role,
        name: str,
        keys: Path | None = None,
    ) -> None:
        curve = None if keys is None else Security(load_keys(keys, role)).connecting("buffer")
        self._encoder = Encoder(name, uuid.uuid4().hex[:12])
        self._open: dict[int, tuple[str, list[bytes], float]] = {}
        self._sockets = {"control": sockets.dealer(context, broker, name.encode(), curve)}
        hello = m.Join(role=role, name=name, pid=1, host="h", replaces=1)
        welcome = self.call(hello, "control")
        assert isinstance(welcome, m.Welcome), welcome
        self.data_endpoint = welcome.data
        self._sockets["data"] = sockets.dealer(context, welcome.data, name.encode(), curve)

    def ask(self, body: m.Message, on: str = "data") -> None:
        """Send a request; `take` brings its answer."""
        number, frames = self._encoder.encode(body)
        self._open[number] = (on, frames, time.monotonic())
        self._sockets[on].send_multipart(frames)

    @property
    def is_waiting(self) -> bool:
        return bool(self._open)

    def take(self, on: str = "data") -> m.Message | None:
        """The answer, if it is there; what has none for long is sent again."""
        while self._sockets[on].poll(0):
            envelope = decode(self._sockets[on].recv_multipart())
            if self._open.pop(envelope.header.reply_to or 0, None) is not None:
                return envelope.body
        now = time.monotonic()
        for number, (to, frames, sent_at) in self._open.items():
            if now - sent_at > RESEND_S:
                self._open[number] = (to, frames, now)
                self._sockets[to].send_multipart(frames)
        return None

    def call(self, body: m.Message, on: str = "data") -> m.Message:
        self.ask(body, on)
        return until(
            lambda: self.take(on), f"an answer to {body}", lambda: self._sockets[on].poll(20)
        )

    def close(self) -> None:
        for socket in self._sockets.values():
            socket.close(linger=0)


class CrashRun:
    """Generators and a trainer at work while the buffer in `folder` dies at random moments.

    What was acknowledged is remembered; `finish` compares it with what was trained.
    """

    def __init__(
        self,
        folder: Path,
        seed: int,
        *,
        keys: Path | None = None,
        config: str = CONFIG,
        fork: bool = False,
    ) -> None:
        self.buffer = BufferProcess(folder, config, fork=fork)
        self.acked: set[str] = set()  # samples
        self.trained: dict[str, int] = {}  # sample: step
        self.prompts: dict[str, str] = {}  # group: prompt
        self.batches: dict[int, list[str]] = {}
        self.version = 0
        self._keys, self._chance = keys, random.Random(seed)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._generators = [self._peer("generator", f"g{n}") for n in range(3)]
        self._sent: dict[int, list[Trajectory]] = {}
        self._trainer = self._peer("trainer", "trainer")
        self._want: m.Message | None = None

    def _peer(self, role: m.Role, name: str) -> Peer:
        return Peer(self._context, self.buffer.broker, role, name, self._keys)

    def work(self, seconds: float) -> None:
        """Turn for so long; every peer acts when its last request was answered."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.turn()

    def train(self, steps: int) -> None:
        """Turn until so many further steps are trained."""
        wanted = self.version + steps
        until(lambda: self.version >= wanted, f"step {wanted} is trained", self.turn)

    def turn(self, *, more: bool = True) -> None:
        for index, peer in enumerate(self._generators):
            self._generate(index, peer, more=more)
        self._train(more=more)

    @property
    def data_endpoint(self) -> str:
        return self._trainer.data_endpoint

    def status(self) -> m.Status:
        """Return a status made after this call: an answer may be a moment old."""
        first: m.Message | None = None
        while True:
            status = self._trainer.call(m.StatusRequest(), "control")
            assert isinstance(status, m.Status), status
            if isinstance(first, m.Status) and status.uptime_s > first.uptime_s:
                return status
            first = first or status

    def start_trainer_again(self, checkpoint: int) -> None:
        """The trainer dies and goes on after `checkpoint`: the steps since then are not trained."""
        self._trainer.close()
        self._trainer = self._peer("trainer", "trainer")
        self._want = None
        self.version = checkpoint

    def check_kept(self, acked: int) -> None:
        """As many samples as were acknowledged are ready, in training or trained: none is lost."""
        ledger = self.status().ledger
        assert ledger.balance == 0
        there = ledger.trained + ledger.in_flight["ready"] + ledger.in_flight["training"]
        assert there >= acked, ledger

    def finish(self) -> None:
        """End the run: nothing is lost or trained twice, and the ledger is whole."""
        peers = [*self._generators, self._trainer]
        answered = lambda: not any(peer.is_waiting for peer in peers)  # noqa: E731
        until(answered, "all requests are answered", lambda: self.turn(more=False))
        answer = self._trainer.call(m.FinishRun(reason="done"))
        assert isinstance(answer, m.RunFinished), answer
        ledger = answer.ledger
        assert ledger.balance == 0
        assert not any(ledger.in_flight.values())
        assert ledger.trained == len(self.trained)
        assert set(ledger.ended) <= {"cancelled"}, ledger
        # In order of completion: what was acknowledged and not trained is the newest, not a gap.
        assert ledger.issued == ledger.trained + ledger.ended.get("cancelled", 0)
        serials = sorted(int(group.removeprefix("g-")) for group in self.prompts)
        numbers = [int(self.prompts[f"g-{serial}"]) for serial in serials]
        epochs = [sorted(numbers[i : i + 50]) for i in range(0, len(numbers) - 49, 50)]
        assert serials == list(range(len(serials))), "a group was never handed out"
        assert all(epoch == list(range(1, 51)) for epoch in epochs), "a prompt is not there once"

    def close(self) -> None:
        for peer in (*self._generators, self._trainer):
            peer.close()
        self._context.term()
        self.buffer.close()

    def _generate(self, index: int, peer: Peer, *, more: bool) -> None:
        if peer.is_waiting:
            answer = peer.take()
            if isinstance(answer, m.TaskLeases) and answer.tasks:
                for task in answer.tasks:
                    self.prompts.setdefault(task.group_id, task.prompt_id)
                made = [trajectory(task, self.version) for task in answer.tasks]
                self._sent[index] = made
                peer.ask(m.SubmitResults(trajectories=made))
            elif isinstance(answer, m.TaskLeases):
                sent = {one.sample_id for one in self._sent.pop(index, [])}
                self.acked |= sent - answer.refused.keys()
            else:
                assert answer is None, answer
        elif more:
            capacity = self._chance.randrange(1, 6)
            peer.ask(m.LeaseTasks(capacity=capacity, version=self.version, wait_s=0.05))

    def _train(self, *, more: bool) -> None:
        peer = self._trainer
        if peer.is_waiting:
            answer = peer.take()
            match answer:
                case m.BatchLease(step=step, trajectories=[_, *_] as batch):
                    names = [one.sample_id for one in batch]
                    assert self.batches.setdefault(step, names) == names, "another batch"
                    self._want = m.CommitBatch(step=step)
                case m.CommitAck(version=version, ledger=ledger):
                    assert ledger.balance == 0, ledger
                    for name in self.batches[version]:
                        assert self.trained.setdefault(name, version) == version, "trained twice"
                    self.version = version
                    if self._chance.random() < 0.2:
                        self._want = m.CheckpointSaved(step=version - 1)
                case _:
                    pass
        elif self._want is not None:
            peer.ask(self._want)
            self._want = None
        elif more:
            peer.ask(m.LeaseBatch(step=self.version + 1, wait_s=0.05))
