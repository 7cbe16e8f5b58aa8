"""Which experts vLLM's routers chose, as trajectories tell it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from umbra.proto.errors import UsageError
from umbra.proto.records import Routing
from umbra.services.modeling.experts import NO_ROUTERS, Routers, check_routing_fits


@dataclass(frozen=True, slots=True)
class ToldRouters:
    """The routers of a model: `places` are the layers that have one, of all that vLLM tells of."""

    places: Sequence[int]
    choices: int
    experts: int

    def routing(self, *chunks: Any) -> Routing:
        """What vLLM's arrays [rows, all layers, choices] say, one after another; None says nothing.

        In layers without a router they have zeros.
        """
        kind = np.uint8 if self.experts <= 256 else np.dtype("<u2")
        told = [chunk[:, list(self.places)] for chunk in chunks if chunk is not None]
        chosen = b"".join(np.ascontiguousarray(rows, dtype=kind).tobytes() for rows in told)
        return Routing(
            layers=len(self.places), choices=self.choices, experts=self.experts, chosen=chosen
        )


def told_routers(outline: Any, platform: str, max_context: int) -> ToldRouters:
    """The routers of the model `outline` whose choices vLLM for `platform` tells.

    Raises:
        UsageError: there are none, it does not, or a sequence of `max_context` tokens has too many.
    """
    if platform == "cpu":
        raise UsageError(
            "trainer.router_replay: vLLM on CPUs does not say which experts it chose: set it to "
            'false, or generator.engine = "torch"'
        )
    routers = Routers.of(outline)
    if routers is None:
        raise UsageError(NO_ROUTERS)
    check_routing_fits(routers.kind, max_context)
    return ToldRouters(routers.places, routers.choices, routers.experts)
