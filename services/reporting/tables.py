"""Tables as text: columns for a terminal, Markdown for documents, rich where there are colours."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

GAP = "  "


def aligned(rows: Iterable[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Each row as a line, with columns as wide as their widest cell.

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
    """Names and values as two columns; those without a value are left out."""
    return aligned(row for row in rows if row[1])


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown."""
    heading = f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"
    return "\n".join([heading, *(f"| {' | '.join(row)} |" for row in rows)])


def rich_table(
    columns: Iterable[str], right: Collection[str] = (), wrapped: Collection[str] = ()
) -> Table:
    """A table for a terminal, without rows yet.

    Cells of the columns `right` end at the same place, those of `wrapped` take several lines where
    the terminal is narrow; others are cut off there.
    """
    from rich.table import Table  # takes long to import, and pipes do without

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(
            column,
            justify="right" if column in right else "left",
            no_wrap=column not in wrapped,
            overflow="ellipsis",
        )
    return table
