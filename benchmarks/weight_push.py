"""Seconds of a version of the weights from the trainer's tensors to the generators' tensors.

    python benchmarks/weight_push.py [--json FILE] [--quick] [--only METHOD ...]

Planes `shm` and `tcp` beside a gloo broadcast in 64 MiB buckets and safetensors files in /dev/shm,
with 1 and 3 receivers on one host; medians of consecutive pushes after two that warm up. Everyone
starts from float32 tensors and ends with bf16 ones: the trainer's end is `write_shards`, the
generator's the torch engine's load. Beside them stand the floors: one cast of the same tensors, and
the receivers' own loads from memory, all at once. `push_s` goes from the first byte that the
trainer copies to the last receiver's last loaded tensor; the trainer waits for `snapshot_s` of it,
a generator for `commit_s`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import weight_roles as roles
from report import Report, free_port, text
from safetensors.torch import save_file
from weight_model import Model
from weight_roles import Role

from umbra.proto.deadline import Deadline
from umbra.proto.net.io_thread import IoThread
from umbra.proto.net.keys import OPEN
from umbra.services.process.child import TUNABLES, with_fast_copies
from umbra.services.weights.publisher import Publisher

MIB = 1 << 20
DEADLINE_S = 600.0
WARM_UPS = 2  # versions before those that count, of every method
BUCKET_BYTES = 4 << 20
SHM, DENSE = "`shm`", "`tcp`, all bytes"
DELTA_6, DELTA_5 = "`tcp`, deltas, lr 1e-6", "`tcp`, deltas, lr 1e-5"
GLOO, FILES = "gloo broadcast, 64 MiB buckets", "safetensors in /dev/shm"
# Plane, setting of deltas, and the rate at which the model learns between versions.
OURS: dict[str, tuple[str, str, float | None]] = {
    SHM: ("shm", "off", None),
    DENSE: ("tcp", "off", None),
    DELTA_6: ("tcp", "always", 1e-6),
    DELTA_5: ("tcp", "always", 1e-5),
}


@dataclass
class Pushed:
    """One push: seconds, and bytes on the wire to the first receiver."""

    push_s: float
    snapshot_s: float
    commit_s: float
    wire_bytes: int
    changed: float = 0.0  # share of the values
    load_floor_s: float | None = None


def push_umbra(
    model: Model, plane: str, delta: str, lr: float | None, count: int, passes: int
) -> list[Pushed]:
    """Push `passes` versions to `count` receivers."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        metrics = folder / "metrics.jsonl"
        hub = stack.enter_context(closing(Role(roles.hub, plane, delta, metrics)))
        endpoint = hub.hear()["endpoint"]
        link = IoThread("trainer", uuid.uuid4().hex, security=OPEN)
        stack.callback(link.close)
        channel = link.channel(endpoint, "weight hub", server="weight_hub")
        publisher = Publisher(channel, model.manifest(BUCKET_BYTES))
        stack.callback(publisher.close)
        publisher.register(DEADLINE_S)
        receivers: list[Role] = []
        for index in range(count):
            given = (f"gen-{index}", endpoint, plane, model.size, passes + WARM_UPS)
            receivers.append(stack.enter_context(closing(Role(roles.receiver, *given))))
        for receiver in receivers:
            receiver.hear()
        runs = [_push(model, publisher, receivers, n, lr) for n in range(passes + WARM_UPS)]
        for version, sent in _sent(metrics, len(runs)).items():
            runs[version].wire_bytes = sent
        return runs[WARM_UPS:]


def _push(
    model: Model, publisher: Publisher, receivers: list[Role], version: int, lr: float | None
) -> Pushed:
    changed = change(model, lr) if version else 0.0
    began = time.monotonic()
    slot = publisher.slot(version, DEADLINE_S)
    sums = model.write(publisher.manifest, slot)
    publisher.publish(version, time.monotonic() - began, sums)
    snapshot_s = time.monotonic() - began
    heard = [receiver.hear() for receiver in receivers]
    assert all(line["version"] == version and line["whole"] for line in heard), heard
    push_s = max(line["done_at"] for line in heard) - began
    for receiver in receivers:
        receiver.tell("load")
    load_s = max(receiver.hear()["load_s"] for receiver in receivers)
    commit_s = max(line["commit_s"] for line in heard)
    return Pushed(push_s, snapshot_s, commit_s, 0, changed, load_s)


