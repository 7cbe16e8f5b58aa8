from typing import Any, Generic, TypeVar

import torch

TInitInfo = TypeVar("TInitInfo")
TUpdateInfo = TypeVar("TUpdateInfo")

class WeightTransferInitInfo: ...
class WeightTransferUpdateInfo: ...

class WeightTransferInitRequest:
    def __init__(self, init_info: dict[str, Any]) -> None: ...

class WeightTransferUpdateRequest:
    def __init__(self, update_info: dict[str, Any]) -> None: ...

class WeightTransferEngine(Generic[TInitInfo, TUpdateInfo]):
    model: Any
    model_config: Any
    device: torch.device
    def parse_update_info(self, update_dict: dict[str, Any]) -> TUpdateInfo: ...
