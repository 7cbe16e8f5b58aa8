"""Whatever moves the bytes of a version may take the longer the more bytes there are."""

import threading
from pathlib import Path
from unittest.mock import Mock

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


@pytest.mark.parametrize(
    ("role", "waits"),
    [("generator", {"subscribe_unless"}), ("scorer", {"subscribe", "wait_first"})],
)
def test_who_waits_for_the_first_version_counts_its_model(
    role: str, waits: set[str], tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver, session = Mock(), Mock(stopping=threading.Event())
    receiver.subscribe_unless.side_effect = receiver.wait_first.side_effect = StopAsyncIteration
    for service in (generator_service, scorer_service):
        monkeypatch.setattr(service, "Receiver", Mock(return_value=receiver))
    monkeypatch.setattr(WeightHubConfig, "least_rate", 10.0)
    overrides = [f"model.path={tiny_model_dir}", "scorer.device=cpu"]
    config = load_config(overrides=overrides, environ={})
    with pytest.raises(StopAsyncIteration):  # as far as the test goes
        if role == "generator":
            generator_service._subscribe(session, config, OpenEngine(Mock(), Mock(), "cpu"))
        else:
            context = Mock(config=config, options={"stage": "logp"})
            scorer_service._score_logprobs(context, session)
    limit_s = 600.0 + 5 * weights_bytes(tiny_model_dir) / 10
    session.weights.assert_called_once_with(deadline_s=limit_s)
    limits = {name: args for name, args, _ in receiver.method_calls if name != "close"}
    assert limits.keys() == waits and all(limit_s in args for args in limits.values())
