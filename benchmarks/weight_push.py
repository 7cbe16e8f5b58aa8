"""How long a version of the weights takes from the trainer's tensors to the generators' tensors.

    python benchmarks/weight_push.py [--json FILE] [--quick] [--only links,relays]

Umbra's planes beside what others do (gloo broadcast in 64 MiB buckets; safetensors files in
/dev/shm); all in one run, passes of a method in a row after two that warm it up, medians. Everyone
starts from float32 tensors and ends with bf16 ones. The trainer's end is `write_shards`, the
generator's the torch engine's load; beside them stand the floors, one cast and one copy of the same
tensors, and the receivers' own loads from memory, all at once. The hub has its default settings but
for plane and delta. `push_s` goes from the first byte that the trainer copies to the last
receiver's last loaded tensor. `snapshot_s` is the part of it for which the trainer waits,
`commit_s` that for which a generator waits.

In parts: one host; 1 to 8 receivers; a large version, whose parameters share memory at both ends so
that it fits (left out where it does not); links of 1 and 10 Gbit/s, and relays in chains and trees
over 1 Gbit/s, which need root's rights: network namespaces joined by a bridge, shaped with
`tc ... tbf`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from report import Report
from weight_links import Links, why_not
from weight_model import Model
from weight_peers import push_files, push_gloo, send_plainly
from weight_processes import serve
from weight_pushes import Pushed, Relays, chain, push_umbra
from weight_roles import ROLES
from weight_tables import (
    CHAIN,
    DELTA_5,
    DELTA_6,
    DENSE,
    FAST,
    FILES,
    GBIT,
    GLOO,
    LARGE,
    LINKS,
    LOCAL,
    MIB,
    ONE_HOST,
    RECEIVERS,
    RELAYS,
    SHM,
    SLOW,
    SOCKET,
    TREE,
    summarise,
)

from umbra.services.process.child import TUNABLES, with_fast_copies
from umbra.services.process.host_memory import available_bytes

OURS: dict[str, tuple[str, str, float | None]] = {
    SHM: ("shm", "off", None),
    DENSE: ("tcp", "off", None),
    DELTA_6: ("tcp", "always", 1e-6),
    DELTA_5: ("tcp", "always", 1e-5),
}
PEERS = {GLOO: push_gloo, FILES: push_files}
SHARE = 8  # parameters of a large version in one place
TREE_OF = {4: (-1, 0, 0, 1), 3: (-1, 0, 0)}  # whom each relay asks: 0 the hub, 1 and 2 it, 3 then 1


@dataclass(frozen=True)
class Form:
    """One row: what is pushed by which method to how many, over what."""

    part: str
    method: str
    count: int
    mib: int
    passes: int
    push: Callable[[Form, Model, Links | None], list[Pushed]]
    link: str = LOCAL
    share: int = 1
    relays: Relays | None = None

    @property
    def label(self) -> str:
        """What `--only` is compared with: of one host the method alone."""
        return self.method if self.part == ONE_HOST else f"{self.part}: {self.method}"

    @property
    def nodes(self) -> int:
        """Namespaces that it needs."""
        return 1 + max(self.count, 1) if self.relays is None else 1 + len(self.relays.above)


def _ours(form: Form, model: Model, links: Links | None) -> list[Pushed]:
    name = next(method for method in OURS if form.method.startswith(method))
    plane, delta, lr = OURS[name]
    if links is not None and lr is not None:
        delta = "auto"
    return push_umbra(
        model, plane, delta, lr, form.count, form.passes, links=links, relays=form.relays
    )


def _gloo(form: Form, model: Model, links: Links | None) -> list[Pushed]:
    return push_gloo(model, form.count, form.passes, links)


def _files(form: Form, model: Model, _: Links | None) -> list[Pushed]:
    return push_files(model, form.count, form.passes)


def _socket(form: Form, model: Model, links: Links | None) -> list[Pushed]:
    assert links is not None
    return send_plainly(model, form.passes, links)


HOW = {GLOO: _gloo, FILES: _files, SOCKET: _socket}


def forms(options: argparse.Namespace) -> Iterator[Form]:
    """All of them; those of one model one after the other, the largest last."""
    passes, few = options.passes, min(options.passes, 3)

    def form(part: str, method: str, count: int, mib: int, passes: int, **more: Any) -> Form:
        return Form(part, method, count, mib, passes, HOW.get(method, _ours), **more)

    for count in options.receivers:
        for method in (*OURS, *PEERS):
            if count == min(options.receivers) or method not in (DELTA_6, DELTA_5):
                yield form(ONE_HOST, method, count, options.size_mib, passes)
    for method in (SOCKET, DENSE, GLOO):
        yield form(LINKS, method, 1, options.size_mib, few, link=FAST)
    small = options.small_mib
    for method in (SOCKET, DENSE, GLOO, DELTA_6, DELTA_5):
        yield form(LINKS, method, 1, small, few, link=SLOW)
    for count in options.scale:
        for method in (SHM, DENSE, GLOO, FILES):
            yield form(RECEIVERS, method, count, small, few)
    most = options.relays
    for relays in (chain(1), chain(most), chain(most, engines=2), Relays(TREE_OF[most])):
        method = TREE if max(relays.above) >= 0 else CHAIN
        count = len(relays.above) * relays.engines
        yield form(RELAYS, method, count, small, min(few, 2), link=SLOW, relays=relays)
    for method in (SHM, DENSE, GLOO):
        yield form(LARGE, method, 1, options.large_mib, min(few, 2), share=SHARE)


def lacking(form: Form) -> str:
    """Why this machine cannot have a large version; empty if it can.

    Two slots and a staged version; of a `share` of it the float32 tensors, those that are cast and
    copied as floors, and the engine's; and 1 GiB for the processes.
    """
    size = form.mib * MIB
    need = 3 * size + 5 * size // form.share + 1024 * MIB
    free = available_bytes()
    if form.part != LARGE or need <= free:
        return ""
    return f"it needs {need / 2**30:.1f} GiB of memory, and {free / 2**30:.1f} are free"


def measure(report: Report, options: argparse.Namespace) -> None:
    """All forms that are wanted and possible; a line for each as it is done."""
    wanted = [
        form for form in forms(options)
        if not options.only or any(form.label.startswith(start) for start in options.only)
    ]  # fmt: skip
    no_links = why_not() if any(form.link != LOCAL for form in wanted) else ""
    began = time.monotonic()
    model: Model | None = None
    for number, form in enumerate(wanted, 1):
        reason = lacking(form) or (no_links if form.link != LOCAL else "")
        if reason:
            print(f"skipped: {form.label}, {form.mib} MiB ({reason})", flush=True)
            continue
        size = form.mib * MIB
        if model is None or (model.size, model.share) != (size, form.share):
            model = None  # its memory goes first
            model = Model(size, learns=True, share=form.share)
        with ExitStack() as stack:
            links = None
            if form.link != LOCAL:
                links = stack.enter_context(Links(form.nodes, GBIT[form.link]))
            add(report, form, form.push(form, model, links))
        found, elapsed = report.rows[-1], time.monotonic() - began
        print(
            f"{elapsed:5.0f} s  {number}/{len(wanted)}  {form.label}, {form.link}, "
            f"{form.count} receivers, {form.mib} MiB: {found['push_s']:.2f} s",
            flush=True,
        )


def add(report: Report, form: Form, runs: list[Pushed]) -> None:
    """Add the medians of `runs`."""
    names = ("push_s", "snapshot_s", "commit_s", "cast_floor_s", "copy_floor_s")
    loads = [run.load_floor_s for run in runs if run.load_floor_s is not None]
    report.add(
        part=form.part,
        method=form.method,
        link=form.link,
        relays=len(form.relays.above) if form.relays else 0,
        receivers=form.count,
        pushes=len(runs),
        nbytes=runs[0].nbytes,
        wire_bytes=median(run.wire_bytes for run in runs),
        changed=median(run.changed for run in runs),
        best_s=min(run.push_s for run in runs),
        load_floor_s=median(loads) if loads else None,
        **{name: median(getattr(run, name) for run in runs) for name in names},
    )


def parse(argv: list[str]) -> argparse.Namespace:
    """The options, those of `--quick` filled in."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--size-mib", type=int, default=1024, help="on one host, and at 10 Gbit/s")
    parser.add_argument("--small-mib", type=int, default=256, help="else")
    parser.add_argument("--large-mib", type=int, default=4096)
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--receivers", type=_numbers, default=[1, 3], help="on one host")
    parser.add_argument("--scale", type=_numbers, default=[1, 2, 4, 8], help="of the small version")
    parser.add_argument("--relays", type=int, default=4, choices=sorted(TREE_OF))
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        default=[],
        help="beginnings of part and method",
    )
    parser.add_argument("--quick", action="store_true", help="every form, with toy sizes")
    options = parser.parse_args(argv)
    if options.quick:
        options.size_mib = options.small_mib = 8
        options.large_mib, options.passes, options.relays = 32, 1, 3
        options.receivers, options.scale = [1], [2]
    return options


def main() -> int:
    """Run all; 0 even if goals are missed, since they are printed."""
    options = parse(sys.argv[1:])
    torch.set_num_threads(1)
    report = Report("weight push: from the trainer's tensors to every receiver's tensors")
    measure(report, options)
    report.restate(summarise)
    report.show(options.json)
    return 0


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    if sys.argv[1:] == ["nursery"]:
        serve(ROLES)
    else:
        environ = with_fast_copies(os.environ)  # as `umbra up` and `umbra keep` start processes
        if environ[TUNABLES] != os.environ.get(TUNABLES):
            os.execve(sys.executable, [sys.executable, *sys.argv], environ)
        raise SystemExit(main())
