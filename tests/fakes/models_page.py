"""The tables of `docs/models.md`; `python -m fakes.models_page`, in `tests/`, rewrites them.

What vLLM does is read from the record in `benchmarks/results`.
"""

from __future__ import annotations

import re
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from fakes import vllm_models
from fakes.architectures import ARCHITECTURES, Architecture

from umbra.deploy.model_check.check import Outcome, check_model
from umbra.proto.errors import UsageError
from umbra.services.modeling.architectures import check_architecture

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
HEADINGS = {
    "right": ["| architecture, `model_type` | tried with | Umbra | vLLM |", f"|{4 * ' --- |'}"],
    "refused": ["| architecture | `model_type` | Umbra says |", f"|{3 * ' --- |'}"],
}


def examine(directory: Path) -> Outcome | str:
    """Return the outcome for the model in `directory`, or why it is refused."""
    try:
        check_architecture(directory, "model.path")
    except UsageError as error:
        return (
            str(error).replace(f"model.path: {directory} is a ", "").replace(str(directory), "PATH")
        )
    return check_model(directory, vllm=False)


def right(architecture: Architecture, outcome: Outcome) -> str:
    """The line of an architecture whose comparisons were made."""
    name = f"**{outcome.architecture}** `{outcome.model_type}`"
    vllm = vllm_models.recorded().get(architecture.name, {}).get("outcome", "")
    equal = "equal" if outcome.equal else "different"
    return f"| {name} | {architecture.about} | {equal} | {vllm} |"


def refused(architecture: Architecture, reason: str) -> str:
    """The line of an architecture that is refused."""
    return f"| {architecture.name} | `{architecture.config().model_type}` | {reason} |"


def write() -> None:
    """Examine all architectures, and put what came of it between the marks of the page."""
    lines = {mark: [*heading] for mark, heading in HEADINGS.items()}
    with TemporaryDirectory() as folder:
        for name, architecture in ARCHITECTURES.items():
            found = examine(architecture.write(Path(folder) / name))
            if isinstance(found, str):
                lines["refused"].append(refused(architecture, found))
            else:
                lines["right"].append(right(architecture, found))
    for mark, table in lines.items():
        put(mark, "\n".join(table))


def put(mark: str, content: str) -> None:
    """Replace what the page has between two marks."""
    text = PAGE.read_text(encoding="utf-8")
    begin, end = f"<!-- {mark} -->\n", f"<!-- end of {mark} -->\n"
    before, _, after = re.split(f"{begin}|{end}", text)
    PAGE.write_text(before + begin + content + "\n" + end + after, encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    write()
