"""Packages that tests need; looked for without importing them, which may take half a minute."""

from importlib.util import find_spec

import pytest


def needs(package: str) -> None:
    """Skip the tests of a module where `package` is not installed."""
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed (make setup)", allow_module_level=True)
