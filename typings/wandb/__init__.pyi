# The parts of wandb that Umbra uses.

from typing import Any, Literal

class Error(Exception): ...

class Run:
    def log(
        self, data: dict[str, Any], step: int | None = None, commit: bool | None = None
    ) -> None: ...
    def define_metric(self, name: str, step_metric: str) -> object: ...
    def finish(self) -> None: ...

def init(
    *,
    project: str,
    id: str,
    name: str,
    dir: str,
    mode: Literal["online", "offline", "disabled"],
    resume: str | None,
    config: dict[str, Any],
) -> Run: ...
