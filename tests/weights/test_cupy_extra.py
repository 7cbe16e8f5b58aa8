"""Which extra brings the CuPy for the installed torch."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

from umbra.services.weights.gpu import cuda


@pytest.mark.parametrize(
    ("built", "told"),
    [
        ("cuda: Optional[str] = '13.0'", "pip install 'umbra-rl[nccl-cuda13]'"),
        ("cuda: Optional[str] = '12.6'", "pip install 'umbra-rl[nccl]'"),
        ("cuda = '12.8'", "pip install 'umbra-rl[nccl]'"),
        ("cuda: Optional[str] = None", "pip install 'umbra-rl[nccl]' for CUDA 12, or [nccl-"),
        ("", "pip install 'umbra-rl[nccl]' for CUDA 12, or [nccl-"),  # no torch
    ],
)
def test_the_extra_is_that_of_torchs_cuda(
    built: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version.py").write_text(f"__version__ = '2.13.0'\n{built}\nhip = '13.9'\n")
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py")) if built else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)
    found = cuda._to_install()
    assert found.startswith(told)
    assert "nvidia-nccl" not in found + cuda.NO_NCCL.partition("(")[0], "torch's own would go"
