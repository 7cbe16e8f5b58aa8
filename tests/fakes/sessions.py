"""Sessions of several turns on an engine, and what their logprobs have to be."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch
from transformers import DynamicCache

from umbra.proto.records import Sampling
from umbra.services.generator.engines.engine import Engine, EngineOutput, EngineRequest


class Session:
    """One that says some tokens, and is answered with others, turn after turn.

    Args:
        name: of the session.
        prompt: its first tokens.
        seed: of the answers.
    """

    def __init__(self, name: str, prompt: list[int], seed: int = 0) -> None:
        self.name = name
        self.tokens = list(prompt)
        self.turns: list[tuple[int, EngineOutput]] = []  # prompt tokens of each, and its output
        self._source = random.Random(seed)

    def request(self, max_tokens: int = 6, answered: int = 4) -> EngineRequest:
        """The next turn, after an answer of `answered` tokens if it is not the first."""
        if self.turns:
            self.tokens += [self._source.randrange(5, 100) for _ in range(answered)]
        name, sampling = f"{self.name}-{len(self.turns)}", Sampling(temperature=1.0)
        return EngineRequest(name, list(self.tokens), sampling, max_tokens, session=self.name)

    def ended(self, output: EngineOutput) -> None:
        self.turns.append((len(self.tokens), output))
        self.tokens += output.token_ids

    def turn(self, engine: Engine, max_tokens: int = 6, answered: int = 4) -> int:
        """Have a turn on an engine without other work; tokens that were not read again for it."""
        before = engine.cache.cached_tokens
        engine.submit([self.request(max_tokens, answered)])
        found: list[EngineOutput] = []
        while not found:
            found = engine.poll(0.05)
        self.ended(found[0])
        return engine.cache.cached_tokens - before


@torch.inference_mode()
def reading(
    models: Mapping[int, Any], session: Session, kept: Mapping[int, int]
) -> list[torch.Tensor]:
    """Logprobs of each turn of `session`, where `kept[i]` tokens were not read again for turn i.

    Models by version. A token that is read is read by the weights of the next one that is sampled.
    """
    cache, found = DynamicCache(), []
    for index, (prompt, output) in enumerate(session.turns):
        seen = kept.get(index, 0)
        if not seen:
            cache = DynamicCache()
        elif (more := cache.get_seq_length() - seen) > 0:
            cache.crop(-more)
        logprobs: list[torch.Tensor] = []
        for span in output.spans:
            until = prompt + span.end - 1
            fed = torch.tensor([session.tokens[seen:until]])
            model = models[span.version]
            logits = model(input_ids=fed, past_key_values=cache, use_cache=True).logits[0]
            new = torch.tensor(output.token_ids[span.start : span.end])
            said = logits[-len(new) :].log_softmax(-1)
            logprobs.append(said.gather(1, new[:, None])[:, 0])
            seen = until
        found.append(torch.cat(logprobs))
    return found


def differences(models: Mapping[int, Any], session: Session, kept: Mapping[int, int]) -> float:
    """The largest difference between a logprob of `session` and what `reading` has for it."""
    expected = reading(models, session, kept)
    return max(
        float((torch.tensor(output.logprobs) - logprobs).abs().max())
        for (_, output), logprobs in zip(session.turns, expected, strict=True)
    )
