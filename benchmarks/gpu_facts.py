"""What a GPU is and how fast bytes move to and from it: the floor of every push of weights.

    python benchmarks/gpu_facts.py [--size-mib 1024] [--passes 5] [--json FILE]
    python benchmarks/gpu_facts.py --check      on any machine

Copies of one block between host and GPU in both directions: pageable memory, memory that torch
allocated pinned, and shared memory that was registered with CUDA, as an arena of weights is. The
best of `--passes` counts. `product` is the rate of a large bf16 matrix product, which MFU is
relative to.
"""

from __future__ import annotations

import argparse
import mmap
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.cuda.nccl
from report import Report

MIB = 1 << 20


def best_s(work: Callable[[], object], passes: int) -> float:
    """Seconds of the fastest pass, after one that warms up."""
    best = float("inf")
    for _ in range(passes + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return best


def host_blocks(size: int) -> dict[str, torch.Tensor]:
    """Blocks of `size` bytes on the host, by kind."""
    shared = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    code = torch.cuda.cudart().cudaHostRegister(shared.data_ptr(), size, 0)  # pyright: ignore[reportOptionalMemberAccess]
    if int(code):
        raise SystemExit(f"shared memory cannot be registered: CUDA error {int(code)}")
    return {
        "pageable": torch.empty(size, dtype=torch.uint8).random_(),
        "pinned": torch.empty(size, dtype=torch.uint8, pin_memory=True).random_(),
        "registered": shared.random_(),
    }


def measure(report: Report, size: int, passes: int) -> None:
    """Fill `report` with facts and copies."""
    from umbra.services.trainer.operations import ceiling

    device = torch.device("cuda")
    properties = torch.cuda.get_device_properties(device)
    report.facts.update(
        gpu=properties.name,
        memory_gib=round(properties.total_memory / 2**30, 1),
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=str(torch.version.cuda),
        nccl=".".join(map(str, torch.cuda.nccl.version())),
    )
    on_gpu = torch.empty(size, dtype=torch.uint8, device=device).random_(0, 255)
    for kind, block in host_blocks(size).items():
        for way, target, source in (("to the GPU", on_gpu, block), ("from it", block, on_gpu)):
            spent = best_s(lambda t=target, s=source: t.copy_(s, non_blocking=True), passes)
            report.add(memory=kind, way=way, gib_s=size / spent / 2**30)
    other = torch.empty_like(on_gpu)
    spent = best_s(lambda: other.copy_(on_gpu), passes)
    report.add(memory="GPU", way="on the GPU", gib_s=size / spent / 2**30)
    report.figure("product_tflops", ceiling(device) / 1e12)


def summarise(report: Report) -> None:
    """The table of copies."""
    rows = [[row["memory"], row["way"], row["gib_s"]] for row in report.rows]
    report.table("copies", ["memory", "way", "GiB/s"], rows)


def main() -> None:
    """Measure, print, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size-mib", type=int, default=1024)
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--check", action="store_true", help="begin nothing")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.check:
        return
    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU that torch can use")
    report = Report("gpu_facts")
    measure(report, args.size_mib * MIB, args.passes)
    summarise(report)
    report.show(args.json)


if __name__ == "__main__":
    main()
