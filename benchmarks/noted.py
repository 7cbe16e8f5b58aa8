"""`umbra`, whose generators and trainers write down what they have been promised and what they did.

    UMBRA_BENCH_NOTES=FOLDER python benchmarks/noted.py COMMAND [its arguments]

A generator notes each sample whose delivery the buffer has acknowledged, a trainer the samples of
each batch that it has trained on. So what became of a sample is known without asking the buffer.
`noted.py up` starts all of its processes in this way. A note is in the file before anything
follows from it; a process that is killed in between has noted less, never more.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLE = "UMBRA_BENCH_NOTES"


def note(file: str, line: str) -> None:
    """Append a line to a file of the folder that the environment names; nothing without one."""
    if folder := os.environ.get(VARIABLE):
        place = os.open(Path(folder) / file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(place, f"{line}\n".encode())
        os.close(place)


def note_acknowledged(samples: Iterable[str]) -> None:
    """The buffer has said that it keeps the answers to these samples."""
    if names := " ".join(samples):
        note(f"acknowledged-{os.getpid()}.txt", names)


def note_trained(step: int, samples: Sequence[str]) -> None:
    """A batch was trained on; it is that of `step`."""
    note("trained.jsonl", json.dumps({"step": step, "samples": samples}))


@dataclass(frozen=True)
class Notes:
    """What the clients of a run have noted.

    Attributes:
        acknowledged: samples that the buffer said it keeps.
        batches: the samples of each step, in order; of a step that was repeated, the last time.
        repeated: how often a step was trained on again.
        changed: how often other samples came then.
    """

    acknowledged: frozenset[str]
    batches: dict[int, list[str]]
    repeated: int
    changed: int

    @property
    def trained(self) -> Counter[str]:
        """In how many of the batches each sample is."""
        return Counter(name for batch in self.batches.values() for name in batch)

    @property
    def twice(self) -> int:
        """Samples that are in more than one place."""
        return sum(count > 1 for count in self.trained.values())

    @property
    def untrained(self) -> frozenset[str]:
        """Those that were acknowledged and not trained on."""
        return self.acknowledged - self.trained.keys()


def read_notes(folder: Path) -> Notes:
    """All notes in `folder`."""
    kept: set[str] = set()
    for file in folder.glob("acknowledged-*.txt"):
        kept.update(file.read_text(encoding="utf-8").split())
    batches: dict[int, list[str]] = {}
    repeated = changed = 0
    file = folder / "trained.jsonl"
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        row = json.loads(line)
        before = batches.get(row["step"])
        if before is not None:
            repeated += 1
            changed += before != row["samples"]
        batches[row["step"]] = row["samples"]
    return Notes(frozenset(kept), batches, repeated, changed)


def noting_client() -> type[Any]:
    """A `BufferClient` that notes what is acknowledged."""
    from umbra.proto.messages import Message, SubmitAck, SubmitTrajectories
    from umbra.services.generator.buffer_client import BufferClient

    class NotingClient(BufferClient):
        def _send(
            self,
            body: Message,
            handle: Callable[[Future[Message]], object],
            timeout_s: float | None = None,
        ) -> None:
            if not isinstance(body, SubmitTrajectories):
                return super()._send(body, handle, timeout_s)
            samples = [one.sample_id for one in body.trajectories]

            def stored(future: Future[Message]) -> None:
                handle(future)
                answer = future.result()
                if isinstance(answer, SubmitAck):
                    note_acknowledged(name for name in samples if name not in answer.refused)

            return super()._send(body, stored, timeout_s)

    return NotingClient


def noting(make: Callable[..., Any]) -> Callable[..., Any]:
    """`make_update` whose updates note what they have trained on."""

    def make_noting(*arguments: Any) -> Any:
        inner = make(*arguments)

        def update(batch: Any, version: int, keep_going: Callable[[], bool]) -> Any:
            row = inner(batch, version, keep_going)
            if row is not None:
                note_trained(version + 1, [one.sample_id for one in batch.trajectories])
            return row

        return update

    return make_noting


def main() -> int:
    """Be `umbra`, but for what is noted."""
    from umbra.cli import main as umbra
    from umbra.deploy import programs

    programs.umbra_argv = lambda *arguments: (sys.executable, __file__, *arguments)
    if sys.argv[1:2] == ["generator"]:
        from umbra.services.generator import service as generator

        generator.BufferClient = noting_client()
    if sys.argv[1:2] == ["trainer"]:
        from umbra.services.process.command import service_command
        from umbra.services.trainer.service import run
        from umbra.services.trainer.update import PolicyUpdate

        command = service_command("trainer", lambda given: run(given, None, noting(PolicyUpdate)))
        command.main(sys.argv[2:], prog_name="noted trainer")
    return umbra() or 0


if __name__ == "__main__":
    from umbra.services.process.parent import die_with_parent

    die_with_parent()
    sys.exit(main())
