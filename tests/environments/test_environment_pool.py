"""User code in processes of its own: raising, hanging or dying costs one sample.

What it starts ends with it, and its output and memory have limits.
"""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes.fixtures import Closes
from fakes.slowness import is_alive, limit, seconds, until

from umbra.proto.errors import DeadlineError, UsageError
from umbra.services.config import EnvironmentConfig, NamedEnvironment
from umbra.services.environments import guard
from umbra.services.environments.pool import ProcessPool
from umbra.services.environments.protocol import EpisodeOutcome, Lost, Opening, StepResult
from umbra.services.environments.worker_pool import WorkerPool

pytestmark = pytest.mark.e2e

USER_CODE = """
import asyncio, os, signal, subprocess, sys, time

from umbra.services.environments.protocol import StepResult

def score(prompt, completion, row):
    if completion == "raise":
        raise KeyError("gold")
    if completion == "exit":
        sys.exit(3)
    if completion.startswith("start"):
        start()
    if completion.endswith("hang"):
        time.sleep(600)
    if completion.endswith("die"):
        os.kill(os.getpid(), signal.SIGKILL)
    return "1.0" if completion == "text" else 0.5

def start():
    for session in (False, True):
        child = subprocess.Popen(["sleep", "600"], start_new_session=session)
        with open("pids", "a") as file:
            file.write(f"{child.pid}\\n")
    # Its parent is gone at once.
    subprocess.run(["sh", "-c", "setsid sleep 600 & echo $! >> pids"], check=True)

def talkative(prompt, completion, row):
    for _ in range(500):
        os.write(1, b"x" * 100_000)
    return 1.0

def hungry(prompt, completion, row):
    return float(len(bytearray(400 << 20 if completion == "much" else 50 << 20)) > 0)

class Number(float):
    pass  # as numpy's are

class Own:
    # Counts what it is told.
    def __init__(self):
        self.sum = 0
    def reset(self, row):
        self.row = row
        if row["key"] == "hangs":
            time.sleep(600)
        return [{"role": "user", "content": f"{row['blob']!r} {row['number']}"}]
    def step(self, response):
        if response == "raise":
            raise KeyError("gold")
        if response == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if response == "hang":
            time.sleep(600)
        if response == "object":
            return StepResult(done=False, messages=[{"role": "user", "content": "", "x": object()}])
        self.sum += int(response)
        message = {"role": "user", "content": str(self.sum), "number": Number(1.5)}
        return StepResult(reward=0.5, done=False, messages=[message], reward_parts={"a": 1.0})
    def close(self):
        with open("closed", "a") as file:
            file.write(self.row["key"])
        if self.row["key"] == "slow":
            time.sleep(600)

class Waiting(Own):
    async def reset(self, row):
        if row["key"] == "hangs":
            await asyncio.Event().wait()
        return super().reset(row)
    async def step(self, response):
        if response == "hang":
            await asyncio.Event().wait()
        return super().step(response)
    async def close(self):
        await asyncio.sleep(0)
        super().close()

class Shared:
    def reset(self, row):
        return []
    async def step(self, response):
        if response == "die":
            os._exit(1)
        if response == "hang once" and not os.path.exists("hung"):
            open("hung", "w").close()
            await asyncio.sleep(600)
        return StepResult(reward=2.0)

class Box:
    async def run(self, command):
        return command
    async def close(self):
        await asyncio.sleep(0.05)
        self.run = None

async def agent(row, endpoint, sandbox):
    await asyncio.sleep(row["s"])
    sandbox.close = sandbox.close if row["s"] else asyncio.Event().wait
    return await sandbox.run(1.0)
"""
ONCE = """
import time
open("starts", "a").write("x")
assert len(open("starts").read()) == 1, time.sleep(SECONDS)
score = lambda prompt, completion, row: time.sleep(600)
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "theirs.py").write_text(USER_CODE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Player:
    """A pool with one process, played from a test."""

    def __init__(self, what: str, **changes: Any) -> None:
        own = {"kind": "reward", "reward": f"theirs:{what}"}
        own = own if what.islower() else {"kind": f"theirs:{what}"}
        values: dict[str, Any] = {"timeout_s": 20.0, "workers": 1, **own, **changes}
        self._event = threading.Event()
        self.pool = ProcessPool(EnvironmentConfig(**values), wake=self._event.set)
        self.close = self.pool.close

    def outcomes(self, count: int) -> dict[str, EpisodeOutcome]:
        found: dict[str, EpisodeOutcome] = {}
        while len(found) < count:
            assert self._event.wait(limit(60))
            self._event.clear()
            found |= {outcome.key: outcome for outcome in self.pool.collect()}
        return found

    def begin(self, key: str, *responses: str) -> None:
        row = {"prompt": "p", "key": key, "blob": b"\x00\xff", "number": 1 << 63}
        self.pool.play(key, row, list(responses))

    def play(self, key: str, *responses: str) -> EpisodeOutcome:
        self.begin(key, *responses)
        return self.outcomes(1)[key]

    def said(self, key: str, response: str) -> str:
        outcome = self.play(key, response)
        assert isinstance(outcome.value, StepResult), outcome.error
        return outcome.value.messages[0]["content"]


Start = Callable[..., Player]


@pytest.fixture
def start(closes: Closes) -> Start:
    return lambda what, **changes: closes(Player(what, **changes))


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ("raise", "raised KeyError: 'gold'"),
        ("exit", "raised SystemExit: 3"),
        ("text", "returned '1.0', which is not a finite number"),
        ("die", "the process of its environment ended (killed by SIGKILL)"),
        ("hang", "its reward took longer than environment.timeout_s = "),
    ],
)
def test_a_bad_reward_costs_its_sample(start: Start, said: str, error: str) -> None:
    # One that hangs ends the test after the limit, in which the good ones have to be scored.
    player = start("score", timeout_s=seconds(1.0) if said == "hang" else 20.0)
    for name, completion in (("bad", said), ("good", "fine"), ("better", "fine")):
        player.begin(name, completion)
    outcomes = player.outcomes(3)
    assert error in outcomes["bad"].error
    assert outcomes["good"].value == outcomes["better"].value == StepResult(reward=0.5)


def test_one_of_many_in_a_process_kills_it(start: Start) -> None:
    """The others are sent again; the one that does it twice, alone, is the one."""
    player = start("Shared")
    for response in ("hang once", "die", "late"):
        player.begin(response, response)
    outcomes = player.outcomes(3)
    assert "ended (exit code 1)" in outcomes["die"].error
    assert outcomes["hang once"].value == outcomes["late"].value == StepResult(reward=2.0)


def test_answers_come_as_they_were_made_and_are_lost_with_their_process(start: Start) -> None:
    player = start("Own")
    blob = repr(b"\x00\xff")
    opened = player.play("a").value
    assert opened == Opening([{"role": "user", "content": f"{blob} {1 << 63}"}])
    message = {"role": "user", "content": "1", "number": 1.5}
    said = StepResult(reward=0.5, done=False, messages=[message], reward_parts={"a": 1.0})
    assert player.play("a", "1").value == said
    assert "answer: <object object" in player.play("b", "object").error
    assert "raised KeyError: 'gold'" in player.play("b", "raise").error
    player.begin("b", "die")
    outcomes = player.outcomes(2)
    assert "killed by SIGKILL" in outcomes["b"].error
    assert outcomes["a"].value == Lost()
    player.begin("a", "2")  # was on its way
    assert isinstance(player.play("a").value, Opening)
    assert (player.said("a", "5"), player.said("a", "2")) == ("5", "7")


@pytest.mark.parametrize("kind", ["Own", "Waiting"])
def test_opening_and_step_are_limited(start: Start, kind: str) -> None:
    """The sentence names phase, seconds and key."""
    limit_s = seconds(0.5)  # in which the next one has to be opened
    player = start(kind, timeout_s=limit_s)
    told = f"took longer than environment.timeout_s = {limit_s:g} s"
    opened = player.play("hangs").error
    assert opened == f"environment theirs:{kind}: the opening (reset) {told}"
    assert isinstance(player.play("b").value, Opening)
    assert player.play("b", "hang").error == f"environment theirs:{kind}: a step {told}"


def test_a_process_that_does_not_start_says_why_and_names_its_key(project: Path) -> None:
    (project / "ends.py").write_text("import os; os._exit(7)")
    with pytest.raises(UsageError, match=r"ended \(exit code 7\) when it was started"):
        Player("x", reward="ends:score")
    (project / "hangs.py").write_text("import time\ntime.sleep(1000)\n")
    with pytest.raises(DeadlineError, match=r"after environments\.slow\.setup_s = 0\.5 s"):
        ProcessPool(NamedEnvironment(name="slow", kind="hangs:A", setup_s=0.5))


@pytest.mark.parametrize("wait_s", [0, 600])
def test_a_further_process_that_does_not_start(
    project: Path, start: Start, wait_s: int, caplog: pytest.LogCaptureFixture
) -> None:
    (project / "once.py").write_text(ONCE.replace("SECONDS", str(wait_s)))
    player = start("score", reward="once:score", workers=2)
    for key in "abc":
        player.begin(key, "")
    until(lambda: (project / "starts").read_text() == "xx", "another is started")
    until(lambda: wait_s or "AssertionError" in caplog.text, "it is told")
    player.begin("d", "")
    player.close()
    assert (project / "starts").read_text() == "xx"


def test_an_agents_end_costs_no_other_and_its_sandbox_is_its_own() -> None:
    async def play() -> None:
        outcomes = asyncio.Queue[EpisodeOutcome]()
        own: Any = {"sandbox": "theirs:Box", "timeout_s": seconds(1.0), "workers": 1}
        config = EnvironmentConfig(kind="agent", agent="theirs:agent", **own)
        pool = WorkerPool(config, outcomes.put_nowait, agents=True)
        await pool.start()
        (worker,) = pool._workers
        for wait_s in (600.0, 0.2, 0.2, 0.0):  # the last one's close hangs
            pool.play_agent("a", {"s": wait_s}, "http://h", "")
            if wait_s < 1.0:  # else it is over as soon as it has begun
                assert (await outcomes.get()).value == StepResult(reward=1.0)
            pool.forget("a")
        while worker.calls:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert pool._workers == [worker]
        await pool.close()

    asyncio.run(asyncio.wait_for(play(), limit(60.0)))


def closed() -> str:
    file = Path("closed")
    return file.read_text() if file.exists() else ""


@pytest.mark.parametrize("kind", ["Own", "Waiting"])
def test_environments_are_closed_when_their_samples_are_over(start: Start, kind: str) -> None:
    player = start(kind)
    player.play("a")
    player.pool.forget("a")
    assert "KeyError" in player.play("b", "raise").error
    player.pool.forget("b")
    player.play("c")  # one at a time, the others are closed before; else beside it
    until(lambda: closed() == "ab", closed)
    player.pool.close()
    assert closed() == "abc"


def test_a_close_that_hangs_costs_its_process_and_no_sample(start: Start) -> None:
    player = start("Own", timeout_s=seconds(1.0))
    player.play("slow")
    player.pool.forget("slow")
    assert player.said("next", "1") == "1"
    assert closed() == "slow"


# -- what a process starts, prints and takes -------------------------------------------------------


def started(project: Path) -> list[int]:
    path = project / "pids"
    until(lambda: path.exists() and path.read_text().count("\n") == 3, "nothing was started")
    return [int(line) for line in path.read_text().split()]


@pytest.mark.fault
@pytest.mark.parametrize("how", ["fine", "hang", "die"])
def test_what_a_reward_starts_ends_with_it(project: Path, start: Start, how: str) -> None:
    player = start("score", timeout_s=seconds(2.0))
    player.begin("a", f"start, {how}")
    pids = started(project)
    if how == "fine":
        player.close()
    # Else its process is ended, and the pool goes on.
    until(lambda: not any(map(is_alive, pids)), "they outlive their worker")


OWNER = """
import sys, time
from umbra.services.config import EnvironmentConfig
from umbra.services.environments.pool import ProcessPool

