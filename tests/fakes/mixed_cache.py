"""Logprobs computed once more, by plain Transformers, as an engine with a KV policy must have."""

import random
from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch
from transformers import DynamicCache

from umbra.proto.records import Sampling
from umbra.services.generator.engines.engine import Engine, EngineOutput, EngineRequest

Models = Mapping[int, Any]  # by version


def logprobs_of(
    logits: torch.Tensor, tokens: Sequence[int], temperature: float = 1.0
) -> torch.Tensor:
    """Of `tokens` [T], from `logits` [T, V]."""
    index = torch.tensor(tokens)[:, None]
    return torch.log_softmax(logits / temperature, -1).gather(1, index)[:, 0]


@torch.inference_mode()
def _read_on(
    models: Models,
    tokens: Sequence[int],
    prompt: int,
    output: EngineOutput,
    cache: DynamicCache,
    seen: int,
    temperature: float,
) -> torch.Tensor:
    """Of `output` after `prompt` of the `tokens`, `seen` of which are in `cache`.

    A token's keys and values are computed when the next token is sampled, by the weights of then.
    """
    found: list[torch.Tensor] = []
    for span in output.spans:
        until = prompt + span.end - 1  # the last token that was fed under these weights
        logits = models[span.version](
            input_ids=torch.tensor([tokens[seen:until]]), past_key_values=cache, use_cache=True
        ).logits[0, -(span.end - span.start) :]
        found.append(logprobs_of(logits, output.token_ids[span.start : span.end], temperature))
        seen = until
    return torch.cat(found)


def logprobs_keeping_cache(
    models: Models, prompt: Sequence[int], output: EngineOutput, temperature: float = 1.0
) -> list[float]:
    """Of each sampled token, where keys and values of earlier tokens stay what they were."""
    tokens, cache = [*prompt, *output.token_ids], DynamicCache()
    return _read_on(models, tokens, len(prompt), output, cache, 0, temperature).tolist()


@torch.inference_mode()
def logprobs_recomputing_cache(
    models: Models, prompt: Sequence[int], output: EngineOutput, temperature: float = 1.0
) -> list[float]:
    """Of each sampled token, all of the sequence before it read by the token's own weights."""
    tokens = torch.tensor([[*prompt, *output.token_ids]])
    found: list[float] = []
    for span in output.spans:
        first, last = len(prompt) + span.start, len(prompt) + span.end
        logits = models[span.version](input_ids=tokens[:, :last]).logits[0, first - 1 : last - 1]
        new = output.token_ids[span.start : span.end]
        found += logprobs_of(logits, new, temperature).tolist()
    return found


class Session:
    """One that says some tokens, and is answered with others, turn after turn."""

    def __init__(self, name: str, prompt: list[int]) -> None:
        self.tokens = list(prompt)
        self.turns: list[tuple[int, EngineOutput]] = []  # prompt tokens of each, and its output
        self._name = name
        self._source = random.Random(0)

    def turn(self, engine: Engine) -> int:
        """Have a turn on a vLLM without other work; tokens that were not read again for it."""
        from umbra.services.generator.vllm import private  # brings vLLM

        if self.turns:
            self.tokens += [self._source.randrange(5, 100) for _ in range(4)]
        name = f"{self._name}-{len(self.turns)}"
        request = EngineRequest(name, [*self.tokens], Sampling(), 6, session=self._name)
        found: list[EngineOutput] = []
        with patch.object(private, "finished", wraps=private.finished) as finished:
            engine.submit([request])
            while not found:
                found = engine.poll(0.05)
        ((output, *_), _) = finished.call_args
        self.turns.append((len(self.tokens), found[0]))
        self.tokens += found[0].token_ids
        return output.num_cached_tokens


def differences(models: Models, session: Session, kept: Mapping[int, int]) -> float:
    """The largest between a logprob of `session` and the same computed once more.

    `kept[i]` tokens were not read again for turn i.
    """
    cache, worst = DynamicCache(), 0.0
    for index, (prompt, output) in enumerate(session.turns):
        seen = kept.get(index, 0)
        if not seen:
            cache = DynamicCache()
        elif (more := cache.get_seq_length() - seen) > 0:
            cache.crop(-more)
        again = _read_on(models, session.tokens, prompt, output, cache, seen, 1.0)
        worst = max(worst, float((torch.tensor(output.logprobs) - again).abs().max()))
    return worst
