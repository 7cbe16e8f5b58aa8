"""The targets of the fuzzer, with the inputs that it begins with and some changes to them."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
CHANGES = 1


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))


def test_all_targets_keep_their_promises() -> None:
    from fuzz_seeds import change, seeds
    from fuzz_targets import TARGETS, try_input

    chance = random.Random(0)
    tried: set[str] = set()
    for one in seeds():
        tried.add(try_input(one))
        for _ in range(CHANGES):
            if (changed := change(one, chance)) is not None:
                try_input(changed)
    assert tried == {target.__name__ for target in TARGETS}


def test_a_broken_promise_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    import fuzz_targets

    from umbra.proto.messages import RegisterManifest
    from umbra.services.weights.manifest import build_manifest

    sound = RegisterManifest(manifest=build_manifest([("a", "BF16", (4, 8))], 128))
    bad = msgspec.msgpack.encode(sound).replace(b"\xa6offset\x00", b"\xa6offset\x7f")
    fuzz_targets.layout(bad)
    monkeypatch.setattr(fuzz_targets, "check_manifest", lambda _: None)
    with pytest.raises(AssertionError):
        fuzz_targets.layout(bad)
