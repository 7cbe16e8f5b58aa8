"""Build the sdist and from it the wheel, install each in a fresh environment and try it.

The installed package makes a model and trains it for two steps, with torch of this environment. The
wheel is also run by pipx and by uvx, which find all that it needs in the index.

The sources are copied first, so that no build results are left in the repository and nothing that
git ignores can reach the package.
"""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINKED = ("proto", "services", "deploy")

TRY_HELP = """
import sys
from umbra.cli import main
code = main(["--help"])
heavy = {"torch", "transformers", "zmq"} & set(sys.modules)
sys.exit(f"umbra --help imported {sorted(heavy)}" if heavy else code)
"""


class CheckError(Exception):
    """The package is not what it should be."""


def run(*command: str | Path, cwd: Path) -> str:
    """Run `command`, return its stdout and raise CheckError with all of its output if it fails."""
    # Only the installed package may be found, not this checkout.
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    if result.returncode != 0:
        line = shlex.join(str(part) for part in command)
        raise CheckError(f"{line}\nexit code {result.returncode}\n{result.stdout}{result.stderr}")
    return result.stdout


def source_names() -> list[str]:
    """Return the paths that git tracks or could track, relative to the repository."""
    listing = run(
        "git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT
    ).split("\0")
    return sorted({n for n in listing if n and ((ROOT / n).exists() or (ROOT / n).is_symlink())})


def copy_sources(names: list[str], target: Path) -> None:
    """Copy the files called `names` to `target`, links as links."""
    for name in names:
        copy = target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy, follow_symlinks=False)


def expected_names(names: list[str]) -> set[str]:
    """Return the paths that the wheel has to hold, from the repository's paths."""
    expected = {"umbra/py.typed"}
    for name in names:
        if name.startswith("src/") and name.endswith(".py"):
            expected.add(name.removeprefix("src/"))
        elif name.split("/")[0] in LINKED and name.endswith((".py", ".html", ".css", ".js")):
            expected.add(f"umbra/{name}")
    for page in ("proto/README.md", "proto/weights.md"):
        if page in names:
            expected.add(f"umbra/{page}")
    return expected


def check_wheel(wheel: Path, names: list[str]) -> int:
    """Raise CheckError if the wheel lacks a file or has a stray one; return how many it has."""
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    dist_info = f"{'-'.join(wheel.name.split('-')[:2])}.dist-info/"
    stray = {n for n in held if not n.startswith(("umbra/", dist_info))}
    stray |= {n for n in held if "__pycache__" in n or n.endswith(".pyc")}
    code = {n for n in held if n.endswith(".py")}
    expected = expected_names(names)
    problems = {
        "missing from the wheel": expected - held,
        "in the wheel, but not in the repository": code - expected,
        "stray in the wheel": stray,
    }
    if f"{dist_info}licenses/LICENSE" not in held:
        problems["missing from the wheel"].add(f"{dist_info}licenses/LICENSE")
    found = [f"{what}: {', '.join(sorted(which))}" for what, which in problems.items() if which]
    if found:
        raise CheckError("\n".join(found))
    return len(held)


def check_sdist(sdist: Path) -> None:
    """Raise CheckError if the sdist holds a link, which not every unpacker creates."""
    with tarfile.open(sdist) as archive:
        links = [m.name for m in archive.getmembers() if m.issym() or m.islnk()]
    if links:
        raise CheckError(f"links in the sdist: {', '.join(links)}")


