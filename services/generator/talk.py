"""A conversation of a person with a model: what the model says, as it says it."""

from __future__ import annotations

from collections.abc import Generator

from umbra.proto.records import Sampling
from umbra.services.config import RunConfig
from umbra.services.config.trajectory_rules import sampling_of
from umbra.services.environments.protocol import Message, Said
from umbra.services.generator.engines.engine import EngineOutput, EngineRequest
from umbra.services.generator.engines.opening import OpenEngine, open_engine
from umbra.services.modeling.chat import StopSearch, TurnReader
from umbra.services.modeling.parsers import Piece

POLL_S = 0.1


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

    def say(self, text: str) -> Generator[Piece, None, None]:
        """What the model answers, in pieces `(kind, text)`, kinds being content and reasoning.

        A turn that is not read to its end is taken back, with its answer.

        Raises:
            ValueError: the conversation does not fit the context.
            UsageError: a system message for a model without a chat template.
            EngineError: the engine is broken.
        """
        talks = self._chat.has_template
        asked: Message = {"role": "user", "content": text}
        prompt = self._chat.prompt_ids([*(self._messages if talks else self._opening), asked])
        reader = TurnReader(self._chat, prompt, (), self._stops, words=not talks)
        told = {"content": "", "reasoning": ""}
        said = yield from self._answer(prompt, reader, told)
        for kind, whole in (("reasoning", said.reasoning), ("content", said.content)):
            if rest := whole[len(told[kind]) :]:
                yield kind, rest
        if talks:
            self._messages += [asked, {"role": "assistant", "content": said.content}]

    def _answer(
        self, prompt: list[int], reader: TurnReader, told: dict[str, str]
    ) -> Generator[Piece, None, Said]:
        """Yield the pieces; return the whole turn."""
        self._turns += 1
        name = f"turn-{self._turns}"
        limit = self._sampling.max_tokens
        search = StopSearch(self._chat, self._stops) if self._stops else None
        self._engine.submit([EngineRequest(name, prompt, self._sampling, limit)])
        over: list[EngineOutput] = []
        seen = 0
        try:
            while not over:
                over = self._engine.poll(POLL_S)
                tokens = [] if over else self._engine.new_tokens().get(name, [])[seen:]
                if search is not None and search.feed(tokens) is not None:
                    over = self._engine.abort([name])
                    break
                seen += len(tokens)
                for kind, text in reader.feed(tokens):
                    told[kind] += text
                    yield kind, text
        finally:
            if not over:
                self._engine.abort([name])
        return reader.end(over[0].token_ids[seen:])

    def close(self) -> None:
        self._engine.close()
