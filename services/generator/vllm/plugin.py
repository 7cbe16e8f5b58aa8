"""The plugin that vLLM loads in each process (entry point group `vllm.general_plugins`).

It makes our way of loading weights known by its name. vLLM may call it several times.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
from contextlib import suppress
from typing import Any

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
    parent = multiprocessing.parent_process()
    if OURS_VARIABLE in os.environ and parent is not None:  # not the generator itself
        assert parent.pid is not None
        signal_at_death_of(parent.pid, signal.SIGKILL)
    _tell_versions()  # also there: a server may be started by a process that has an engine
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for name, (module, engine) in _ENGINES.items():
        with suppress(ValueError):  # it is known already
            WeightTransferEngineFactory.register_engine(name, module, engine)


def _tell_versions() -> None:
    """Have each part of a stream tell the versions of all tokens so far, not its last one alone.

    Else nobody knows where a version begins in what a server that dies has sent.
    """
    from vllm.v1.engine.output_processor import RequestState

    state: Any = RequestState
    plain = state._new_completion_output
    if hasattr(plain, "__wrapped__"):  # it was called before
        return

    @functools.wraps(plain)
    def telling(self: Any, *arguments: Any) -> Any:
        output = plain(self, *arguments)
        output.weight_versions = self._weight_version_spans()
        return output

    state._new_completion_output = telling
