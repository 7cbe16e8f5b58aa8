"""Pushes as a state machine: no slot is written while it is read, and all get the version."""

from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from umbra.proto.deadline import Pace
from umbra.proto.messages import Abort, Commit, Committed, Ok, Prepare, Publish, Ready, SlotGranted
from umbra.services.weight_hub.push import Failed, HubPeer, HubReply, Pushed, PushProtocol, Send

DEADLINE_S = 10.0
NAMES = ("a", "b", "c")


@dataclass
class Model:
    """A receiver as it is outside of the hub: what it was sent, what it did."""

    peer: HubPeer
    alive: bool = True
    subscribed: bool = False
    inbox: list[Prepare | Commit | Abort] = field(default_factory=list)
    staged: set[int] = field(default_factory=set)  # epochs that it reported as staged
    serves: int | None = None  # number of the publication


class PushMachine(RuleBasedStateMachine):
    """Trainer and receivers that do anything; a network that keeps the order per receiver."""

    @initialize(slots=st.integers(2, 4))
    def start(self, slots: int) -> None:
        self.hub = PushProtocol(slots, Pace(DEADLINE_S, least_rate=100.0))
        self.slots = slots
        self.now = 0.0
        self.tickets = 0
        self.incarnations = 0
        self.held_back = False
        self.digest = ""
        self.trainer = HubPeer("trainer", "t0")
        self.registered = False
        self.granted: tuple[int, int] | None = None  # version and slot
        self.waiting: tuple[int, int] | None = None  # ticket and version
        self.version = 0
        self.newest: tuple[int, int] | None = None  # version and slot
        self.published: dict[int, int] = {}  # epoch -> number of the publication
        self.publications = 0
        self.contents = 0
        self.held: dict[int, tuple[int, int]] = {}  # slot -> version and content
        self.reading: dict[str, tuple[int, int]] = {}  # receiver -> epoch and slot
        self.receivers = {name: Model(HubPeer(name, "0")) for name in NAMES}
        self.register(restart=False, change=1)
        for name in NAMES:
            self.subscribe(name, restart=True)

    # -- what the hub asks for --------------------------------------------------------------------

    def apply(self) -> None:
        while self.hub.effects:
            match self.hub.effects.popleft():
                case HubReply(ticket=ticket, message=SlotGranted(slot=slot)):
                    assert self.waiting is not None
                    assert self.waiting[0] == ticket
                    assert slot not in self.read_slots()
                    assert self.newest is None or self.newest[1] != slot
                    self.granted = (self.waiting[1], slot)
                    self.waiting = None
                    self.held.pop(slot, None)
                case HubReply(message=Ok()):
                    assert self.granted is not None
                    self.newest, self.granted = self.granted, None
                    self.publications += 1
                    self.held[self.newest[1]] = (self.newest[0], self.contents)
                case Send(receiver=name, message=message):
                    self.deliver(name, message)
                case Failed(receiver=name, dropped=True):
                    self.reading.pop(name, None)
                    self.receivers[name].subscribed = False
                case Pushed(receiver=name, epoch=epoch):
                    assert epoch in self.receivers[name].staged
                case _:
                    pass

    def deliver(self, name: str, message: Prepare | Commit | Abort) -> None:
        model = self.receivers[name]
        match message:
            case Prepare():
                assert not self.held_back
                assert self.newest == (message.version, message.slot)
                assert name not in self.reading
                self.reading[name] = (message.epoch, message.slot)
                self.published[message.epoch] = self.publications
            case Commit():
                assert message.epoch in model.staged
            case Abort():
                self.reading.pop(name, None)
        if model.alive:
            model.inbox.append(message)

    def read_slots(self) -> set[int]:
        return {slot for _, slot in self.reading.values()}

    # -- the trainer ------------------------------------------------------------------------------

    @rule(restart=st.booleans(), change=st.integers(0, 3))
    def register(self, restart: bool, change: int) -> None:
        if restart:
            self.incarnations += 1
            self.trainer = HubPeer("trainer", f"t{self.incarnations}")
            self.version = 0  # from a checkpoint: the newest is the last one, not the greatest
        if restart or not self.registered:
            self.granted = self.waiting = None
        if change == 0 or not self.digest:
            self.incarnations += 1
            self.digest = f"d{self.incarnations}"
            self.granted = self.newest = None
            self.held.clear()
        self.registered = True
        self.hub.register(self.trainer, self.digest, self.now)
        self.apply()

    @precondition(lambda self: self.registered)
    @rule()
    def acquire(self) -> None:
        self.tickets += 1
        self.waiting = (self.tickets, self.version)
        self.granted = None
        self.hub.acquire(self.tickets, self.trainer, self.version, self.now)
        self.apply()

    @precondition(lambda self: self.granted is not None)
    @rule()
    def publish(self) -> None:
        assert self.granted is not None
        version, slot = self.granted
        self.version = version + 1
        self.contents += 1
        message = Publish(version=version, slot=slot, checksums=[self.contents], snapshot_s=0.0)
        self.hub.publish(0, self.trainer, message, self.now)
        self.apply()

    @rule()
    def a_part_goes_or_comes(self) -> None:
        self.held_back = not self.held_back
        self.hub.hold_back("gone" if self.held_back else "", self.now)
        self.apply()

    @rule()
    def all_is_lost(self) -> None:
        self.granted = self.waiting = self.newest = None
        self.held.clear()
        self.digest = ""
        self.registered = False
        self.hub.withdraw("lost")
        self.apply()

    @precondition(lambda self: self.registered)
    @rule()
    def new_version(self) -> None:
        self.acquire()
        if self.granted is not None:
            self.publish()

    # -- receivers --------------------------------------------------------------------------------

    @precondition(lambda self: self.digest)  # the hub keeps them until there is a layout
    @rule(name=st.sampled_from(NAMES), restart=st.booleans())
    def subscribe(self, name: str, restart: bool) -> None:
        model = self.receivers[name]
        if restart or not model.alive:
            self.incarnations += 1
            model = Model(HubPeer(name, str(self.incarnations)))
            self.receivers[name] = model
        if self.hub.digest:
            self.reading.pop(name, None)
        model.serves = None
        model.subscribed = True
        self.hub.subscribe(model.peer, self.now)
        self.apply()

    @rule(name=st.sampled_from(NAMES), fails=st.lists(st.booleans(), min_size=1, max_size=4))
    def act(self, name: str, fails: list[bool]) -> None:
        model = self.receivers[name]
        for broken in fails:
            if model.alive and model.inbox:
                self.answer(model, model.inbox.pop(0), "broken" if broken else "")

    def answer(self, model: Model, message: Prepare | Commit | Abort, error: str) -> None:
        name, epoch = model.peer.name, message.epoch
        match message:
            case Prepare():
                if not error:
                    model.staged.add(epoch)
                ready = Ready(
                    epoch=epoch, version=message.version, wire_s=0, stage_s=0, error=error
                )
                if self.reading.get(name, (0, 0))[0] == epoch:
                    del self.reading[name]
                self.hub.ready(model.peer, ready, self.now)
                self.apply()
            case Commit():
                if not error:
                    model.serves = self.published[epoch]
                done = Committed(epoch=epoch, version=message.version, commit_s=0, error=error)
                self.hub.committed(model.peer, done, self.now)
                self.apply()
            case Abort():
                pass

    @rule(name=st.sampled_from(NAMES))
    def die(self, name: str) -> None:
        model = self.receivers[name]
        model.alive = False
        model.inbox.clear()

    @rule(name=st.sampled_from(NAMES))
    def is_unreachable(self, name: str) -> None:
        self.reading.pop(name, None)
        self.hub.lost(name, "unreachable", self.now)
        self.apply()

    @rule(seconds=st.sampled_from([0.0, 1.0, 6.0, DEADLINE_S]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.hub.tick(self.now)
        self.apply()

    # -- always -----------------------------------------------------------------------------------

    @invariant()
    def nobody_reads_what_is_written(self) -> None:
        if self.granted is not None:
            slot = self.granted[1]
            assert slot not in self.read_slots()
            assert self.newest is None or self.newest[1] != slot

    @invariant()
    def what_slots_hold_is_known(self) -> None:
        held = self.hub.held.items()
        assert self.held == {slot: (p.version, *p.checksums) for slot, p in held}

    @invariant()
    def nothing_is_left_undone(self) -> None:
        """The trainer waits only while every other slot is the newest or is read."""
        if self.waiting is not None:
            newest = self.newest[1] if self.newest else None
            assert all(slot == newest or slot in self.read_slots() for slot in range(self.slots))

    def teardown(self) -> None:
        """From wherever we are: the live reach the newest version, the dead block nobody."""
        if not hasattr(self, "hub"):
            return
        if self.held_back:
            self.a_part_goes_or_comes()
        for waited_s in (DEADLINE_S, 0.0):  # it ends what the dead have not answered
            for model in self.receivers.values():
                while model.inbox and model.alive:
                    self.answer(model, model.inbox.pop(0), "")
            self.time_passes(waited_s)
        for name, version in self.hub.serving.items():
            model = self.receivers[name]
            if model.alive and model.subscribed:
                assert version == (self.newest[0] if self.newest else -1)
                assert self.newest is None or model.serves == self.publications
        if self.registered:
            self.time_passes(DEADLINE_S)
            self.acquire()
            assert self.granted is not None


PushMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPush = PushMachine.TestCase
