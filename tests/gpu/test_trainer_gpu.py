"""How much of a GPU an update uses."""

from pathlib import Path

import pytest
import torch
from fakes.noisy_batch import noisy_trajectories

from umbra.services.modeling.packing import pack
from umbra.services.runtime.config import TrainerConfig
from umbra.services.trainer.batch import make_batch
from umbra.services.trainer.learner import Learner
from umbra.services.trainer.metrics import peak_memory_gib, speed_metrics
from umbra.services.trainer.phases import Phases
from umbra.services.trainer.policy import load_policy

pytestmark = pytest.mark.gpu


def test_the_ceiling_is_above_what_an_update_reaches(tiny_model_dir: Path) -> None:
    trajectories = noisy_trajectories(load_policy(tiny_model_dir)[0])
    learner = Learner(load_policy(tiny_model_dir)[0], TrainerConfig(device="cuda"), 1)
    assert learner.ceiling > 1e12
    batch = make_batch(trajectories, 1000)
    (micro,) = pack(batch.tokens, pack_tokens=256, micro_tokens=4096)
    work = learner.operations.update(micro)
    mfu = speed_metrics(1.0, work, 1.0, learner.ceiling)["mfu"]
    assert mfu is not None and 0 < mfu < 1
    assert peak_memory_gib(torch.device("cuda")) > 0


def test_phases_wait_for_the_kernels() -> None:
    """A call returns at once; its phase has the time of its kernels, and the parts add up."""
    phases = Phases(torch.device("cuda"))
    a = torch.randn(8192, 8192, device="cuda")
    phases.take()
    with phases("product"):
        for _ in range(8):
            torch.mm(a, a)
    with phases("nothing"):
        pass
    found = phases.take()
    assert found["product"] > 0.9 * found["step"]
    assert sum(found[name] for name in ("product", "nothing", "other")) == pytest.approx(
        found["step"]
    )
