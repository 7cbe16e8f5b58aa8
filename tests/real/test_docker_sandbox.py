"""Sandboxes in a real Docker; `tests/real/setup.sh` installs it."""

import json
from pathlib import Path

import pytest
from fakes.machines import PROGRAMS, on_machines, skipped

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(600),
    skipped("docker"),
]

# The image has nothing of its own: its programs are this machine's /usr.
SCRIPT = """\
mkdir -p light/etc light/usr light/tmp light/sbin
for name in bin lib lib64; do ln -s usr/$name light/$name; done
tar -C light -c . | on a docker import - umbra-sandbox:latest >/dev/null
python -m http.server --bind 0.0.0.0 8777 >/dev/null 2>&1 &
on a python "$TRY" "$PWD/secret" 8777 > found.json
on a docker ps --all --quiet > left
kill %1
"""


def test_what_a_sandbox_cannot_reach(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("hidden")
    on_machines("docker", tmp_path, {"a": 0}, SCRIPT, TRY=str(PROGRAMS / "sandbox_try.py"))
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["python"] == [0, "42"]
    assert found["user"] == [0, "65534"]
    assert found["interfaces"] == [0, "lo"]
    assert found["network"] == [0, ""]
    assert found["environment"] == [1, "0"]  # grep counts none
    assert found["secret"][0] == 1 and "hidden" not in found["secret"][1]
    assert found["daemon"][0] == 2
    assert found["kept"] == found["still there"] == [0, "mine"]
    assert found["other"][0] == 1
    assert found["root"][0] != 0
    assert found["root"][1].count("Read-only file system") == 3
    assert int(found["disk"][1].splitlines()[-1]) <= 24 << 20
    assert found["memory"][0] == 137 and "had it" not in found["memory"][1]
    assert 0 < int(found["forks"][1]) < 24
    assert "took longer than 2 s" in found["slow"]
    assert found["alive"] == [0, "yes"]
    assert (tmp_path / "left").read_text() == ""  # all containers are gone
