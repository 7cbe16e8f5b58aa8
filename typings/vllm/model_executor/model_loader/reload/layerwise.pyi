from typing import Any

from torch import nn

class LayerReloadingInfo:
    load_numel: int
    loaded_weights: list[Any]

def get_layerwise_info(layer: nn.Module) -> LayerReloadingInfo: ...
