"""What vLLM loads in each of its processes (entry point group `vllm.general_plugins`).

It makes our way of loading weights known by its name. vLLM may call it several times.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal

BACKEND = "umbra"
OURS_VARIABLE = "UMBRA_VLLM"  # set where a generator of ours started vLLM
_PR_SET_PDEATHSIG = 1


def register() -> None:
    """Register our `WeightTransferEngine`, and leave no orphans where a generator started vLLM."""
    if OURS_VARIABLE in os.environ:
        _die_with_parent()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:  # has no question of its own
        WeightTransferEngineFactory.register_engine(
            BACKEND, "umbra.services.generator.vllm_weights", "UmbraWeightTransferEngine"
        )


def _die_with_parent() -> None:
    """End when the process that started this one does, even if that was killed."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return  # the generator itself
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent.pid:  # it died before prctl took effect
        os.kill(os.getpid(), signal.SIGKILL)