config = EnvironmentConfig(kind="reward", reward=sys.argv[1], workers=1, timeout_s=600.0)
pool = ProcessPool(config)
pool.play("a", {"prompt": "p"}, ["start, hang"])
while not (found := pool.collect()):
    time.sleep(0.01)
print(found[0].value.reward, flush=True)
pool.close()
"""


def owner(project: Path, reward: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", OWNER, reward]
    return subprocess.Popen(command, cwd=project, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.fault
@pytest.mark.parametrize("module", ["theirs", "importing"])
def test_all_ends_with_an_owner_that_is_killed(project: Path, module: str) -> None:
    """Also while the user's module is imported."""
    (project / "importing.py").write_text("import theirs\ntheirs.score(0, 'start, hang', {})\n")
    process = owner(project, f"{module}:score")
    pids = started(project)
    process.kill()
    process.communicate()
    until(lambda: not any(map(is_alive, pids)), "they outlive the process that started the worker")


def test_its_output_has_a_limit(project: Path) -> None:
    out, err = owner(project, "theirs:talkative").communicate(timeout=seconds(60.0))
    assert out == b"1.0\n"
    assert len(err) < 2 * guard.BURST_BYTES
    assert b"more output of an environment than its limit allows" in err


def test_its_memory_is_limited_beyond_what_the_process_has(start: Start) -> None:
    """Python itself has more address space than this limit."""
    player = start("hungry", memory_mb=100)
    for name in ("much", "little"):
        player.begin(name, name)
    outcomes: dict[str, Any] = player.outcomes(2)
    assert outcomes["little"].value.reward == 1.0
    assert "took more than environment.memory_mb = 100; raise it" in outcomes["much"].error
