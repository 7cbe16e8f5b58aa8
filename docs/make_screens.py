"""Takes pictures of a real run: `python docs/make_screens.py [FOLDER]` (minutes; needs Chromium).

Runs the sorting demo, looks at it half-way as `umbra monitor` does on a terminal and as the page of
`umbra monitor --web`, and takes the report that it leaves: without FOLDER the pictures of these
pages here, with it each page in four widths, light and dark, of a run of some steps.
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

from umbra.services.monitor.client import Watch
from umbra.services.monitor.view import screen

HERE = Path(__file__).parent
UMBRA = (sys.executable, "-m", "umbra")
STEPS, SOME = 360, 24  # of a run for the pages here, and for FOLDER
LOOK_S = 1.0
ANSWER_S = 30.0
COLUMNS = 138
SIZES = {390: 2400, 820: 1800, 1280: 1500, 1920: 1300}  # widths of windows, and heights


def browse(url: str, picture: Path, width: int, height: int, *, dark: bool = False) -> None:
    """Save a screenshot of a page."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("no chromium here")
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [
                chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                "--disable-background-networking", "--disable-sync", "--no-first-run",
                *(["--blink-settings=preferredColorScheme=0"] if dark else []),
                f"--user-data-dir={profile}", "--virtual-time-budget=5000",
                f"--window-size={width},{height}", f"--screenshot={picture}", url,
            ],
            check=True, capture_output=True, timeout=300,
        )  # fmt: skip


def pictures(url: str, name: str, out: Path | None, width: int, height: int) -> None:
    """Take a page for the pages here or, with `out`, in all sizes and both schemes."""
    if out is None:
        browse(url, HERE / f"{name}.png", width, height)
        return
    for wide, high in SIZES.items():
        for dark in (False, True):
            picture = out / f"{name}-{wide}-{'dark' if dark else 'light'}.png"
            browse(url, picture, wide, high, dark=dark)


def watch(broker: str, out: Path | None, half_way: int) -> None:
    """Save pictures of the run as it goes."""
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
        while look.status.version < half_way:
            time.sleep(LOOK_S)
            look = watching.look(ANSWER_S)
        console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
        console.print(screen(look, console.width))
        console.save_svg(str((out or HERE) / "monitor-terminal.svg"), title="umbra monitor")
    pictures(url, "monitor-web", out, 1180, 1560)
    page.terminate()
    page.wait()
    page.stdout.close()


def main(out: Path | None) -> None:
    """Run the demo and take the pictures."""
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    steps = STEPS if out is None else SOME
    with tempfile.TemporaryDirectory() as folder:
        run_steps = ["--set", f"run.steps={steps}"]
        demo = subprocess.Popen(
            [*UMBRA, "demo", "--dir", folder, *run_steps], stdout=subprocess.PIPE, text=True
        )
        assert demo.stdout is not None
        for line in demo.stdout:
            print(line, end="")
            if "its buffer at " in line:
                watch(line.split("its buffer at ")[1].strip(), out, steps // 2)
        if demo.wait():
            sys.exit(demo.returncode)
        (run,) = Path(folder).iterdir()
        page = run / "report.html"  # which says where the model is: here, for a minute
        page.write_text(page.read_text(encoding="utf-8").replace(folder, "runs"), encoding="utf-8")
        pictures(page.as_uri(), "report", out, 1340, 2800)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
