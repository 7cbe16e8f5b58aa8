from enum import Enum
from typing import Any

class RequestOutputKind(Enum):
    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2

class SamplingParams:
    def __init__(self, **settings: Any) -> None: ...
