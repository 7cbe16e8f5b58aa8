"""Two ranks (FSDP2 over gloo): loading every architecture by rows, and options of sharding."""

from pathlib import Path

import pytest
from fakes.architectures import ARCHITECTURES
from fakes.rank_processes import TESTS, launch, see_through

from umbra.services.modeling.architectures import PROVEN


@pytest.mark.timeout(300)
def test_two_ranks_hold_what_transformers_loads(tmp_path: Path) -> None:
    """Bit for bit, experts, tied weights and buffers included; a rank has no row of the other."""
    for name, architecture in ARCHITECTURES.items():
        if architecture.config().model_type in PROVEN:
            architecture.write(tmp_path / "models" / name)
    see_through(launch(tmp_path, 2, [str(TESTS / "programs/divided_rank.py"), "1"]))
