"""Tables as text: columns for a terminal, Markdown for documents."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

GAP = "  "


def aligned(rows: Iterable[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Return each row as a line, with columns as wide as their widest cell.

    Args:
        rows: cells, as many in each row; the heading is a row like the others.
        right: columns whose cells end at the same place, as numbers do.
    """
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        GAP.join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def facts(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Return names and values as two columns; names without a value are left out."""
    return aligned(row for row in rows if row[1])


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    heading = f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"
    return "\n".join([heading, *(f"| {' | '.join(row)} |" for row in rows)])


_SIZES = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def number(value: float | None, digits: int = 3) -> str:
    """Return `value` with `digits` significant digits, integers in full: "1,234", "12.3", "0.0457".

    None is "-".
    """
    if value is None:
        return "-"
    if isinstance(value, int) or abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def size(count: float) -> str:
    """Return bytes in binary units: "512 B", "1.5 GiB"."""
    for unit, name in _SIZES:
        if abs(count) >= unit:
            return f"{number(count / unit)} {name}"
    return f"{count:.0f} B"


def clock(seconds: float) -> str:
    """Return a duration as `m:ss`, or `h:mm:ss` from an hour on."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def counts(values: Mapping[str, int]) -> str:
    """Return the counts without zeros: "3 stale, 12 failed"."""
    return ", ".join(f"{count:,} {name}" for name, count in values.items() if count)
