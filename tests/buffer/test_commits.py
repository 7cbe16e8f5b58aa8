"""The service sends only stored answers; its turns wait for small commits only, then they pause."""

import threading
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
from fakes.slowness import limit

from umbra.proto.messages import Header, HeartbeatAck, LeaseBatch, Message, Ok
from umbra.proto.net.server import Request
from umbra.services.buffer import service
from umbra.services.buffer.effects import Effect, Reply
from umbra.services.buffer.service import PACE_S, SMALL_BYTES, Service
from umbra.services.buffer.store import StoreFullError

OK = Ok()
BEAT = HeartbeatAck(version=0, heartbeat_s=1.0)


class Script:
    """Server, store and what matters of a broker in one: messages 1 to `count`, one in each turn.

    A large commit ends once the next message is handled, or there is none. `errors` are what the
    commits raise, in order; `seen` has commits, by their newest message, and replies with `body` to
    messages that ask `asks`.
    """

    def __init__(
        self,
        count: int,
        *errors: BaseException,
        body: Message = OK,
        asks: Message = OK,
        small: bool = False,
    ) -> None:
        self.seen: list[tuple[str, int]] = []
        self.waiting_bytes = 0 if small else SMALL_BYTES + 1
        self.listened_s = 0.0
        self._body, self._asks, self._errors = body, asks, list(errors)
        self._count, self._came, self._stored, self._writing = count, 0, 0, False
        self._may_end, self._woken = threading.Semaphore(0), threading.Semaphore(0)

    # the server's and the broker's

    def wake(self) -> None:
        self._woken.release()

    def poll(self, _timeout_s: float) -> list[Request]:
        if self._came < self._count:
            self._came += 1
            header = Header(
                major=1, minor=0, type="Ok", id=self._came, sender="a", incarnation="a-1"
            )
            channel = "data" if isinstance(self._body, Ok) else "control"
            return [Request(channel, b"a", header, self._asks)]
        if self._writing:
            self._may_end.release()
            assert self._woken.acquire(timeout=limit(30)), "nobody told of the end of the commit"
            self._writing = False
        elif self._stored == self._count:
            self.listened_s = 1.0
        return []

    def reply(self, request: Request, _body: Message) -> None:
        self.seen.append(("reply", request.header.id))

    def handle_all(self, requests: list[Request], _now: float) -> list[Effect]:
        return [Reply(request, self._body) for request in requests]

    def _full(self, why: str) -> None:
        if why:
            self.seen.append((why, 0))

    disk = property(fset=_full)

    # the store's

    def freeze(self) -> Any:
        if self._stored == self._came:
            return None
        self._stored, self._writing = self._came, True
        self.seen.append(("commit", self._came))
        error = self._errors.pop(0) if self._errors else None

        def write() -> None:
            self._may_end.acquire()
            if error is not None:
                raise error

        return write

    def commit(self) -> None:
        self._may_end.release()
        write, failure = self.freeze(), None
        try:
            if write is not None:
                write()
        except OSError as error:
            failure = error
        self._writing = False
        self.settle(failure)

    def settle(self, error: OSError | None) -> None:
        if error is not None:
            self._stored = 0
            raise StoreFullError("full")


def served(script: Script) -> list[tuple[str, int]]:
    parts, context = cast(Any, script), Mock(stopping=threading.Event())
    broker = Mock(handle_all=script.handle_all, room=script, run=Mock(finished=""))
    broker.tick = broker.close = lambda _: []
    broker.is_over = lambda now: now == 1.0
    Service(context, parts, broker, parts).run()
    return script.seen


def test_the_next_turns_do_not_wait_for_a_commit_but_what_they_answer_does() -> None:
    first, *rest = served(Script(3))
    assert first == ("commit", 1)
    assert rest == [("reply", 1), ("commit", 3), ("reply", 2), ("reply", 3)]


def test_a_turn_waits_for_a_small_commit() -> None:
    turns = [(kind, n) for n in (1, 2, 3) for kind in ("commit", "reply")]
    assert served(Script(3, small=True)) == turns


@pytest.mark.parametrize(
    ("small", "asks", "pauses"),
    [(True, Ok(), [PACE_S] * 3), (True, LeaseBatch(step=1, wait_s=0.0), []), (False, Ok(), [])],
)
def test_small_turns_pause_unless_the_trainer_has_just_asked(
    small: bool, asks: Message, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    rests: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: 100.0, sleep=rests.append)
    monkeypatch.setattr(service, "time", clock)
    served(Script(3, small=small, asks=asks))
    assert rests == pytest.approx(pauses)


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("is_promise", [True, False])
def test_a_full_disk_leaves_unstored_answers_unsent(is_promise: bool, small: bool) -> None:
    script = Script(1, OSError(28, "full"), body=Ok() if is_promise else BEAT, small=small)
    told = [("reply", 1)]
    before, after = ([], told) if is_promise else (told, [])
    assert served(script) == [("commit", 1), ("full", 0), *before, ("commit", 1), *after]


@pytest.mark.parametrize("small", [True, False])
def test_a_commit_that_breaks_ends_the_service(small: bool) -> None:
    script = Script(1, ZeroDivisionError(), small=small)
    with pytest.raises(ZeroDivisionError):
        served(script)
    assert script.seen == [("commit", 1)]
