"""A turn that is read while the model speaks, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from umbra.services.environments.response import Said
from umbra.services.modeling.chat import Chat, cut
from umbra.services.modeling.dialect import Piece, Tools, feed_slowly

_BROKEN = "\ufffd"  # what an incomplete character decodes to


class TurnReader:
    """Turns the tokens of one turn into pieces of text; arguments as of `Chat.said`."""

    def __init__(
        self,
        chat: Chat,
        before: Sequence[int],
        tools: Tools,
        stops: Sequence[str] = (),
        *,
        words: bool = False,
    ) -> None:
        self._chat = chat
        self._reading = chat.begin(before, tools, words=words)
        self._stops = stops
        self._held = max((len(stop) - 1 for stop in stops), default=0)
        self._window = self._read = 0  # tokens before the last ones that were read; all read ones
        self._text = ""  # all of it
        self._fed = 0  # characters of it that were passed on

    def feed(self, token_ids: Sequence[int]) -> list[Piece]:
        """What is new, now that the turn has the tokens `token_ids`, all of them."""
        ids = list(token_ids)
        known = self._chat.pieces(ids[self._window : self._read])
        text = self._chat.pieces(ids[self._window :])
        if len(text) <= len(known) or text.endswith(_BROKEN):
            return []
        self._text += text[len(known) :]
        self._window, self._read = self._read, len(ids)
        # A stop string may have begun.
        return self._pass_on(len(self._text) - self._held)

    def end(self, token_ids: Sequence[int]) -> Said:
        """The whole turn, which is over; what `feed` gave is part of it."""
        ids, stop = self._chat.split_stop(token_ids)
        known = self._chat.pieces(ids[self._window : self._read])
        self._text += self._chat.pieces(ids[self._window :])[len(known) :]
        self._text, found = cut(self._text, self._stops)
        self._pass_on(len(self._text))
        return replace(self._reading.end(stop), stop=found)

    def _pass_on(self, end: int) -> list[Piece]:
        new = self._text[self._fed : end]
        if not new:
            return []
        self._fed += len(new)
        return feed_slowly(self._reading, new)