def change(model: Model, lr: float | None) -> float:
    """Change the model between two versions; return the share of values that changed."""
    if lr is not None:
        return model.learn(lr)
    model.touch()
    return 0.0


def _sent(metrics: Path, count: int) -> dict[int, int]:
    """Wait until the hub has rows of `count` versions; return their bytes to the first receiver."""
    deadline = Deadline(DEADLINE_S, "no rows of all versions from the hub")
    while True:
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        sent = {r["version"]: r["wire_bytes"] for r in rows if r["receiver"].endswith("-0")}
        if len(sent) == count:
            return sent
        deadline.check()
        time.sleep(0.01)


def push_gloo(model: Model, count: int, passes: int) -> list[Pushed]:
    """Broadcast `passes` versions to `count` receivers in 64 MiB buckets."""
    address = f"127.0.0.1:{free_port()}"
    with ExitStack() as stack:
        receivers = [
            stack.enter_context(closing(Role(roles.gloo, rank, count + 1, address, model.size)))
            for rank in range(1, count + 1)
        ]
        init = f"tcp://{address}"
        dist.init_process_group("gloo", init_method=init, rank=0, world_size=count + 1)
        stack.callback(dist.destroy_process_group)
        bucket = torch.zeros(roles.GLOO_BUCKET // 2, dtype=torch.bfloat16)
        for receiver in receivers:
            receiver.hear()
        runs: list[Pushed] = []
        for version in range(passes + WARM_UPS):
            change(model, None)
            began = time.monotonic()
            dist.broadcast(torch.tensor([version]), 0)
            roles.broadcast_model(model, bucket, source=True)
            sent_s = time.monotonic() - began
            done = max(receiver.hear()["done_at"] for receiver in receivers)
            runs.append(Pushed(done - began, sent_s, done - began, model.nbytes))
        dist.broadcast(torch.tensor([-1]), 0)
        return runs[WARM_UPS:]


def push_files(model: Model, count: int, passes: int) -> list[Pushed]:
    """Write one safetensors file per version in /dev/shm, read by `count` receivers."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        receivers = [
            stack.enter_context(closing(Role(roles.files, model.size))) for _ in range(count)
        ]
        for receiver in receivers:
            receiver.hear()
        runs: list[Pushed] = []
        for version in range(passes + WARM_UPS):
            path = folder / f"{version}.safetensors"
            change(model, None)
            began = time.monotonic()
            save_file(model.cast(), path)
            saved_s = time.monotonic() - began
            for receiver in receivers:
                receiver.tell(str(path))
            done = max(receiver.hear()["done_at"] for receiver in receivers)
            path.unlink()
            runs.append(Pushed(done - began, saved_s, done - began - saved_s, model.nbytes))
        return runs[WARM_UPS:]


def push(method: str, model: Model, count: int, passes: int) -> list[Pushed]:
    """Push by one method."""
    if method in OURS:
        return push_umbra(model, *OURS[method], count, passes)
    return (push_gloo if method == GLOO else push_files)(model, count, passes)


# -- figures ---------------------------------------------------------------------------------------

Row = dict[str, Any]
COLUMNS: dict[str, Callable[[Row], str]] = {
    "method": lambda r: r["method"],
    "receivers": lambda r: text(r["receivers"]),
    "seconds": lambda r: f"{r['push_s']:.2f}",
    "trainer waits": lambda r: _seconds(r["snapshot_s"]),
    "one cast": lambda r: _seconds(r["cast_floor_s"]),
    "generator waits": lambda r: _seconds(r["commit_s"]),
    "own loads, all at once": lambda r: _seconds(r["load_floor_s"]),
    "MB on the wire": lambda r: text(r["wire_bytes"] / 1e6) if "`tcp`" in r["method"] else "-",
}


def _seconds(value: float | None) -> str:
    return f"{value:.3f}" if value else "-"


def summarise(report: Report) -> None:
    """State the table, floors and goals."""
    rows = report.rows
    report.figure("mib", round(rows[0]["nbytes"] / MIB))
    report.table("pushes", list(COLUMNS), [[cell(r) for cell in COLUMNS.values()] for r in rows])
    for count in sorted({row["receivers"] for row in rows}):
        found = {row["method"]: row for row in rows if row["receivers"] == count}
        name = f"{count} receiver{'s' if count > 1 else ''}"
        if shm := found.get(SHM):
            waits = shm["snapshot_s"] / shm["cast_floor_s"]
            report.goal(f"{name}: trainer waits / one cast", waits, "<=", 1.3)
            waits = shm["commit_s"] / shm["load_floor_s"]
            report.goal(f"{name}: generator waits / own load", waits, "<=", 1.3)
            least = shm["cast_floor_s"] + 2 * shm["load_floor_s"]
            report.figure(f"shm_{count}_floor_s", least)
            report.figure(f"shm_{count}_over_floor", shm["push_s"] / least)
            if peers := [found[one]["push_s"] for one in (GLOO, FILES) if one in found]:
                over, goal = min(peers) / shm["push_s"], 2.0 if count == 3 else 2.5
                report.goal(f"{name}: `shm` over the best peer, bytes/s", over, ">=", goal)
        if DENSE in found and GLOO in found:
            over = found[GLOO]["push_s"] / found[DENSE]["push_s"]
            report.goal(f"{name}: `tcp` over gloo, bytes/s", over, ">=", 1.0)
        if DENSE in found and DELTA_6 in found:
            fewer = found[DENSE]["wire_bytes"] / found[DELTA_6]["wire_bytes"]
            report.goal("deltas at lr 1e-6: times fewer bytes", fewer, ">=", 50)


def measure(report: Report, options: argparse.Namespace) -> None:
    """Push by all methods that are wanted, and print a line for each."""
    model = Model(options.size_mib * MIB, learns=True)
    for count in options.receivers:
        for method in (*OURS, GLOO, FILES):
            wanted = not options.only or any(method.startswith(one) for one in options.only)
            if not wanted or (count > min(options.receivers) and method in (DELTA_6, DELTA_5)):
                continue
            runs = push(method, model, count, options.passes)
            loads = [run.load_floor_s for run in runs if run.load_floor_s is not None]
            names = ("push_s", "snapshot_s", "commit_s", "wire_bytes", "changed")
            medians = {name: median(asdict(run)[name] for run in runs) for name in names}
            report.add(
                method=method,
                receivers=count,
                pushes=len(runs),
                nbytes=model.nbytes,
                load_floor_s=median(loads) if loads else None,
                cast_floor_s=median(model.cast_seconds() for _ in runs),
                **medians,
            )
            print(f"{method}, {count} receivers: {medians['push_s']:.2f} s", flush=True)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--size-mib", type=int, default=1024)
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--receivers", type=int, nargs="+", action="extend", help="[default: 1 3]")
    parser.add_argument("--only", nargs="+", action="extend", help="beginnings of methods")
    parser.add_argument("--quick", action="store_true", help="every method, with toy sizes")
    options = parser.parse_args(argv)
    options.receivers = options.receivers or ([1] if options.quick else [1, 3])
    if options.quick:
        options.size_mib, options.passes = 8, 1
    return options


def main() -> int:
    """Run all; 0 even if goals are missed, since they are printed."""
    options = parse(sys.argv[1:])
    torch.set_num_threads(1)
    report = Report("weight_push")
    measure(report, options)
    report.restate(summarise)
    report.show(options.json)
    return 0


if __name__ == "__main__":
    environ = with_fast_copies(os.environ)  # as `umbra up` starts processes
    if environ[TUNABLES] != os.environ.get(TUNABLES):
        os.execve(sys.executable, [sys.executable, *sys.argv], environ)
    raise SystemExit(main())
