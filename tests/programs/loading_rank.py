"""One rank that reads its rows of several models; started as torchrun would.

Argument: a folder with a folder `models`. Each rank ends with 0 if what the ranks hold together is,
bit for bit, what Transformers loads, and nobody holds more than its rows.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from umbra.services.config import TrainerConfig
from umbra.services.trainer.distributed.ranks import join_ranks
from umbra.services.trainer.learner import Learner
from umbra.services.trainer.policy import load_policy, open_policy


def main(folder: Path) -> int:
    """All models; the exit code."""
    config = TrainerConfig(device="cpu", rank_timeout_s=120.0)
    with join_ranks(config) as ranks:
        for directory in sorted((folder / "models").iterdir()):
            plain, _ = load_policy(directory)
            model, _, files = open_policy(directory)
            assert files is not None, directory.name
            learner = Learner(model, config, 1, ranks, files=files)
            for name, parameter in learner.model.named_parameters():
                place = (directory.name, name)
                expected = plain.get_parameter(name)
                assert isinstance(parameter, DTensor), place
                rows = -(-len(expected) // ranks.world)
                assert len(parameter.to_local()) <= rows, place
                whole = parameter.full_tensor()
                assert whole.dtype == expected.dtype, place
                assert torch.equal(whole, expected), place
            for name, buffer in learner.model.named_buffers():
                assert torch.equal(buffer, plain.get_buffer(name)), (directory.name, name)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
