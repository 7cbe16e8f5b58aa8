"""How a run is shown in a notebook: its state in a line, and the curve of its reward."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from umbra.deploy.report.svg import line_chart


def run_html(run_id: str, rewards: Sequence[float], summary: Mapping[str, Any] | None) -> str:
    """The run as HTML. `rewards` are the means of its steps; `summary` is there when it is over."""
    state = f"step {len(rewards)}"
    if rewards:
        state += f", reward {rewards[-1]:.3f}"
    if summary is not None:
        state += f"; {summary['exit_reason']}"
    chart = line_chart({"reward": list(enumerate(rewards, start=1))}, title="reward")
    style = (files("umbra.deploy.report") / "page.css").read_text(encoding="utf-8")
    return (
        f"<div><style>@scope {{ {style} }}</style><p><b>{escape(run_id)}</b>: {escape(state)}</p>"
        f"{chart}</div>"
    )


def notebook_display() -> Callable[[Any], None] | None:
    if "ipykernel" not in sys.modules:
        return None
    from IPython.display import display  # pyright: ignore

    handle: Any = None

    def show(shown: Any) -> None:
        nonlocal handle
        if handle is None:
            handle = display(shown, display_id=True)
        else:
            handle.update(shown)

    return show
