"""Every architecture, loaded by two ranks that read their own rows (FSDP2 over gloo)."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes.architectures import ARCHITECTURES
from fakes.slowness import seconds
from integration.test_trainer_ranks import TESTS, launch, see_through

from umbra.services.runtime.model.architectures import PROVEN


@pytest.mark.timeout(seconds(300.0))
def test_two_ranks_hold_what_transformers_loads(tmp_path: Path) -> None:
    """Bit for bit, experts, tied weights and buffers included; a rank has no row of the other."""
    for name, architecture in ARCHITECTURES.items():
        if architecture.config().model_type in PROVEN:
            architecture.write(tmp_path / name)
    see_through(launch(tmp_path, 2, [str(TESTS / "programs/loading_rank.py")]))
