"""A host that is cut off within a push of a version that lies on two trainer hosts.

The hosts are network namespaces; see `programs/cut_push.py` for who is cut off in which phase.
Needs `unshare` and `ip` and the right to make namespaces; skipped with the reason otherwise.
"""

from pathlib import Path

import pytest
from fault.test_three_nodes import in_spaces, why_not

QUICK = (("part", "staging"), ("receiver", "received"))
CASES = (
    *((("part", phase)) for phase in ("granted", "prepared", "staging", "received", "staged")),
    *((("hub", phase)) for phase in ("prepared", "staging", "received", "staged", "loaded")),
    *((("receiver", phase)) for phase in ("prepared", "staging", "received", "staged", "loaded")),
)


@pytest.mark.parametrize(
    ("who", "phase"),
    [case if case in QUICK else pytest.param(*case, marks=pytest.mark.real) for case in CASES],
)
def test_versions_are_whole_whoever_is_cut_off(tmp_path: Path, who: str, phase: str) -> None:
    """1. A version is pushed. 2. In a phase of it a host is cut off. 3. It is connected again.

    Result: nobody hangs, receivers load whole versions only, and all of them load the last one.
    """
    if reason := why_not():
        pytest.skip(reason)
    in_spaces("programs.cut_push", tmp_path, tmp_path, who, phase)
