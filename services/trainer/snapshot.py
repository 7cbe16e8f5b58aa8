"""The policy's weights as bytes in an arena slot, in the dtype that is served."""

from __future__ import annotations

import torch
from torch import nn

from umbra.proto.records import Manifest

# Configuration's names, torch's types and safetensors' names.
DTYPES: dict[str, tuple[torch.dtype, str]] = {
    "float32": (torch.float32, "F32"),
    "bfloat16": (torch.bfloat16, "BF16"),
    "float16": (torch.float16, "F16"),
}


class Snapshot:
    """Casts a model's parameters into version slots.

    Tensors have the names that Hugging Face's `state_dict` gives them and come in the order of the
    layers. Tied weights appear once, under their first name; buffers are not sent, since receivers
    compute them from the configuration.

    Args:
        model: the bare model, without wrappers.
        dtype: "float32", "bfloat16" or "float16".
    """

    def __init__(self, model: nn.Module, dtype: str) -> None:
        self._parameters = dict(model.named_parameters())
        self._dtype, self._dtype_name = DTYPES[dtype]

    def layout(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Name, safetensors dtype and shape of every tensor, in order."""
        return [
            (name, self._dtype_name, tuple(parameter.shape))
            for name, parameter in self._parameters.items()
        ]

    @torch.no_grad()
    def write(self, manifest: Manifest, slot: memoryview) -> None:
        """Cast the weights as they are now into `slot`, laid out as `manifest` says."""
        for entry in manifest.tensors:
            area = slot[entry.offset : entry.offset + entry.nbytes]
            target = torch.frombuffer(area, dtype=self._dtype).view(entry.shape)
            target.copy_(self._parameters[entry.name])
