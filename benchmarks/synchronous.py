"""The demo's sort task in one process that generates and trains in turns: what we have to beat.

    python benchmarks/synchronous.py MODEL PROMPTS [--steps 360] [--seed 0] [--threads 1]

Written as well as such a program can be, with Transformers' model as it is and none of our
services: the 32 prompts of a batch are read once each and their cache is copied to the samples,
finished rows leave the batch, no key is copied for the query heads that share it, groups without an
advantage are not trained on, and responses lie behind one copy of their prompt in rows of 64. It
prints one JSON object. Settings, prompts, loss and schedule are the demo's (`sort.toml`); it has no
staleness, and nothing of it survives a crash.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, Cache

PROMPTS, SAMPLES = 32, 8
MOST, CONTEXT = 24, 64  # tokens of an answer, and of a row in training
RATE, WARM_UP, FINAL = 6e-4, 5, 0.05
CLIP = 0.2
LEFT_OUT = 5  # first steps, which the speed is not taken from
LAST = 20  # batches whose mean reward is the final one


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Transformers' attention; query heads that share a key stand where more queries would."""
    rows, heads, length, width = query.shape
    groups = key.shape[1]
    if length == 1:
        grouped = query.view(rows, groups, heads // groups, width)
        found = scaled_dot_product_attention(grouped, key, value, mask, scale=scaling)
        return found.view(rows, 1, heads, width), None
    key, value = (t.repeat_interleave(heads // groups, 1) for t in (key, value))
    found = scaled_dot_product_attention(query, key, value, mask, scale=scaling)
    return found.transpose(1, 2).contiguous(), None


AttentionInterface.register("synchronous", attend)


class Columns(Cache):
    """A cache in which all rows get their next token in the same column: prompts end together."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[])
        self._held: list[tuple[Tensor, Tensor]] = [(torch.empty(0), torch.empty(0))] * layers
        self._at = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Store `[n, G, T, D]`; what is held so far."""
        if self._at == 0:
            self._held[layer_idx] = (key_states, value_states)
            return key_states, value_states
        end = self._at + key_states.shape[2]
        for held, new in zip(self._held[layer_idx], (key_states, value_states), strict=True):
            held[:, :, self._at : end] = new
        keys, values = self._held[layer_idx]
        return keys[:, :, :end], values[:, :, :end]

    def spread(self, samples: int, prompt: int) -> None:
        """After the prompts: so many samples of each, with room for their answers."""
        self._at = prompt
        self._change(lambda held: pad(held, (0, 0, 0, MOST)).repeat_interleave(samples, 0))

    def step(self) -> None:
        """A column is full."""
        self._at += 1

    def keep(self, rows: Tensor) -> None:
        """Let go of all other rows."""
        self._change(lambda held: held[rows])

    def _change(self, how: Callable[[Tensor], Tensor]) -> None:
        self._held = [(how(keys), how(values)) for keys, values in self._held]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Nobody needs it: positions and masks are given."""
        return self._at


@dataclass
class Batch:
    """What was generated: for each sample its prompt, tokens and their logprobs."""

    prompts: list[list[int]]  # of each group
    tokens: list[list[int]]  # of each sample, group by group
    logprobs: list[list[float]]
    rewards: Tensor  # [groups, samples]


@torch.inference_mode()
def generate(model: Any, prompts: list[list[int]], ends: set[int]) -> tuple[Any, Any]:
    """Tokens and logprobs of SAMPLES answers to each prompt."""
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
    cache.spread(SAMPLES, longest)
    logits = logits.repeat_interleave(SAMPLES, 0)
    hidden = torch.arange(longest + MOST) < padding.repeat_interleave(SAMPLES)[:, None]
    mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)[:, None, None]
    position = (longest - padding).repeat_interleave(SAMPLES)
    owner = list(range(len(prompts) * SAMPLES))
    tokens: list[list[int]] = [[] for _ in owner]
    logprobs: list[list[float]] = [[] for _ in owner]
    for step in range(MOST):
        distribution = logits.log_softmax(-1)
        noise = torch.empty_like(logits).exponential_()
        drawn = (distribution.exp() / noise).argmax(-1)
        values = distribution.gather(1, drawn[:, None])[:, 0]
        live: list[int] = []
        for row, (token, value) in enumerate(zip(drawn.tolist(), values.tolist(), strict=True)):
            tokens[owner[row]].append(token)
            logprobs[owner[row]].append(value)
            if token not in ends:
                live.append(row)
        if not live or step == MOST - 1:
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


def rows_of(batch: Batch, advantages: Tensor) -> list[list[tuple[int, list[int]]]]:
    """Groups with an advantage, in rows of at most CONTEXT: one prompt, and samples behind it."""
    rows: list[list[tuple[int, list[int]]]] = []
    for group, prompt in enumerate(batch.prompts):
        if not bool(advantages[group].any()):
            continue
        samples = range(group * SAMPLES, (group + 1) * SAMPLES)
        open_rows: list[tuple[int, list[int]]] = []
        for sample in sorted(samples, key=lambda s: -len(batch.tokens[s])):
            size = len(batch.tokens[sample]) - 1
            for at, (room, members) in enumerate(open_rows):
                if room >= size:
                    members.append(sample)
                    open_rows[at] = (room - size, members)
                    break
            else:
                open_rows.append((CONTEXT - len(prompt) - size, [sample]))
        rows += [[(group, members)] for _, members in open_rows]
    return sorted(rows, key=lambda row: -sum(len(batch.tokens[s]) - 1 for s in row[0][1]))


def train(model: Any, optimizer: Any, batch: Batch, advantages: Tensor) -> None:
    """One update, if any group has an advantage."""
    rows = rows_of(batch, advantages)
    if not rows:
        return
    width = max(
        len(batch.prompts[g]) + sum(len(batch.tokens[s]) - 1 for s in members)
        for ((g, members),) in rows
    )
    ids: list[list[int]] = []
    positions: list[list[int]] = []
    segments: list[list[int]] = []  # 0: the prompt, which all see; -1: padding
    where: list[int] = []  # cells that predict a token of an answer
    targets: list[int] = []
    behaviour: list[float] = []
    gains: list[float] = []
    for number, ((group, members),) in enumerate(rows):
        prompt = batch.prompts[group]
        row, at, segment = list(prompt), list(range(len(prompt))), [0] * len(prompt)
        for name, sample in enumerate(members, 1):
            answer = batch.tokens[sample]
            start = number * width + len(row)
            where.append(number * width + len(prompt) - 1)
            where += range(start, start + len(answer) - 1)
            targets += answer
            behaviour += batch.logprobs[sample]
            gains += [float(advantages[group, sample % SAMPLES])] * len(answer)
            row += answer[:-1]
            at += range(len(prompt), len(prompt) + len(answer) - 1)
            segment += [name] * (len(answer) - 1)
        rest = width - len(row)
        ids.append(row + [0] * rest)
        positions.append(at + [0] * rest)
        segments.append(segment + [-1] * rest)
    owner = torch.tensor(segments)
    same = owner[:, :, None] == owner[:, None, :]
    prompt_seen = (owner[:, None, :] == 0) & (owner[:, :, None] > 0)
    seen = torch.ones(width, width, dtype=torch.bool).tril() & (same | prompt_seen)
    hidden = model.model(
        input_ids=torch.tensor(ids),
        position_ids=torch.tensor(positions),
        attention_mask=seen[:, None],
        use_cache=False,
    ).last_hidden_state
    logits = model.lm_head(hidden.flatten(0, 1)[torch.tensor(where)])
    found = logits.log_softmax(-1).gather(1, torch.tensor(targets)[:, None])[:, 0]
    gain = torch.tensor(gains)
    ratio = (found - torch.tensor(behaviour)).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    loss = -torch.minimum(ratio * gain, clipped * gain).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def rate(step: int, steps: int) -> float:
    """Rises over WARM_UP steps, then falls in a straight line."""
    if step < WARM_UP:
        return RATE * (step + 1) / WARM_UP
    return RATE * (1 - (1 - FINAL) * (step - WARM_UP) / max(1, steps - 1 - WARM_UP))


def run(folder: str, data: str, steps: int, seed: int) -> dict[str, Any]:
    """Train for so many steps; what it took."""
    torch.manual_seed(seed)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="synchronous"
    )
    rows = [json.loads(line) for line in Path(data).read_text().splitlines()]
    random.Random(seed).shuffle(rows)
    ends = {model.generation_config.eos_token_id, tokenizer.eos_token_id} - {None}
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    rewards: list[float] = []
    times: list[tuple[float, float]] = []
    for step in range(steps):
        some = [rows[(step * PROMPTS + i) % len(rows)] for i in range(PROMPTS)]
        chats = [[{"role": "user", "content": row["prompt"]}] for row in some]
        texts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
        prompts = tokenizer(texts, add_special_tokens=False)["input_ids"]
        tokens, logprobs = generate(model, prompts, ends)
        texts = tokenizer.batch_decode(
            [one[:-1] if one[-1] in ends else one for one in tokens],
            clean_up_tokenization_spaces=False,
        )
        right = [
            float(text.strip() == some[i // SAMPLES]["answer"]) for i, text in enumerate(texts)
        ]
        earned = torch.tensor(right).view(PROMPTS, SAMPLES)
        batch = Batch(prompts, tokens, logprobs, earned)
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps)
        train(model, optimizer, batch, earned - earned.mean(1, keepdim=True))
        rewards.append(float(earned.mean()))
        times.append((time.monotonic(), time.process_time()))
    first = min(LEFT_OUT, steps - 1) - 1
    done = (steps - 1 - first) * PROMPTS * SAMPLES
    seconds, cpu = (times[-1][i] - times[first][i] for i in (0, 1))
    return {
        "steps": steps,
        "samples": steps * PROMPTS * SAMPLES,
        "samples_per_s": done / seconds,
        "cpu_ms": 1e3 * cpu / done,  # of a sample, without start and first steps
        "all_cpu_ms": 1e3 * time.process_time() / (steps * PROMPTS * SAMPLES),
        "cores": cpu / seconds,
        "final_reward": mean(rewards[-LAST:]),
        "rewards": [round(one, 4) for one in rewards],
    }


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("prompts")
    parser.add_argument("--steps", type=int, default=360)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(json.dumps(run(args.model, args.prompts, args.steps, args.seed)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
