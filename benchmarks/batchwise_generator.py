"""`umbra generator` that begins a batch when the last one has ended, as `generate` of a model does.

    python benchmarks/batchwise_generator.py [flags of `umbra generator`]

For the ablation of continuous admission: the replay engine as it is, but a slot that is free stays
empty until all are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from umbra.services.config import RunConfig
from umbra.services.generator.engines.engine import EngineOutput, EngineRequest
from umbra.services.generator.engines.opening import OpenEngine, open_replay
from umbra.services.generator.replay_engine import ReplayEngine
from umbra.services.generator.service import run
from umbra.services.process.command import ServiceContext, service_command
from umbra.services.process.parent import die_with_parent


class BatchwiseEngine(ReplayEngine):
    """Holds requests back while any is live."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._held: list[EngineRequest] = []

    @property
    def busy(self) -> bool:
        """Whether `poll` has something to do."""
        return bool(self._held) or super().busy

    def submit(self, requests: Iterable[EngineRequest]) -> None:
        """Queue `requests` for the next batch."""
        self._held += requests

    def poll(self, timeout_s: float) -> list[EngineOutput]:
        """As the replay engine's; a batch of all slots begins when nothing is live."""
        if not self.live and self._held:
            batch, self._held = self._held[: self.slots], self._held[self.slots :]
            super().submit(batch)
        return super().poll(timeout_s)

    def abort(self, request_ids: Iterable[str] | None = None) -> list[EngineOutput]:
        """As the replay engine's; nothing is said of what was held back."""
        names = None if request_ids is None else set(request_ids)
        self._held = [] if names is None else [r for r in self._held if r.request_id not in names]
        return super().abort(names)


def _open(config: RunConfig, name: str) -> OpenEngine:
    del name
    return open_replay(config, BatchwiseEngine)


def _serve(context: ServiceContext) -> int:
    return run(context, _open)


if __name__ == "__main__":
    die_with_parent()
    service_command("generator", _serve).main(sys.argv[1:], prog_name="batchwise_generator")
