"""What vLLM loads in each of its processes (entry point group `vllm.general_plugins`).

It makes our way of loading weights known by its name. vLLM may call it several times.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from contextlib import suppress

from umbra.services.process.parent import signal_at_death_of

BACKEND = "umbra"
ADAPTER_BACKEND = "umbra-adapter"  # of versions that are an adapter alone
ADAPTER = 1  # its number in vLLM
_ENGINES = {
    BACKEND: ("umbra.services.generator.vllm.weights", "UmbraWeightTransferEngine"),
    ADAPTER_BACKEND: ("umbra.services.generator.vllm.weights", "AdapterTransferEngine"),
}
OURS_VARIABLE = "UMBRA_VLLM"  # set where a generator of ours started vLLM


def register() -> None:
    """Register our `WeightTransferEngine`s, and leave no orphans where a generator started vLLM."""
    if OURS_VARIABLE in os.environ:
        if (parent := multiprocessing.parent_process()) is not None:  # not the generator itself
            assert parent.pid is not None
            signal_at_death_of(parent.pid, signal.SIGKILL)
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for name, (module, engine) in _ENGINES.items():
        with suppress(ValueError):  # it is known already
            WeightTransferEngineFactory.register_engine(name, module, engine)
