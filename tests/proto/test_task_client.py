"""What a generator sends is what the buffer can decode."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from fakes.trajectories import trajectory

from umbra.proto.bounds import SPANS
from umbra.proto.codec import Encoder, decode
from umbra.proto.messages import Message, RenewLeases, ReturnedSample, ReturnTasks, SubmitResults
from umbra.proto.net.channel import UndecodedError
from umbra.proto.net.task_client import MIXED, TaskClient
from umbra.proto.records import Trajectory, VersionSpan


def of_versions(name: str, count: int) -> Trajectory:
    spans = [VersionSpan(version=n, start=n, end=n + 1) for n in range(count)]
    return trajectory([1], [5] * count, [-1.0] * count, sample_id=name, spans=spans)


def test_a_sample_of_too_many_versions_is_given_back_and_the_others_are_delivered() -> None:
    """A frame with it was refused as a whole, which ended the generator."""
    sent: list[Any] = []

    def request(body: Message, **_kwargs: Any) -> Future[Message]:
        _number, frames = Encoder("a", "b").encode(body)
        sent.append(decode(frames).body)
        return Future()

    channel: Any = SimpleNamespace(request=request)
    client = TaskClient(channel, threading.Event(), gather_s=0.0)
    mixed, good = of_versions("mixed", SPANS + 1), of_versions("good", SPANS)
    client.submit([mixed, good])
    client.save([mixed, good])
    client.give_back([ReturnedSample(sample_id="s", attempt=1, reason="r", partial=mixed)])
    back, submitted, saved, stopped = sent
    assert isinstance(back, ReturnTasks) and back.samples[0].reason == MIXED
    assert isinstance(submitted, SubmitResults)
    assert [one.sample_id for one in submitted.trajectories] == ["good"]
    assert isinstance(saved, RenewLeases)
    assert [one.sample_id for one in saved.partials] == ["good"]
    assert isinstance(stopped, ReturnTasks) and stopped.samples[0].partial is None


def test_what_was_delivered_is_stored_although_its_answer_cannot_be_decoded() -> None:
    sent: list[Future[Message]] = []

    def request(_body: Message, **_kwargs: Any) -> Future[Message]:
        sent.append(Future())
        return sent[-1]

    channel: Any = SimpleNamespace(request=request)
    client = TaskClient(channel, threading.Event(), gather_s=0.0)
    client.submit([of_versions("good", 1)], capacity=1)
    client.ask(1)
    assert len(sent) == 1, "the first one asks for tasks as well"
    sent[0].set_exception(UndecodedError("it is of another kind"))
    assert client.poll() == ([], [])
    client.ask(1)
    assert len(sent) == 2
