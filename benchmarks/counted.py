"""How many instructions pieces of work take, by callgrind: the same on a machine that is busy.

    python benchmarks/counted.py [WORK ...]       count and print
    python benchmarks/counted.py --do WORK N      what valgrind runs: prepare, then do it N times

Each piece is done N times and not at all, with the same seed of hashes; the difference over N is
its cost. Counted is user code: no kernel, no waiting, no cache. Repeated counts of the same code
differ by less than a percent.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

LIMIT_S = 1800.0
_COLLECTED = re.compile(r"Collected\s*:\s*(\d+)")
Work = Callable[[int], object]


def message() -> Work:
    """A trajectory of 9 KB is packed, unpacked and checked."""
    from traffic import template

    from umbra.proto.codec import Encoder, decode
    from umbra.proto.messages import SubmitTrajectories
    from umbra.services.config.loader import load_config
    from umbra.services.config.trajectory_rules import RunFacts, find_fault

    encoder, made = Encoder("generator", "i"), SubmitTrajectories(trajectories=[template()])
    facts = RunFacts.of(load_config(environ={}))

    def once() -> None:
        body = decode(encoder.encode(made)[1]).body
        assert isinstance(body, SubmitTrajectories)
        assert find_fault(body.trajectories[0], facts) is None

    return _repeated(once)


def store() -> Work:
    """A commit of 16 trajectories of 9 KB to the log, and their end."""
    from umbra.services.buffer.store.log import LogStore
    from umbra.services.process.disk import Disk

    class NoWait(Disk):
        def sync(self, fd: int) -> None:
            pass

    folder = tempfile.mkdtemp()
    log = LogStore(Path(folder), disk=NoWait())
    value = bytes(9000)

    def once() -> None:
        for number in range(16):
            log.put(f"t/{number}", value)
        log.commit()
        for number in range(16):
            log.delete(f"t/{number}")
        log.commit()

    def run(times: int) -> None:
        try:
            _repeated(once)(times)
        finally:
            log.close()
            shutil.rmtree(folder)

    return run


def step() -> Work:
    """A step of 64 trajectories through the production broker and push protocol, simulated."""
    from umbra.deploy.simulator.compare import simulate
    from umbra.deploy.simulator.scenario import scenario_of

    tree = {
        "cluster": {"gpus": 10, "trainer_gpus": 2},
        "buffer": {"group_size": 8, "batch_groups": 8, "run_ahead": 2, "max_staleness": 4},
        "generator": {"slots": 8},
        "speed": {"decode": {"step_s": 0.01}, "training": {"step_s": 1.0}},
        "samples": {"lengths": {"kind": "uniform", "least": 50, "most": 150}},
    }

    def run(times: int) -> None:
        # The shortest run is what all others have besides their steps.
        simulate(scenario_of(tree | {"run": {"steps": 8 + times}}, "counted", Path()))

    return run


# How to prepare a piece of work, and how often it is done.
WORKS: dict[str, tuple[Callable[[], Work], int]] = {
    "message": (message, 400),
    "store": (store, 100),
    "step": (step, 8),
}


def _repeated(once: Callable[[], None]) -> Work:
    def run(times: int) -> None:
        for _ in range(times):
            once()

    return run


def missing() -> str:
    """Why nothing can be counted here; empty: it can."""
    if shutil.which("valgrind") is None:
        return "valgrind is not installed (on Debian: apt-get install valgrind)"
    return ""


def count(name: str, times: int) -> int:
    """Instructions of preparing a piece of work and doing it `times` times.

    Raises:
        RuntimeError: valgrind or the work failed.
    """
    argv = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", sys.executable]
    argv += [__file__, "--do", name, str(times)]
    environ = {**os.environ, "PYTHONHASHSEED": "0"}
    done = subprocess.run(
        argv, env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    found = _COLLECTED.search(done.stderr)
    if done.returncode or found is None:
        raise RuntimeError(f"counting {name} failed: {done.stderr[-2000:]}")
    return int(found[1])


def instructions(names: Sequence[str] = tuple(WORKS)) -> dict[str, float]:
    """Instructions of each piece of work, done once."""
    counts: dict[str, float] = {}
    for name in names:
        _, times = WORKS[name]
        counts[name] = (count(name, times) - count(name, 0)) / times
    return counts


def main() -> int:
    """Count, or do what is counted."""
    if sys.argv[1:2] == ["--do"]:
        _, name, times = sys.argv[1:]
        WORKS[name][0]()(int(times))
        return 0
    if why := missing():
        print(f"nothing was counted: {why}")
        return 0
    for name, found in instructions(sys.argv[1:] or tuple(WORKS)).items():
        print(f"{name}: {found:,.0f} instructions: {WORKS[name][0].__doc__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
