"""Bounds of each field of a message: enforced by the decoder, kept by the sender.

A frame must not cost its receiver more than about what it brings. So every text, list, map and
array of bytes has a bound, numbers that are compared or shown are finite, and what may be printed
has no control characters: a name with a line feed could write a line of its own into a log.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from functools import cache, partial
from itertools import islice
from typing import Annotated, Any, TypeVar, get_type_hints

import msgspec
from msgspec import Meta

T = TypeVar("T")

NAME_CHARS = 256
ID_CHARS = 256
TEXT_CHARS = 4096
FIGURES = 512
STATS = 64  # figures in a heartbeat; the buffer reports the figures of all members together
STAT_CHARS = 64
MEMBERS = 4096  # of a run
TOKENS = 1 << 20  # in one trajectory, all lines of a sample together
SPANS = 128  # versions that wrote one trajectory
BRANCHES = 64  # lines of tokens of one sample
ROUTING_BYTES = 24 << 20  # experts that were chosen in one trajectory; the rest of it fits beside
SUPPORT_BYTES = 12 << 20  # ids that could have been drawn; logprobs of them may take as many
PARTS = 64  # of a reward; each becomes a column of the step's metrics
STAGES = 16
ROW_KEYS = 4096
SUBMITTED = 512  # trajectories or scores in one message to the buffer; the rest goes into another
LEASES = 1 << 14  # of one process
BATCH = 4096  # of anything else that a server sends to one process
RUN = 1 << 16  # of anything that it sends about a whole run
TENSORS = 48 << 10
BUCKETS = 1 << 15
OWNERS = 256  # trainer hosts
DIMENSIONS = 5
NO_CONTROL = r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]*\Z"

# Right-to-left marks, and other invisible characters that change how text looks: deprecated ones,
# annotations, tags. Joiners stay, as emoji and some scripts need them.
_UNSEEN = (
    r"\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    r"\U000e0000-\U000e007f"
)
_control = re.compile(rf"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff{_UNSEEN}]+")
_steering = re.compile(rf"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff{_UNSEEN}]")

# Names and sentences may be printed. Ids are only compared with known ones: they need no look.
Name = Annotated[str, Meta(max_length=NAME_CHARS, pattern=NO_CONTROL)]
Text = Annotated[str, Meta(max_length=TEXT_CHARS, pattern=NO_CONTROL)]
Id = Annotated[str, Meta(max_length=ID_CHARS)]
Number = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
Figures = Annotated[dict[Name, Number], Meta(max_length=FIGURES)]
Stats = Annotated[
    dict[Annotated[str, Meta(max_length=STAT_CHARS, pattern=NO_CONTROL)], Number],
    Meta(max_length=STATS),
]
# Lists and maps: in one message to a server, of a process, in any other message to one process,
# and of a whole run.
Portion = Annotated[list[T], Meta(max_length=SUBMITTED)]
Held = Annotated[list[T], Meta(max_length=LEASES)]
Many = Annotated[list[T], Meta(max_length=BATCH)]
ManyBy = Annotated[dict[Name, T], Meta(max_length=BATCH)]
ManyById = Annotated[dict[Id, T], Meta(max_length=BATCH)]
Whole = Annotated[list[T], Meta(max_length=RUN)]
Counts = Annotated[dict[Name, int], Meta(max_length=FIGURES)]
Int32s = Annotated[bytes, Meta(max_length=4 * TOKENS)]
Float32s = Annotated[bytes, Meta(max_length=4 * TOKENS)]
Mask = Annotated[bytes, Meta(max_length=TOKENS)]
Experts = Annotated[bytes, Meta(max_length=ROUTING_BYTES)]
Sizes = Annotated[bytes, Meta(max_length=2 * TOKENS)]
Supported = Annotated[bytes, Meta(max_length=SUPPORT_BYTES)]
Blob = Annotated[bytes, Meta(max_length=1024)]
Checksums = Annotated[list[int], Meta(max_length=BUCKETS)]
Size = Annotated[int, Meta(ge=0, le=(1 << 53) - 1)]  # bytes or elements
Row = Annotated[dict[str, Any], Meta(max_length=ROW_KEYS)]  # free-form: decoded by clients only


def one_line(text: str, most: int = TEXT_CHARS) -> str:
    """Return `text` as a `Text`: control characters become spaces, and it is cut at `most`."""
    if len(text) > most:
        text = text[: most - 3] + "..."
    return text if text.isprintable() else _control.sub(" ", text)


def printable(text: str) -> str:
    """Return `text`, of several lines, with a space for each character that would steer a terminal.

    Also for ones that reorder or hide their neighbours: a line reads in the order it was sent.
    """
    return _steering.sub(" ", text)


def keep_to_bounds(record: msgspec.Struct) -> None:
    """Make texts of `record` one line each, and leave out figures that its receiver would refuse.

    Texts come from exceptions, figures from computations and from what users name: none of them
    should make a message that is refused as a whole. A decoded record is within its bounds already.
    """
    for name, keep in _softly_bound(type(record)):
        value: Any = getattr(record, name)
        if value and (bounded := keep(value)) is not value:
            msgspec.structs.force_setattr(record, name, bounded)


def _one_line_each(texts: dict[str, str]) -> dict[str, str]:
    return {key: one_line(text) for key, text in texts.items()}


def _fitting(figures: dict[str, float], most: int, chars: int) -> dict[str, float]:
    fit = {
        name: value
        for name, value in figures.items()
        if math.isfinite(value) and len(name) <= chars and not _control.search(name)
    }
    return figures if len(fit) == len(figures) <= most else dict(islice(fit.items(), most))


_KEEP: list[tuple[Any, Callable[[Any], Any]]] = [
    (Text, one_line),
    (ManyBy[Text], _one_line_each),
    (ManyById[Text], _one_line_each),
    (Figures, partial(_fitting, most=FIGURES, chars=NAME_CHARS)),
    (Stats, partial(_fitting, most=STATS, chars=STAT_CHARS)),
]


@cache
def _softly_bound(cls: type[msgspec.Struct]) -> list[tuple[str, Callable[[Any], Any]]]:
    hints = get_type_hints(cls, include_extras=True)
    return [(name, keep) for name, hint in hints.items() for kind, keep in _KEEP if hint == kind]
