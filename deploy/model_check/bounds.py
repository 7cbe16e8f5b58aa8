"""How far rounding alone may take a logprob or a gradient from Transformers'.

Both sides compute in float32 and add up in another order. An error then grows with the numbers that
are added, and like the square root of how many there are: those of a hidden state in every layer.
What is measured for the tiny models of the tests stays ten times below these bounds; a wrong mask
is thousands of times above.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from umbra.deploy.model_check.outcome import Row
from umbra.services.modeling.reference import Expected

_LOGPROBS = 1e-5  # nats, for a largest logit of 1
_GRADIENTS = 3e-5  # of a gradient's norm
_VLLM = 1e-4  # nats, whatever the logits
_HIDDEN, _LAYERS = 64, 2  # at which these were measured


def difference(name: str, found: Tensor, expected: Expected, config: Any) -> Row:
    """The token whose logprob is farthest off, for what was added up; [T] each."""
    bounds = _LOGPROBS * _growth(config) * expected.scale.clamp(min=1)
    off = (found - expected.logprobs).abs()
    at = int((off / bounds).argmax())  # a NaN counts as the largest
    return Row(name, float(off[at]), float(bounds[at]), "nats")


def gradient_bound(config: Any) -> float:
    """For the norm of a difference, in parts of the norm."""
    return _GRADIENTS * _growth(config)


def vllm_bound(config: Any) -> float:
    """For logprobs of vLLM's kernels, in nats."""
    return _VLLM * _growth(config)


def _growth(config: Any) -> float:
    added = max(config.hidden_size, _HIDDEN) * max(config.num_hidden_layers, _LAYERS)
    return (added / (_HIDDEN * _LAYERS)) ** 0.5
