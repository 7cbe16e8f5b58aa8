"""The tree in the docstring of `proto/errors.py` is the tree of the classes."""

from __future__ import annotations

import inspect
import re

import pytest

from umbra.proto import errors
from umbra.proto.errors import LimitError, RejectedError, UmbraError, WireError

ROW = re.compile(r"^ {4}(?P<branch>[| `-]*)(?P<name>\w+) +(?P<code>\d+) +(?P<meaning>\w.*)$")
INDENT = 4  # columns per level of the tree


def documented() -> dict[str, tuple[str, int]]:
    """Return the parent's name and the exit code of every error in the docstring."""
    found: dict[str, tuple[str, int]] = {}
    parents = ["Exception"]
    for line in (errors.__doc__ or "").expandtabs().splitlines():
        if row := ROW.match(line):
            level = len(row["branch"]) // INDENT
            parents[level + 1 :] = [row["name"]]
            found[row["name"]] = (parents[level], int(row["code"]))
    return found


def test_the_tree() -> None:
    classes = {
        name: cls
        for name, cls in vars(errors).items()
        if inspect.isclass(cls) and issubclass(cls, Exception)
    }
    assert documented() == {
        name: (cls.__mro__[1].__name__, cls.exit_code)
        for name, cls in classes.items()
        if issubclass(cls, UmbraError)
    }
    assert set(classes) == set(documented()), "an error outside of the tree"


@pytest.mark.parametrize("name", documented())
def test_every_error_has_a_docstring_and_keeps_its_sentence(name: str) -> None:
    cls: type[UmbraError] = getattr(errors, name)
    assert cls.__doc__
    assert str(cls("one sentence")) == "one sentence"


def test_exit_codes_collide_with_nothing() -> None:
    codes = {code for _, code in documented().values()}
    assert codes.isdisjoint({errors.EXIT_DONE, 1})  # 1 is Python's own
    assert max(codes) < 64  # below sysexits.h, and far below 128 + signal
    assert errors.EXIT_DONE == 0


def test_what_the_errors_carry() -> None:
    assert RejectedError("no").code == "rejected"
    assert RejectedError("no", code="full").code == "full"
    assert (WireError("bad").path, WireError("bad").code) == ("$", "malformed")
    assert (LimitError("big", path="fields").path, LimitError("big").code) == (
        "fields",
        "too_large",
    )
