"""Takes the pictures of a real run in docs/: `python docs/make_screens.py` (minutes).

Runs the sorting demo, looks at it half-way as `umbra monitor` does on a terminal and as the page of
`umbra monitor --web`, and takes the report that it leaves. Needs Chromium.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from umbra.services.monitor.feed import Watch
from umbra.services.monitor.screen import screen

HERE = Path(__file__).parent
UMBRA = (sys.executable, "-m", "umbra")
HALF_WAY = 180  # of 360 steps
LOOK_S = 1.0
ANSWER_S = 30.0
COLUMNS = 138


def browse(chromium: str, url: str, picture: Path, width: int, height: int) -> None:
    """A screenshot of a page."""
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [
                chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                f"--user-data-dir={profile}", "--virtual-time-budget=5000",
                f"--window-size={width},{height}", f"--screenshot={picture}", url,
            ],
            check=True, capture_output=True, timeout=120,
        )  # fmt: skip


def watch(broker: str, chromium: str) -> None:
    """The pictures of the run as it goes."""
    page = subprocess.Popen(
        [*UMBRA, "monitor", "--broker", broker, "--web", "127.0.0.1:0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert page.stdout is not None
    url = next(word for line in page.stdout for word in line.split() if word.startswith("http"))
    with Watch(broker) as watching:
        look = watching.look(ANSWER_S)
        while look.status.version < HALF_WAY:
            time.sleep(LOOK_S)
            look = watching.look(ANSWER_S)
        console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
        console.print(screen(look, console.width))
        console.save_svg(str(HERE / "monitor-terminal.svg"), title="umbra monitor")
    browse(chromium, url, HERE / "monitor-web.png", 1180, 1560)
    page.terminate()
    page.wait()
    page.stdout.close()


def main() -> None:
    """Run the demo and take the pictures."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("no chromium here")
    with tempfile.TemporaryDirectory() as folder:
        demo = subprocess.Popen(
            [*UMBRA, "demo", "--dir", folder], stdout=subprocess.PIPE, text=True
        )
        assert demo.stdout is not None
        for line in demo.stdout:
            print(line, end="")
            if "its buffer at " in line:
                watch(line.split("its buffer at ")[1].strip(), chromium)
        if demo.wait():
            sys.exit(demo.returncode)
        (run,) = Path(folder).iterdir()
        page = run / "report.html"  # which says where the model is: here, for a minute
        page.write_text(page.read_text(encoding="utf-8").replace(folder, "runs"), encoding="utf-8")
        browse(chromium, page.as_uri(), HERE / "report.png", 1340, 2800)


if __name__ == "__main__":
    main()
