"""The pages of a run in a real browser; the pictures stay in build/screens, to be looked at."""

import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "docs" / "make_screens.py"

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium here"),
]


@pytest.mark.timeout(1800)
def test_every_page_is_drawn_in_every_size_light_and_dark() -> None:
    out = ROOT / "build" / "screens"
    shutil.rmtree(out, ignore_errors=True)
    subprocess.run([sys.executable, PROGRAM, out], check=True, timeout=1700)
    assert "reward/mean" in (out / "monitor-terminal.svg").read_text(encoding="utf-8")
    for page in ("monitor-web", "report"):
        for width in runpy.run_path(str(PROGRAM))["SIZES"]:
            light, dark = (out / f"{page}-{width}-{way}.png" for way in ("light", "dark"))
            assert min(light.stat().st_size, dark.stat().st_size) > 20_000
            assert light.read_bytes() != dark.read_bytes()
