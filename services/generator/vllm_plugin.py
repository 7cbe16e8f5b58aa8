"""What vLLM loads in each of its processes (entry point group `vllm.general_plugins`).

It makes our way of loading weights known by its name. vLLM may call it several times.
"""

from __future__ import annotations

BACKEND = "umbra"


def register() -> None:
    """Register our `WeightTransferEngine`."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:  # has no question of its own
        WeightTransferEngineFactory.register_engine(
            BACKEND, "umbra.services.generator.vllm_weights", "UmbraWeightTransferEngine"
        )
