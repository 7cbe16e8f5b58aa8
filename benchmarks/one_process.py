"""A synchronous program of one process for the tasks of `end_to_end.py`, without our services.

Written as well as such a program can be, with Transformers' model: each prompt of a batch is read
once and its cache copied to the samples, finished rows leave the batch, query heads share their
keys without a copy, groups without an advantage are not trained on, and responses lie behind one
copy of their prompt. It has no staleness, and nothing of it survives a crash.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from end_to_end import GOALS, program_row, reached
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, Cache
from whole_runs import base_model, read_prompts, reward_of, run_file

from umbra.services.config.loader import load_config
from umbra.services.trainer.learner import learning_rate

CLIP = 0.2
LIMIT_S = 800.0


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Attend; in decoding the query heads of a key take the place of more queries."""
    rows, heads, length, width = query.shape
    groups = key.shape[1]
    if length == 1:
        grouped = query.view(rows, groups, heads // groups, width)
        out = scaled_dot_product_attention(grouped, key, value, mask, scale=scaling)
        return out.view(rows, 1, heads, width), None
    key, value = (t.repeat_interleave(heads // groups, 1) for t in (key, value))
    out = scaled_dot_product_attention(query, key, value, mask, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register("one_process", attend)


class Columns(Cache):
    """A cache whose rows all write their next token to one column: prompts end together."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[])
        self._layers: list[tuple[Tensor, Tensor]] = [(torch.empty(0), torch.empty(0))] * layers
        self._at = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Store keys and values `[n, G, T, D]` and return all of the layer."""
        if self._at == 0:
            self._layers[layer_idx] = (key_states, value_states)
            return key_states, value_states
        end = self._at + key_states.shape[2]
        for cached, new in zip(self._layers[layer_idx], (key_states, value_states), strict=True):
            cached[:, :, self._at : end] = new
        keys, values = self._layers[layer_idx]
        return keys[:, :, :end], values[:, :, :end]

    def spread(self, samples: int, prompt: int, room: int) -> None:
        """Copy each prompt to its samples, with room for their answers."""
        self._at = prompt
        self._change(lambda cached: pad(cached, (0, 0, 0, room)).repeat_interleave(samples, 0))

    def step(self) -> None:
        """Move on to the next column."""
        self._at += 1

    def keep(self, rows: Tensor) -> None:
        """Drop all other rows."""
        self._change(lambda cached: cached[rows])

    def _change(self, how: Callable[[Tensor], Tensor]) -> None:
        self._layers = [(how(keys), how(values)) for keys, values in self._layers]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the columns in use."""
        return self._at


@dataclass
class Batch:
    """Prompts of the groups; tokens, logprobs and advantages of the samples, group by group."""

    prompts: list[list[int]]
    tokens: list[list[int]]
    logprobs: list[list[float]]
    advantages: Tensor  # [groups * samples]


@torch.inference_mode()
def generate(
    model: Any, prompts: list[list[int]], samples: int, most: int, ends: set[int]
) -> tuple[list[list[int]], list[list[float]]]:
    """Sample answers of at most `most` tokens to each prompt; return their tokens and logprobs."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    padding = torch.tensor([longest - len(p) for p in prompts])
    index = torch.arange(longest)
    seen = (index[None] <= index[:, None]) & (index >= padding[:, None])[:, None]
    seen |= torch.eye(longest, dtype=torch.bool)  # padding sees itself, or there would be NaN
    cache = Columns(model.config.num_hidden_layers)
    logits = model(
        input_ids=ids,
        position_ids=(index - padding[:, None]).clamp(min=0),
        attention_mask=seen[:, None],
        past_key_values=cache,
        logits_to_keep=1,
    ).logits[:, -1]
    cache.spread(samples, longest, most)
    logits = logits.repeat_interleave(samples, 0)
    hidden = torch.arange(longest + most) < padding.repeat_interleave(samples)[:, None]
    mask = torch.zeros(hidden.shape, dtype=model.dtype).masked_fill_(hidden, -torch.inf)
    mask = mask[:, None, None]
    position = (longest - padding).repeat_interleave(samples)
    owner = list(range(len(prompts) * samples))
    tokens: list[list[int]] = [[] for _ in owner]
    logprobs: list[list[float]] = [[] for _ in owner]
    for step in range(most):
        distribution = logits.float().log_softmax(-1)
        noise = torch.empty_like(distribution).exponential_()
        drawn = (distribution.exp() / noise).argmax(-1)
        values = distribution.gather(1, drawn[:, None])[:, 0]
        live: list[int] = []
        for row, (token, value) in enumerate(zip(drawn.tolist(), values.tolist(), strict=True)):
            tokens[owner[row]].append(token)
            logprobs[owner[row]].append(value)
            if token not in ends:
                live.append(row)
        if not live or step == most - 1:
            break
        if len(live) < len(owner):
            rows = torch.tensor(live)
            cache.keep(rows)
            mask, position, drawn = mask[rows], position[rows], drawn[rows]
            owner = [owner[row] for row in live]
        logits = model(
            input_ids=drawn[:, None],
            position_ids=position[:, None],
            attention_mask=mask[..., : longest + step + 1],
            past_key_values=cache,
        ).logits[:, -1]
        cache.step()
        position = position + 1
    return tokens, logprobs


def packed(batch: Batch, samples: int, width: int) -> list[tuple[int, list[int]]]:
    """Return (group, its samples) for each row of about `width` tokens; no group without gain."""
    rows: list[tuple[int, list[int]]] = []
    for group, prompt in enumerate(batch.prompts):
        numbers = range(group * samples, (group + 1) * samples)
        if not bool(batch.advantages[numbers.start : numbers.stop].any()):
            continue
        spaces: list[tuple[int, list[int]]] = []  # room that is left, samples
        for sample in sorted(numbers, key=lambda s: -len(batch.tokens[s])):
            size = len(batch.tokens[sample]) - 1
            for at, (room, members) in enumerate(spaces):
                if room >= size:
                    members.append(sample)
                    spaces[at] = (room - size, members)
                    break
            else:
                spaces.append((width - len(prompt) - size, [sample]))
        rows += [(group, members) for _, members in spaces]
    return rows


def loss_of(model: Any, batch: Batch, rows: list[tuple[int, list[int]]], tokens: int) -> Tensor:
    """Return the clipped loss of `rows`, summed over their tokens and divided by `tokens`."""
    sizes = [
        len(batch.prompts[group]) + sum(len(batch.tokens[s]) - 1 for s in members)
        for group, members in rows
    ]
    width = max(sizes)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    positions, segments = ids.clone(), torch.full_like(ids, -1)  # -1: padding, 0: the prompt
    where: list[int] = []  # cells that predict a token of an answer
    chosen: list[int] = []
    for number, (group, members) in enumerate(rows):
        prompt = batch.prompts[group]
        at = len(prompt)
        ids[number, :at] = torch.tensor(prompt)
        positions[number, :at] = torch.arange(at)
        segments[number, :at] = 0
        for name, sample in enumerate(members, 1):
            answer = torch.tensor(batch.tokens[sample][:-1], dtype=torch.long)
            end = at + len(answer)
            where += [
                number * width + len(prompt) - 1,
                *range(number * width + at, number * width + end),
            ]
            ids[number, at:end] = answer
            positions[number, at:end] = torch.arange(len(prompt), len(prompt) + len(answer))
            segments[number, at:end] = name
            at = end
            chosen.append(sample)
    same = segments[:, :, None] == segments[:, None, :]
    prompt_seen = (segments[:, None, :] == 0) & (segments[:, :, None] > 0)
    seen = torch.ones(width, width, dtype=torch.bool).tril() & (same | prompt_seen)
    hidden = model.model(
        input_ids=ids, position_ids=positions, attention_mask=seen[:, None], use_cache=False
    ).last_hidden_state
    logits = model.lm_head(hidden.flatten(0, 1)[torch.tensor(where)]).float()
    targets = torch.tensor([token for s in chosen for token in batch.tokens[s]])
    behaviour = torch.tensor([value for s in chosen for value in batch.logprobs[s]])
    counts = torch.tensor([len(batch.tokens[s]) for s in chosen])
    gain = batch.advantages[torch.tensor(chosen)].repeat_interleave(counts)
    ratio = (logits.log_softmax(-1).gather(1, targets[:, None])[:, 0] - behaviour).exp()
    return -torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain).sum() / tokens


def update(model: Any, batch: Batch, samples: int, config: Any, cast: Any) -> None:
    """Add the gradient of the batch, in micro-batches of the run's size."""
    rows = packed(batch, samples, config.trainer.pack_tokens)
    total = sum(len(batch.tokens[s]) for _, members in rows for s in members)
    rows.sort(key=lambda row: -sum(len(batch.tokens[s]) for s in row[1]))
    per = max(1, config.trainer.micro_tokens // config.trainer.pack_tokens)
    for first in range(0, len(rows), per):
        with cast:
            loss = loss_of(model, batch, rows[first : first + per], total)
        loss.backward()


def train_task(task: str, seed: int, work: Path, steps: int, threads: int) -> dict[str, Any]:
    """Train until the reward, or for `steps` steps (0 = the task's own); return the row."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    base = base_model(work, task, seed)
    config = load_config(run_file(task))
    groups, samples = config.buffer.batch_groups, config.buffer.group_size
    tokenizer: Any = AutoTokenizer.from_pretrained(base / "base")
    model: Any = AutoModelForCausalLM.from_pretrained(
        base / "base", dtype=torch.float32, attn_implementation="one_process"
    )
    half = config.trainer.precision == "bf16"
    sampler: Any = copy.deepcopy(model).bfloat16() if half else model
    cast: AbstractContextManager[Any] = torch.autocast("cpu", torch.bfloat16, enabled=half)
    ends = {model.generation_config.eos_token_id, tokenizer.eos_token_id} - {None}
    optimizer = torch.optim.AdamW(
        model.parameters(),
        betas=config.trainer.betas,
        weight_decay=config.trainer.weight_decay,
        fused=True,
    )
    rows = read_prompts(base)
    random.Random(seed).shuffle(rows)
    reward = reward_of(task, config)
    rewards: list[float] = []
    lengths: list[float] = []
    clocks: list[tuple[float, float]] = [(time.monotonic(), time.process_time())]
    total = steps or config.run.steps
    for step in range(total):
        chosen = [rows[(step * groups + i) % len(rows)] for i in range(groups)]
        prompts = prompt_ids(tokenizer, [row["prompt"] for row in chosen])
        tokens, logprobs = generate(sampler, prompts, samples, config.sampling.max_tokens, ends)
        texts = tokenizer.batch_decode(
            [answer[:-1] if answer[-1] in ends else answer for answer in tokens],
            clean_up_tokenization_spaces=False,
        )
        earned = torch.tensor(
            [reward(t, chosen[i // samples]["answer"]) for i, t in enumerate(texts)]
        )
        table = earned.view(groups, samples)
        batch = Batch(prompts, tokens, logprobs, (table - table.mean(1, keepdim=True)).flatten())
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config.trainer, step, total)
        update(model, batch, samples, config, cast)
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.trainer.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        if half:
            for copied, own in zip(sampler.parameters(), model.parameters(), strict=True):
                copied.data.copy_(own.data)
        rewards.append(float(earned.mean()))
        lengths.append(sum(map(len, tokens)) / len(tokens))
        clocks.append((time.monotonic(), time.process_time()))
        if (not steps and reached(rewards, GOALS[task])) or clocks[-1][0] - clocks[0][0] > LIMIT_S:
            break
    return program_row(task, rewards, lengths, clocks, groups * samples)


def prompt_ids(tokenizer: Any, chats: Sequence[Any]) -> list[list[int]]:
    texts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    return tokenizer(texts, add_special_tokens=False)["input_ids"]
