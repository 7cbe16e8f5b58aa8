"""The tables of `docs/models.md`; `python -m fakes.models_page`, in `tests/`, rewrites them.

What vLLM does is read from the record in `benchmarks/results`.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from fakes import vllm_models
from fakes.architectures import ARCHITECTURES, Architecture

from umbra.deploy.model_check.check import Outcome, check_model
from umbra.proto.errors import UsageError
from umbra.services.modeling.architectures import check_architecture

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
RIGHT = ("architecture, `model_type`", "tried with", "Umbra", "vLLM")
REFUSED = ("architecture", "`model_type`", "Umbra says")


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
    known = f"**{outcome.architecture}** `{outcome.model_type}`", architecture.about
    found = vllm_models.recorded().get(architecture.name, {})
    equal = "equal" if outcome.equal else "different"
    return _line([*known, equal, found.get("outcome", "")])


def refused(architecture: Architecture, reason: str) -> str:
    """The line of an architecture that is refused."""
    return _line([architecture.name, f"`{architecture.config().model_type}`", reason])


def table(heading: tuple[str, ...], lines: list[str]) -> str:
    """A table of `lines`."""
    return "\n".join((_line(list(heading)), _line(["---"] * len(heading)), *lines))


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def write() -> None:
    """Examine all architectures, and put what came of it between the marks of the page."""
    good: list[str] = []
    bad: list[str] = []
    with TemporaryDirectory() as folder:
        for name, architecture in ARCHITECTURES.items():
            found = examine(architecture.write(Path(folder) / name))
            if isinstance(found, str):
                bad.append(refused(architecture, found))
            else:
                good.append(right(architecture, found))
    _put("right", table(RIGHT, good))
    _put("refused", table(REFUSED, bad))


def _put(mark: str, content: str) -> None:
    text = PAGE.read_text(encoding="utf-8")
    begin, end = f"<!-- {mark} -->\n", f"<!-- end of {mark} -->\n"
    before, rest = text.split(begin)
    _, after = rest.split(end)
    PAGE.write_text(f"{before}{begin}{content}\n{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    write()
