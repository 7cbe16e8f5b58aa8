"""Whatever moves the bytes of a version may take the longer the more bytes there are."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from umbra.proto.deadline import Pace
from umbra.proto.messages import ArenaReady, Message, Ok, Publish, RegisterManifest, SlotGranted
from umbra.proto.net.io_thread import Channel
from umbra.services.config import WeightHubConfig
from umbra.services.config.loader import load_config
from umbra.services.generator import service as generator_service
from umbra.services.generator.engines.opening import OpenEngine
from umbra.services.modeling.model_directory import weights_bytes
from umbra.services.scorer import service as scorer_service
from umbra.services.weights.arena import Arena
from umbra.services.weights.manifest import build_manifest
from umbra.services.weights.publisher import Publisher

LAYOUT = build_manifest([("w", "F32", [100, 32])], 4096)
SIZE = LAYOUT.total_bytes
PACE = Pace(30.0, least_rate=SIZE / 100)  # a version takes 100 s more


def test_seconds_grow_with_bytes() -> None:
    assert PACE.limit_s(0) == 30.0
    assert PACE.limit_s(SIZE) == 130.0
    assert PACE.limit_s(SIZE, parts=4) == 32.5
    assert PACE.after(1.0).limit_s(2 * SIZE) == 201.0


def test_the_first_version_may_take_what_is_done_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is read, two slots are made, a version is written and brought: five times it."""
    (tmp_path / "a.safetensors").write_bytes(bytes(30))
    (tmp_path / "b.safetensors").write_bytes(bytes(20))
    (tmp_path / "tokenizer.json").write_bytes(bytes(1000))
    monkeypatch.setattr(WeightHubConfig, "least_rate", 10.0)
    config = WeightHubConfig(slots=2)
    assert WeightHubConfig(deadline_s=2.0).pace.limit_s(50) == 7.0
    assert config.first_version_s(weights_bytes(tmp_path)) == 600.0 + 5 * 5.0
    assert config.first_version_s(weights_bytes(tmp_path / "none")) == 600.0


class _SubscribedError(Exception):
    """As far as the test goes."""


@pytest.mark.parametrize("role", ["generator", "scorer"])
def test_who_waits_for_the_first_version_counts_its_model(
    role: str, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []

    class Session:
        stopping = threading.Event()

        def progress(self, *_: Any) -> None: ...
        def weights(self, *, deadline_s: float) -> None:
            limits.append(deadline_s)

    class Noting:
        def __init__(self, *_: Any, **_named: Any) -> None: ...
        def close(self) -> None: ...

        def subscribe(self, timeout_s: float) -> None:
            limits.append(timeout_s)

        def subscribe_unless(self, _stopping: Any, timeout_s: float, _waiting: Any) -> bool:
            limits.append(timeout_s)
            raise _SubscribedError

        def wait_first(self, timeout_s: float, _stopping: Any) -> None:
            limits.append(timeout_s)
            raise _SubscribedError

    overrides = (f"model.path={tiny_model_dir}",)
    config = load_config(overrides=[*overrides, "scorer.device=cpu"], environ={})
    monkeypatch.setattr(WeightHubConfig, "least_rate", 10.0)
    monkeypatch.setattr(generator_service, "Receiver", Noting)
    monkeypatch.setattr(scorer_service, "Receiver", Noting)
    session = cast(Any, Session())
    with pytest.raises(_SubscribedError):
        if role == "generator":
            opened = OpenEngine(cast(Any, None), cast(Any, None), "cpu")
            generator_service._subscribe(session, config, opened)
        else:
            context = cast(
                Any, SimpleNamespace(config=config, options={"stage": "logp"}, begin=print)
            )
            scorer_service._score_logprobs(context, session)
    expected = 600.0 + 5 * weights_bytes(tiny_model_dir) / 10
    assert limits == [expected] * (2 if role == "generator" else 3)


class HubThatIsAsked:
    """Answers at once; notes how long it could have taken."""

    peer, on_moved = "weight hub", None

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.limits: dict[type[Message], float] = {}

    def call(self, body: Message, reply: type[Message], *, timeout_s: float, **_: Any) -> Message:
        self.limits[type(body)] = timeout_s
        match body:
            case RegisterManifest():
                return ArenaReady(path=str(self.arena.path), slots=self.arena.slots)
            case Publish():
                return Ok()
            case _:
                return SlotGranted(slot=1)


@pytest.fixture
def arena(run_id: str) -> Iterator[Arena]:
    arena = Arena.create(run_id, "a", slot_bytes=SIZE, slots=2)
    yield arena
    arena.unlink()
    arena.close()


def test_a_publisher_waits_for_a_hub_that_allocates(arena: Arena) -> None:
    hub = HubThatIsAsked(arena)
    publisher = Publisher(cast(Channel, hub), LAYOUT, pace=PACE)
    publisher.register(1.0)
    publisher.slot(3, 7.0)
    publisher.publish(3, 0.0, [0])
    publisher.close()
    assert hub.limits[RegisterManifest] == 1.0, "as its caller says"
    assert hub.limits[Publish] == 230.0, "it may have been restarted, and allocates all slots"
