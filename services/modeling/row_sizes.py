"""Lengths of packed rows and forward passes, where the run file leaves them to `auto`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from umbra.services.config import TrainerConfig
from umbra.services.modeling.architectures import keeps_state, layer_kinds
from umbra.services.process.host import host_bytes

if TYPE_CHECKING:
    import torch

SHORT_ROW = 256  # tokens; narrower rows save little
CPU_PASS, GPU_PASS = 4096, 65536  # tokens at most; more of them make no device faster
SCORING_PASS = 16384  # the same of a pass without gradient on a GPU, which others may use too
READ_TOKENS = 16384  # of contexts in a pass of the torch engine, so that its memory stays bounded
READ_FLOPS = 5e11  # the same on a CPU: some ten seconds, since leases are renewed between passes
WEIGHT_BYTES = 16  # of a weight in float32, its gradient and two moments
ACTIVATIONS = 0.5  # of the memory that weights leave: the rest is logits, scratch and fragmentation


class RowSizes(NamedTuple):
    """`pack_tokens` and `micro_tokens` of a trainer or scorer, as numbers."""

    pack_tokens: int
    micro_tokens: int


def rows_within(
    config: TrainerConfig, model: Any, fits: int, kind: str, max_tokens: int, most: int = GPU_PASS
) -> RowSizes:
    """Return the configured numbers; for `auto` numbers that suit the device and the samples.

    A pass has what `fits` into memory, at most `most` tokens on a GPU and 4096 on a CPU. On a GPU a
    row is as long as a pass, as many segments cost no more than many rows. On a CPU, where its mask
    is dense, it has room for two of the longest responses (`max_tokens`; 0: unknown), which share a
    prompt. Where layers carry a state, a row has one sequence: no two fit into one token.
    """
    pack_tokens, micro_tokens = config.pack_tokens, config.micro_tokens
    gpu = kind == "cuda"
    if micro_tokens == "auto":
        most = most if gpu else max(CPU_PASS, 2 * max_tokens)
        micro_tokens = max(SHORT_ROW, min(fits, most))
    if pack_tokens == "auto":
        pack_tokens = micro_tokens if gpu else min(micro_tokens, max(SHORT_ROW, 2 * max_tokens))
    if keeps_state(model):
        pack_tokens = 1
    return RowSizes(pack_tokens, micro_tokens)


def scoring_rows(
    config: TrainerConfig,
    model: Any,
    weights: int,
    each: int,
    memory: int,
    kind: str,
    max_tokens: int,
) -> RowSizes:
    """Return the sizes of passes without gradient, which keep one layer's tensors at a time.

    `weights` are numbers of `each` bytes; the device has `memory` bytes in all.
    """
    room = _room_for_tokens(memory, weights * each, int(config.logits_mib * 2**20))
    fits = room // (each * layer_numbers(model))
    return rows_within(config, model, fits, kind, max_tokens, SCORING_PASS)


def reading_tokens(kind: str, parameters: int) -> int:
    """Return how many tokens of contexts the torch engine begins to read in a pass."""
    fits = READ_TOKENS if kind == "cuda" else int(READ_FLOPS / (2 * parameters))
    return max(SHORT_ROW, min(READ_TOKENS, fits))


def _room_for_tokens(memory: int, weights: int, logits: int) -> int:
    """Return the bytes for activations beside `weights` and `logits` at a time; never negative."""
    return max(0, int(ACTIVATIONS * (memory - weights - 4 * logits)))


def memory_of(device: torch.device, per_host: int) -> int:
    """Return the bytes of the GPU, or this process's share of the host's or container's."""
    if device.type != "cuda":
        return host_bytes() // per_host
    import torch  # not above: `umbra check` estimates without it

    return torch.cuda.get_device_properties(device).total_memory


def activation_bytes(config: TrainerConfig, model: Any, kind: str = "cpu") -> int:
    """Return the numbers that a token keeps for the backward pass, over all layers.

    Of layers that are computed again: their input, and all of one. `selective` counts as none of
    them, which is more than it keeps. `model` is its Transformers config.
    """
    known = model.get_text_config()
    layers = known.num_hidden_layers
    kept = layers * layer_numbers(model)
    if config.recomputes_on(kind) is True:
        kept = layers * known.hidden_size + layer_numbers(model)
    return kept * (4 if config.precision_on(kind) == "no" else 2)


def fitting_tokens(config: TrainerConfig, model: Any, weights: int, memory: int, kind: str) -> int:
    """Return how many tokens' activations fit beside a rank's weights; 0 if these alone do not."""
    room = _room_for_tokens(memory, WEIGHT_BYTES * weights, config.logits_bytes_on(kind))
    return room // activation_bytes(config, model, kind)


def layer_numbers(model: Any) -> int:
    """Return the numbers of a token in a layer that training keeps, by the model's config.

    Ten as wide as the hidden state (two norms, the output projections, the residual stream), three
    of each query, key and value (projected, normed or rotated, and what attention keeps), four of
    each unit of the feed-forward part that the token meets.
    """
    known = model.get_text_config()
    hidden, heads = known.hidden_size, getattr(known, "num_attention_heads", 0)
    width = getattr(known, "head_dim", None) or hidden // max(1, heads)
    attended = (heads + 2 * (getattr(known, "num_key_value_heads", None) or heads)) * width
    mixed = max(3 * attended, _state_sizes(known)[1])
    units = getattr(known, "intermediate_size", None) or (4 * hidden if heads else 0)
    expert = getattr(known, "moe_intermediate_size", None)
    if expert:
        units = max(units, expert * (getattr(known, "num_experts_per_tok", None) or 1))
    return 10 * hidden + mixed + 4 * units


def state_numbers(model: Any) -> int:
    """Return the numbers of a sequence's states in all layers, convolutions left out."""
    known = model.get_text_config()
    layers = sum(kind in ("linear_attention", "hybrid") for kind in layer_kinds(known))
    return layers * _state_sizes(known)[0]


def _state_sizes(known: Any) -> tuple[int, int]:
    """Return how many numbers a layer's state has, and how many training keeps per token.

    Counted as without kernels: scans in chunks keep the pairs of a chunk, others each state.
    """

    def first(*names: str) -> int:
        return next((v for name in names if isinstance(v := getattr(known, name, None), int)), 0)

    size = first("linear_key_head_dim", "ssm_state_size", "mamba_d_state", "state_size")
    if not (size and keeps_state(known)):
        return 0, 0
    heads = first("linear_num_value_heads", "mamba_num_heads", "mamba_n_heads", "n_mamba_heads")
    heads = heads or first("num_heads")
    chunk = first("mamba_chunk_size", "chunk_size") or 64
    width = first("linear_value_head_dim", "mamba_head_dim", "mamba_d_head", "mamba_headdim")
    inner = heads * (width or first("head_dim"))
    if heads:
        return inner * size, 16 * inner + 6 * heads * (chunk + size)
    inner = first("mamba_expand", "expand") * known.hidden_size
    return inner * size, 3 * inner * (size + 2)