def check_installed(wheel: Path, sdist: Path, folder: Path) -> str:
    """Install `wheel` with its base dependencies, try the command and return its version line.

    Then build `sdist` and install it over the wheel.
    """
    environment = folder / "venv"
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    umbra = environment / "bin" / "umbra"
    options = shlex.split(os.environ.get("PIP_OPTIONS", ""))
    run(python, "-m", "pip", "install", "-qq", *options, wheel, cwd=folder)
    run(python, "-m", "pip", "check", cwd=folder)
    find_torch = "import importlib.util, sys; sys.exit(bool(importlib.util.find_spec('torch')))"
    run(python, "-c", find_torch, cwd=folder)
    version = run(umbra, "--version", cwd=folder).strip()
    run(umbra, "--help", cwd=folder)
    run(python, "-c", TRY_HELP, cwd=folder)
    for module in ("umbra.proto", "umbra.services.buffer", "umbra.deploy"):
        run(python, "-c", f"import {module}", cwd=folder)
    run(
        python, "-m", "pip", "install", "-qq", *options, "--force-reinstall", "--no-deps", sdist,
        cwd=folder,
    )  # fmt: skip
    if (again := run(umbra, "--version", cwd=folder).strip()) != version:
        raise CheckError(f"the sdist is {again}, the wheel {version}")
    return version


def check_run(environment: Path, folder: Path) -> None:
    """Have the installed package train a model of its own making for two steps.

    Libraries that it has not installed come from this environment, whose own checkout of Umbra is
    not found there.
    """
    (site,) = (environment / "lib").glob("python3*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    umbra = environment / "bin" / "umbra"
    found = run(
        environment / "bin" / "python", "-c", "import umbra; print(umbra.__file__)", cwd=folder
    )
    if not Path(found.strip()).is_relative_to(environment):
        raise CheckError(f"umbra was imported from {found.strip()}")
    run(umbra, "make-model", "tiny", cwd=folder)
    run(umbra, "init", "first", "--model", "tiny", "--reward", "function", cwd=folder)
    fewer = ["run.steps=2", "sampling.max_tokens=8", "buffer.batch_groups=2"]
    settings = [word for setting in fewer for word in ("--set", setting)]
    run(umbra, "check", "first/run.toml", *settings, cwd=folder)
    run(umbra, "up", "first/run.toml", *settings, cwd=folder)
    if len(found := list((folder / "runs").glob("*/model/*.safetensors"))) != 1:
        raise CheckError(f"the run left {found} instead of one model")


def check_runners(wheel: Path, folder: Path, version: str) -> None:
    """Have pipx and uvx, as they are in the index, run `wheel`.

    Raises:
        CheckError: one of them does not, or runs something else than `version`.
    """
    environment = folder / "runners"
    venv.create(environment, with_pip=True)
    binaries = environment / "bin"
    options = shlex.split(os.environ.get("PIP_OPTIONS", ""))
    run(binaries / "pip", "install", "-qq", *options, "pipx", "uv", cwd=folder)
    own = {
        "PIPX_HOME": str(folder / "pipx"),
        "PIPX_DEFAULT_PYTHON": sys.executable,
        "UV_CACHE_DIR": str(folder / "uv"),
        "UV_PYTHON": sys.executable,
        "UV_PYTHON_DOWNLOADS": "never",
    }
    for command in (
        (binaries / "pipx", "run", "--spec", wheel, "umbra", "--version"),
        (binaries / "uvx", "--from", wheel, "umbra", "--version"),
    ):
        said = run("env", *(f"{k}={v}" for k, v in own.items()), *command, cwd=folder)
        if version.partition(" (")[0] not in said:
            raise CheckError(f"{command[0].name} ran {said.strip()!r}, not {version}")


def main() -> int:
    """Run all checks; return 0 if they pass, else 1."""
    with tempfile.TemporaryDirectory(prefix="umbra-package-") as name:
        folder = Path(name)
        try:
            names = source_names()
            copy_sources(names, folder / "source")
            # Without --sdist or --wheel, build makes the sdist and then the wheel from the sdist.
            run(sys.executable, "-m", "build", "--outdir", folder, folder / "source", cwd=folder)
            (sdist,) = folder.glob("*.tar.gz")
            (wheel,) = folder.glob("*.whl")
            check_sdist(sdist)
            count = check_wheel(wheel, names)
            version = check_installed(wheel, sdist, folder)
            check_run(folder / "venv", folder)
            check_runners(wheel, folder, version)
        except CheckError as error:
            print(f"package check failed: {error}", file=sys.stderr)
            return 1
        print(f"{wheel.name}: {count} files; installed: {version}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
