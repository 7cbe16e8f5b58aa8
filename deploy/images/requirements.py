"""Prints the packages that umbra-rl needs with the extras in the arguments, one per line.

So that an image has them in a layer of its own, which a change of the sources leaves as it is. Run
by the Dockerfile beside pyproject.toml, without anything installed.
"""

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def requirements(project: dict[str, Any], extras: list[str]) -> Iterator[str]:
    """Return the requirements of the extras, and of those that they name in turn."""
    for extra in extras:
        for text in project["optional-dependencies"][extra]:
            if inner := re.fullmatch(rf"{project['name']}\[(.*)\]", text):
                yield from requirements(project, inner[1].split(","))
            else:
                yield text


if __name__ == "__main__":
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    print("\n".join([*project["dependencies"], *requirements(project, sys.argv[1:])]))
