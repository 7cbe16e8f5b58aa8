"""Whatever moves the bytes of a version may take the longer the more bytes there are."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from umbra.proto.deadline import Pace
from umbra.services.config import WeightHubConfig
from umbra.services.config.loader import load_config
from umbra.services.generator import service as generator_service
from umbra.services.generator.engines.opening import OpenEngine
from umbra.services.modeling.model_directory import weights_bytes
from umbra.services.scorer import service as scorer_service


def test_seconds_grow_with_bytes() -> None:
    pace = Pace(30.0, least_rate=5.0)
    limits = pace.limit_s(0), pace.limit_s(500), pace.limit_s(500, parts=4)
    assert (*limits, pace.after(1.0).limit_s(1000)) == (30.0, 130.0, 32.5, 201.0)


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
