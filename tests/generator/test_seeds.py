"""Random draws of a generator differ after a restart."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from umbra.proto.errors import UmbraError
from umbra.services.config.loader import load_config
from umbra.services.generator import service
from umbra.services.generator.engines import opening


def test_a_generator_that_starts_again_draws_other_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one seed for all its lives, 16 of 128 samples repeated another of their group."""
    seeds: list[int] = []

    def refuse(_config: Any, seed: int) -> None:
        seeds.append(seed)
        raise UmbraError("no engine")

    monkeypatch.setattr(opening, "open_torch", refuse)
    config = load_config(overrides=["generator.engine=torch"], environ={})
    for name in ("generator-0", "generator-0", "generator-1"):
        with pytest.raises(UmbraError, match="no engine"):
            service.run(SimpleNamespace(config=config, name=name, begin=print))  # pyright: ignore
    assert len(set(seeds)) == 3
