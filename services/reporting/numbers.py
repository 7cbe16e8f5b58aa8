"""How a number is written for people. JSON always gets the value itself.

A share is written by Python's own format: `f"{share:.0%}"`.
"""

from __future__ import annotations

from collections.abc import Mapping

_SIZES = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def number(value: float | None, digits: int = 3) -> str:
    """`value` with `digits` significant digits, integers in full: "1,234", "12.3", "0.0457".

    None is "-".
    """
    if value is None:
        return "-"
    if isinstance(value, int) or abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def compact(value: float) -> str:
    """`value` in the few characters that a tick of a plot has room for: "20k", "1.5M"."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1e3:g}k" if abs(value) >= 1e4 else f"{value:.4g}"


def size(count: float) -> str:
    """Bytes in binary units: "512 B", "1.5 GiB"."""
    for unit, name in _SIZES:
        if abs(count) >= unit:
            return f"{number(count / unit)} {name}"
    return f"{count:.0f} B"


def clock(seconds: float) -> str:
    """A duration as `m:ss`, or `h:mm:ss` from an hour on."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def counts(values: Mapping[str, int]) -> str:
    """What was counted, without zeros: "3 stale, 12 failed"."""
    return ", ".join(f"{count:,} {name}" for name, count in values.items() if count)
