"""Three ranks (FSDP2 over gloo): every architecture is loaded and published by rows."""

from pathlib import Path

import pytest
from fakes.architectures import ARCHITECTURES
from fakes.rank_processes import TESTS, launch, see_through

from umbra.services.modeling.architectures import PROVEN


@pytest.mark.timeout(300)
def test_ranks_hold_what_transformers_loads_and_write_what_one_would(tmp_path: Path) -> None:
    """Bit for bit, experts, tied weights and buffers included; most rows divide unevenly."""
    for name, architecture in ARCHITECTURES.items():
        if architecture.config().model_type in PROVEN:
            architecture.write(tmp_path / "models" / name)
    see_through(launch(tmp_path, 3, [str(TESTS / "programs/divided_rank.py"), "1"]))
