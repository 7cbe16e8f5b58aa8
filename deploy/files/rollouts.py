"""Rollouts of a run as text, as its trainer left them in `samples.jsonl`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from umbra.deploy.files.run_folder import RunFolder, read_rows
from umbra.services.reporting.tables import number

Rollout = dict[str, Any]


def read_rollouts(folder: RunFolder) -> Iterator[Rollout]:
    """All of them, oldest first; those of a step that a trainer has repeated only once."""
    seen: set[tuple[int, str]] = set()
    for row in read_rows(folder.samples):
        name = (row["step"], row["sample"])
        if row["kind"] == "rollout" and name not in seen:
            seen.add(name)
            yield row


def pieces(rollout: Mapping[str, Any]) -> Iterator[tuple[str, int, int | None]]:
    """The response in pieces: text, tokens, and how many steps old the weights were that said it,
    None for what the environment said.
    """
    at = 0
    for chars, tokens, staleness in rollout["pieces"]:
        yield rollout["response"][at : at + chars], tokens, staleness
        at += chars


def heading(rollout: Mapping[str, Any]) -> str:
    """The facts of a rollout in one line."""
    parts = [f"{name} {number(value)}" for name, value in rollout["reward_parts"].items()]
    turns = f", {rollout['turns']} turns" if rollout["turns"] > 1 else ""
    if rollout.get("branches", 1) > 1:
        turns += f", {rollout['branches']} branches"
    return (
        f"step {rollout['step']}, {rollout['sample']}: reward {number(rollout['reward'])}"
        + (f" ({', '.join(parts)})" if parts else "")
        + f", {rollout['tokens']} tokens{turns}, {rollout['finish_reason']}, "
        + age(rollout["staleness"])
    )


def age(staleness: int | None) -> str:
    """Who said a piece."""
    if staleness is None:
        return "environment"
    return "newest weights" if staleness == 0 else f"staleness {staleness}"


def as_text(rollout: Mapping[str, Any]) -> str:
    """A rollout to read. Where its parts differ in age, or in who said them, each is marked."""
    said = list(pieces(rollout))
    if len(said) > 1:
        body = "\n".join(f"[{age(s)}, {tokens} tokens] {text}" for text, tokens, s in said)
    else:
        body = rollout["response"]
    text = f"--- {heading(rollout)}\n{rollout['prompt']}\n>>> {body}\n"
    for branch, one in enumerate(rollout.get("further", ()), start=2):
        text += f"--- branch {branch}\n{one['prompt']}\n>>> {one['response']}\n"
    return text
