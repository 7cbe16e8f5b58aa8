"""`umbra samples`: rollouts of a run, to read."""

from __future__ import annotations

import heapq
import json
from collections import deque
from collections.abc import Iterable
from typing import Any

import click

from umbra.deploy.rollouts import Rollout, as_text, read_rollouts
from umbra.deploy.run_folder import RunFolder
from umbra.proto.bounds import printable
from umbra.proto.errors import EXIT_DONE, UsageError
from umbra.services.config.loader import load_config
from umbra.services.monitor.run_address import find_run


@click.command()
@click.argument("run", default="")
@click.option("-n", "count", type=click.IntRange(1), default=4, show_default=True, help="How many.")
@click.option("--step", type=click.IntRange(1), help="Only those of this step.")
@click.option("--worst", is_flag=True, help="Those with the lowest rewards, lowest first.")
@click.option("--best", is_flag=True, help="Those with the highest rewards, highest first.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
def command(run: str, count: int, step: int | None, worst: bool, best: bool, as_json: bool) -> int:
    """Print rollouts that RUN was trained on: the newest ones, oldest first.

    With their rewards, the parts of those, and how old the weights were that said each part. RUN is
    a run's folder, its id in runs/, or nothing for the newest one; it may be going on. Of each step
    log.samples rollouts are kept, from the worst to the best.
    """
    if worst and best:
        raise UsageError("--worst and --best exclude each other")
    folder = RunFolder(find_run(run))
    found = list(_chosen(read_rollouts(folder), step, count, worst=worst, best=best))
    if not found:
        raise UsageError(_why_none(folder, step))
    for row in found:
        click.echo(json.dumps(row) if as_json else printable(as_text(row)))
    return EXIT_DONE


def _chosen(
    rollouts: Iterable[Rollout], step: int | None, count: int, *, worst: bool, best: bool
) -> Iterable[Rollout]:
    of_step = (row for row in rollouts if step is None or row["step"] == step)
    if worst:
        return heapq.nsmallest(count, of_step, key=_reward)
    if best:
        return heapq.nlargest(count, of_step, key=_reward)
    return deque(of_step, maxlen=count)


def _reward(rollout: Rollout) -> Any:
    return rollout["reward"]


def _why_none(folder: RunFolder, step: int | None) -> str:
    """Why there is nothing to print."""
    if folder.samples.is_file():
        return f"run {folder.id} has no rollouts" + (f" of step {step}" if step else " yet")
    if load_config(folder.config, environ={}).log.samples == 0:
        return f"run {folder.id} keeps no rollouts: log.samples is 0"
    return f"run {folder.id} has no rollouts yet: {folder.samples.name} comes with its first step"
