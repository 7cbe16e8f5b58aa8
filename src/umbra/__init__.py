"""Umbra: asynchronous RL post-training of language models without Ray.

The names in `__all__` are the public interface, stable or provisional (docs/start.md, Names).
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from umbra.deploy.python.run import Run, Step, attach
    from umbra.deploy.python.train import train
    from umbra.proto.errors import UmbraError, UsageError
    from umbra.services.environments.protocol import (
        Environment,
        Opening,
        SampleError,
        StepResult,
        Tool,
    )

__version__ = "0.2.0"

__all__ = [
    "Environment",
    "Opening",
    "Run",
    "SampleError",
    "Step",
    "StepResult",
    "Tool",
    "UmbraError",
    "UsageError",
    "__version__",
    "attach",
    "train",
]

_PROTOCOL = ("Environment", "Opening", "SampleError", "StepResult", "Tool")
_HOMES = {
    **dict.fromkeys(_PROTOCOL, "umbra.services.environments.protocol"),
    **dict.fromkeys(("Run", "Step", "attach"), "umbra.deploy.python.run"),
    **dict.fromkeys(("UmbraError", "UsageError"), "umbra.proto.errors"),
    "train": "umbra.deploy.python.train",
}


# Folders with modules of a run (`services/process/parent.py`): they come after all libraries, none
# of which they can shadow.
sys.path.extend(
    folder
    for folder in os.environ.get("UMBRA_SEARCH", "").split(os.pathsep)
    if folder and folder not in sys.path
)


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `import umbra` stays light."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
