"""What vLLM serves, from disk and after a publish, compared with Transformers."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch

from umbra.deploy.model_check.bounds import vllm_bound
from umbra.deploy.model_check.outcome import Row
from umbra.proto.errors import StartupError, UsageError
from umbra.services.generator.vllm import check as vllm_check
from umbra.services.trainer.snapshot import whole_weights


def compare_vllm(directory: Path, config: Any, checked: Collection[str] = ()) -> Iterator[Row]:
    """Rows about vLLM on the model in `directory`; one that is left out where vLLM has none.

    Args:
        directory: of the model.
        config: Transformers'.
        checked: see `check_architecture`.
    """
    try:
        found = vllm_check.vllm_differences(
            directory,
            lambda model: whole_weights(model).items(),
            checked=checked,
            threads=torch.get_num_threads(),
        )
    except (UsageError, StartupError) as error:
        yield Row("logprobs of vLLM", None, 0.0, "nats", str(error).partition("\n")[0])
        return
    bound = vllm_bound(config)
    for what, worst in (
        ("from disk", found.from_disk),
        ("the same weights published", found.same),
        ("others published", found.changed),
    ):
        yield Row(f"logprobs of vLLM, {what}", worst, bound, "nats")
