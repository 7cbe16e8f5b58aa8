"""Constants of the configuration that a test sets like keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from umbra.services.config import TrainerConfig

NAMES = ("logits_mib", "max_ratio", "mismatch_every")


@contextmanager
def constants(settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Set the `settings` that are constants of the trainer; yields the others, its keys."""
    with pytest.MonkeyPatch.context() as patch:
        for name in NAMES:
            if name in settings:
                patch.setattr(TrainerConfig, name, settings[name])
        yield {name: value for name, value in settings.items() if name not in NAMES}
