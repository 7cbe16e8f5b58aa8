"""The keys of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from umbra.proto.access import KeyRole
from umbra.proto.net.keys import Security, load_keys, make_keys


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "keys"
    make_keys(folder)
    return folder


def of(folder: Path, role: KeyRole) -> Security:
    """Return the security of a process of `role` with the keys in `folder`."""
    return Security(load_keys(folder, role))
