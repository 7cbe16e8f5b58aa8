"""Packed rows of several kinds, and queries, keys and values for them."""

import torch
from torch import Tensor

from umbra.services.modeling.micro_batch import MicroBatch, Tokens
from umbra.services.modeling.packing import pack


def samples(sizes: list[tuple[int, int, int]]) -> Tokens:
    """Of each (prompt, response, how many responses); all responses are learned."""
    generator = torch.Generator().manual_seed(5)
    ids, lengths, prompts, family, learned = [], [], [], [], []
    start = 0
    for number, (prompt, response, count) in enumerate(sizes):
        head = torch.randint(5, 90, (prompt,), generator=generator)
        for extra in range(count):
            tail = torch.randint(5, 90, (response + extra,), generator=generator)
            ids += [head, tail]
            learned.append(torch.arange(start + prompt, start + prompt + len(tail)))
            lengths.append(prompt + len(tail))
            prompts.append(prompt)
            family.append(number)
            start += lengths[-1]
    counts = torch.tensor([len(part) for part in learned])
    return Tokens(
        torch.cat(ids),
        torch.tensor(lengths),
        torch.cat(learned),
        torch.arange(len(counts)).repeat_interleave(counts),
        torch.tensor(prompts),
        torch.tensor(family),
    )


LAYOUTS = {  # what lies in the rows, tokens of a row, whether prompts are shared
    "one sequence in each row": ([(9, 20, 1), (5, 30, 2)], 8, False),
    "packed": ([(9, 20, 3), (40, 3, 2)], 128, False),
    "shared prompts": ([(30, 12, 4), (3, 25, 3)], 160, True),
    "a prompt without room": ([(70, 2, 6), (1, 1, 5)], 100, True),
    "longer than blocks": ([(150, 90, 3), (20, 200, 1)], 700, True),
}


def rows_of(layout: str) -> MicroBatch:
    sizes, width, share = LAYOUTS[layout]
    (micro,) = pack(samples(sizes), pack_tokens=width, micro_tokens=1 << 20, share_prompts=share)
    return micro


def inputs(micro: MicroBatch, heads: int, groups: int, width: int, values: int) -> list[Tensor]:
    rows, length = micro.input_ids.shape
    generator = torch.Generator().manual_seed(2)
    shapes = ((heads, width), (groups, width), (groups, values))
    return [
        torch.randn(rows, h, length, w, generator=generator, dtype=torch.float64).requires_grad_()
        for h, w in shapes
    ]


def gradients(output: Tensor, of: list[Tensor], seen: Tensor) -> list[Tensor]:
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(3))
    weights = weights.to(output) * seen[:, None, :, None]
    return list(torch.autograd.grad((output * weights).sum(), of))


def fed(micro: MicroBatch) -> Tensor:
    assert int(micro.fed.sum()) == micro.tokens
    return micro.fed
