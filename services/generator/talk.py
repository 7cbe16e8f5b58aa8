"""A conversation of a person with a model: what the model says, as it says it."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing

from umbra.proto.records import Sampling
from umbra.services.config import RunConfig
from umbra.services.config.trajectory_rules import sampling_of
from umbra.services.environments.protocol import Message
from umbra.services.generator.engines.engine import EngineOutput, EngineRequest
from umbra.services.generator.engines.opening import OpenEngine, open_engine
from umbra.services.modeling.chat import StopSearch

POLL_S = 0.1
_BROKEN = "\ufffd"  # what an incomplete character decodes to


class Talk:
    """Turns of a person and of the model, which reads all that was said before.

    A model without a chat template continues each text by itself.

    Args:
        opened: engine and chat.
        sampling: how tokens are drawn; temperature 0 takes the most likely ones.
        stops: texts that end a turn.
        system: a message that every conversation begins with; "" for none.
    """

    def __init__(
        self, opened: OpenEngine, sampling: Sampling, stops: list[str], system: str = ""
    ) -> None:
        self._engine = opened.engine
        self._chat = opened.chat
        self._sampling = sampling
        self._stops = stops
        self._opening: list[Message] = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._opening)
        self._turns = 0

    @classmethod
    def open(cls, config: RunConfig, name: str, *, greedy: bool = False, system: str = "") -> Talk:
        """One with the model, engine and sampling of `config`; `name` seeds what is drawn.

        Raises:
            UsageError: see `open_engine`.
            StartupError: vLLM's processes did not come up.
        """
        sampling = sampling_of(config.sampling, greedy=greedy)
        return cls(open_engine(config, name), sampling, list(config.sampling.stop), system)

    def reset(self) -> None:
        """Begin a new conversation."""
        self._messages = list(self._opening)

    def say(self, text: str) -> Generator[str, None, None]:
        """Yield what the model answers, reasoning included, in pieces.

        A turn that is not read to its end is taken back, with its answer.

        Raises:
            ValueError: the conversation does not fit the context.
            UsageError: a system message for a model without a chat template.
            EngineError: the engine is broken.
        """
        chat, talks = self._chat, self._chat.has_template
        asked: Message = {"role": "user", "content": text}
        prompt = chat.prompt_ids([*(self._messages if talks else self._opening), asked])
        shown, held = 0, max((len(stop) for stop in self._stops), default=1) - 1
        with closing(self._generated(prompt)) as turn:
            for ids, over in turn:
                words = chat.pieces(ids)
                if over:
                    said = chat.said(ids, prompt, stops=self._stops, words=not talks)
                    yield said.text[shown:]
                    if talks:
                        self._messages += [asked, {"role": "assistant", "content": said.content}]
                elif not words.endswith(_BROKEN):  # of which a stop string may have begun
                    end = max(shown, len(words) - held)
                    yield words[shown:end]
                    shown = end

    def _generated(self, prompt: list[int]) -> Generator[tuple[Sequence[int], bool], None, None]:
        """Yield the tokens of a turn so far, and whether it is over."""
        self._turns += 1
        name = f"turn-{self._turns}"
        limit = self._sampling.max_tokens
        search = StopSearch(self._chat, self._stops) if self._stops else None
        self._engine.submit([EngineRequest(name, prompt, self._sampling, limit)])
        over: list[EngineOutput] = []
        try:
            while not over:
                over = self._engine.poll(POLL_S)
                tokens = [] if over else self._engine.new_tokens().get(name, [])
                if search is not None and search.feed(tokens[search.seen :]) is not None:
                    over = self._engine.abort([name])
                elif tokens:
                    yield tokens, False
        finally:
            if not over:
                self._engine.abort([name])
        yield over[0].token_ids, True

    def close(self) -> None:
        self._engine.close()
