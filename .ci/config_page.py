"""docs/config.md: every key of a run file, from the schema."""

from __future__ import annotations

from itertools import groupby

from umbra.services.config.describe import (
    READERS,
    WITH_FLAGS,
    Described,
    described,
    section_summary,
)
from umbra.services.config.loader import ENVIRONMENTS

HEAD = """# Every key of a run file

Made from the schema by `python .ci/config_page.py`; a test compares. A run file is TOML, with a
table per section. The environment variable `UMBRA_SECTION__KEY` is stronger than the file, and
`--set section.key=value` stronger than both. `umbra check RUN.toml --show` prints a run file with
all defaults, `umbra check RUN.toml` tries it. Paths are looked for in the run file's folder first,
then in the current directory. Objectives, and the keys that they set:
[algorithms.md](algorithms.md).
Settings for staleness: [staleness.md](staleness.md).
"""


def config_page() -> str:
    """The page, as Markdown."""
    parts = [HEAD]
    for section, keys in groupby(described(), key=lambda key: key.section):
        flags = ""
        if section in WITH_FLAGS:
            command = section.replace("_", "-")
            flags = f" Each key is a flag of `umbra {command}` too, with hyphens."
        parts.append(
            f"## {_heading(section)}\n\n{section_summary(section)} Read by: {READERS[section]}."
            f"{flags}\n"
        )
        parts.append("| key | value | default | unit | meaning |\n|---|---|---|---|---|")
        parts.append("\n".join(_row(key) for key in keys) + "\n")
    return "\n".join(parts).rstrip() + "\n"


def _heading(section: str) -> str:
    return f"[[{section}]]" if section == ENVIRONMENTS else f"[{section}]"


def _row(key: Described) -> str:
    default = f"`{key.default}`" if key.default else ""
    if key.default == "of the objective":
        default = "of the [objective](algorithms.md)"
    cells = (f"`{key.name}`", key.value, default, key.unit, key.meaning)
    return "| " + " | ".join(cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells) + " |"


if __name__ == "__main__":
    print(config_page(), end="")
