"""A run that trains while the holder of every key, and strangers, attack it.

    python benchmarks/hostile.py [--minutes 10] [--quick] [--dir DIR] [--seed 0] [--json FILE]

`umbra up` with keys trains the sorting demo. Meanwhile the deeds of `hostile_deeds.py` are done one
after the other, again and again: each message of the protocol with each key, in frames that cost as
much as the schema allows, and contents, connections and floods that an attacker would think of. A
client with the monitor's key asks buffer and hub all the time and notes how long it waits. In the
end the attackers go, the run is drained and gone on with to its last step, and every sample that
its generator was told is kept is looked for in what its trainer has noted (`noted.py`).

What a key may do by right is not done with it: no order of an operator, no layout or end of the run
by the trainer's key. There is no HTTP server in this run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import zmq
from chaos_audit import audit, rows
from chaos_run import DemoRun, free_port, make_task
from fakes.hostile_peer import HostilePeer, begin_peak, memory
from hostile_deeds import STRANGER, Deed, Done, Ground, deeds, find_targets
from report import Report

from umbra.deploy.toml import to_toml
from umbra.proto.access import KEY_ROLES, may_send
from umbra.proto.deadline import Deadline
from umbra.proto.messages import TYPES, Join, Ping, StatusRequest
from umbra.proto.net.keys import Security, load_keys, make_keys
from umbra.services.buffer.samples.pool import REMEMBERED
from umbra.services.config.loader import as_dict, load_config

DEMO = Path(__file__).resolve().parents[1] / "examples" / "sort.toml"
ENDLESS = 100_000  # steps: it is gone on with to fewer in the end
LAST_STEPS = 3  # that it makes when the attackers are gone
ASKED_S = 0.02  # between two questions of the client that is legitimate
SETTLE_S = 90.0  # after the attackers: senders are forgotten after 60 s, then memory is trimmed
END_S = 300.0
MIB = 1 << 20
SETTINGS = ("buffer.heartbeat_s=0.5", "checkpoint.every=10")


@dataclass
class Tally:
    """What one deed came to over all of its repetitions."""

    done: Done = field(default_factory=Done)
    before: int = 0  # bytes that the service held at first
    peak: int = 0
    after: int = 0
    wait_s: float = 0.0  # the longest of the legitimate client meanwhile


def ask(pipe: Connection, keys: Path, broker: str, hub: str) -> None:
    """The legitimate client, a process of its own: says how long it has waited, when asked."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    buffer = HostilePeer(context, keys, "monitor", broker, "buffer", "honest", wait_s=120.0)
    weights = HostilePeer(context, keys, "monitor", hub, "weight_hub", "honest", wait_s=120.0)
    buffer.call(Join(role="monitor", name="honest", pid=1, host="h", package_version="0"))
    longest = {"buffer": 0.0, "weight_hub": 0.0}
    asked = 0
    while True:
        for server, peer, body in (
            ("buffer", buffer, StatusRequest()),
            ("weight_hub", weights, Ping()),
        ):
            began = time.monotonic()
            peer.call(body)
            longest[server] = max(longest[server], time.monotonic() - began)
            asked += 1
        if pipe.poll(ASKED_S):
            if pipe.recv() == "end":
                break
            pipe.send((longest, asked))
            longest = dict.fromkeys(longest, 0.0)
    context.destroy(linger=0)


class Attack:
    """Does deeds to a run for a while, and keeps the tally."""

    def __init__(self, run: DemoRun, ground: Ground, chance: random.Random) -> None:
        self.tallies: dict[Deed, Tally] = {}
        self.waits: Counter[str] = Counter()
        self.asked = 0
        self.unanswered = 0
        self._run = run
        self._ground = ground
        self._chance = chance

    def go_on(self, seconds: float) -> None:
        """Attack: contents, strangers and floods first, then the schema in any order, and again."""
        pipe, theirs = multiprocessing.Pipe()
        targets = self._ground.targets
        where = (targets["buffer"].endpoints["control"], targets["weight_hub"].endpoints["weights"])
        honest = multiprocessing.get_context("spawn").Process(
            target=ask, args=(theirs, self._ground.keys, *where), daemon=True
        )
        honest.start()
        theirs.close()  # if it ends, its end of the pipe is closed
        self._heard(pipe)  # it is at work
        self.waits.clear()
        until = time.monotonic() + seconds
        schema = [deed for deed in deeds() if deed.what in TYPES]
        others = [deed for deed in deeds() if deed.what not in TYPES]
        for deed in others:  # once at any rate
            self._do(deed, pipe)
        while time.monotonic() < until:
            self._chance.shuffle(schema)
            for deed in [*schema, *others]:
                if time.monotonic() > until:
                    break
                self._do(deed, pipe)
        pipe.send("end")
        honest.join(30.0)

    def _do(self, deed: Deed, pipe: Connection) -> None:
        tally = self.tallies.setdefault(deed, Tally())
        pid = self._ground.targets[deed.server].pid
        before = begin_peak(pid)
        try:
            done = deed.run(self._ground)
        except AssertionError:  # no answer
            self._ground.forget()
            self.unanswered += 1
            return
        peak = max(memory(pid, "VmHWM"), memory(pid, "VmRSS"))
        tally.before = tally.before or before
        tally.peak = max(tally.peak, peak)
        tally.after = memory(pid, "VmRSS")
        tally.done.frames += done.frames
        tally.done.sent_bytes += done.sent_bytes
        tally.done.answers += done.answers
        tally.done.beyond = max(tally.done.beyond, done.beyond)
        tally.wait_s = max(tally.wait_s, self._heard(pipe)[deed.server])

    def _heard(self, pipe: Connection) -> dict[str, float]:
        pipe.send("how long?")
        longest, self.asked = pipe.recv()
        for server, seconds in longest.items():
            self.waits[server] = max(self.waits[server], seconds)
        return longest


def attacked_run(home: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One run from its start to its end, attacked meanwhile; the rows of the report."""
    folder, keys = home / "run", home / "run" / "keys"
    folder.mkdir()
    make_keys(keys)
    (folder / "sort").symlink_to(home / "sort")
    settings = (
        *SETTINGS,
        f"run.steps={ENDLESS}",
        f"run.dir={folder / 'runs'}",
        f"security.keys={keys}",
        f"run.seed={options.seed}",
    )
    config = as_dict(load_config(str(DEMO), overrides=settings))
    (folder / "run.toml").write_text(to_toml(config), encoding="utf-8")
    most, many = (256 << 10, 200) if options.quick else (2 << 20, 1000)
    security = Security(load_keys(keys, "operator"))
    with closing(DemoRun(folder, f"tcp://127.0.0.1:{free_port()}", None, security)) as run:
        run.start()
        # A buffer remembers what became of so many samples: 25 to 35 MiB that no attacker costs it.
        batch = config["buffer"]["group_size"] * config["buffer"]["batch_groups"]
        settled = 2 if options.quick else 2 * REMEMBERED // batch
        version, began_at = await_version(run, settled), time.time()
        targets = find_targets(run.broker, keys, run.pids())
        pids = {server: target.pid for server, target in targets.items()}
        levels = {server: memory(pid, "VmRSS") for server, pid in pids.items()}
        say(f"attack, for {options.minutes:g} minutes")
        with closing(Ground(keys, home, targets, most=most, many=many)) as ground:
            attack = Attack(run, ground, random.Random(options.seed))
            attack.go_on(60 * options.minutes)
        attacked, ended_at = now_at(run), time.time()
        say(f"{attacked - version} steps meanwhile; the attackers are gone")
        time.sleep(SETTLE_S)
        later = {server: memory(pid, "VmRSS") for server, pid in pids.items()}
        alive = sum(pid in run.pids().values() for pid in pids.values())
        status = run.look()
        last = await_version(run, attacked + 1) + LAST_STEPS
        run.drain("")
        drained = run.await_code(END_S)
        run.await_end(of_all=True)
        say(f"drained ({drained}); to step {last}")
        run.start("--set", f"run.steps={max(last, now_trained(run) + LAST_STEPS)}")
        code = run.await_code(END_S)
        run.await_end(of_all=True)
        if code:
            print(run.said(), file=sys.stderr)
        found = audit(run.folder, run.notes)
        pause = longest_pause(run.folder, began_at, ended_at)
        ledger = json.loads((run.folder / "buffer.json").read_text(encoding="utf-8"))["ledger"]
    counted = {} if status is None else {**status.counters, **status.refused}
    made = [row_of(deed, tally) for deed, tally in attack.tallies.items()]
    balance = ledger["issued"] - ledger["trained"] - sum(ledger["ended"].values())
    made.append(
        {
            "row": "run",
            "seconds": 60 * options.minutes,
            "many": many,
            "steps_meanwhile": attacked - version,
            "longest_pause_s": pause,
            "services_ended": len(pids) - alive,
            "exit_code": code,
            "unanswered": attack.unanswered,
            "waits": dict(attack.waits),
            "asked": attack.asked,
            "levels": {one: [levels[one], later[one]] for one in levels},
            "acknowledged": found.acknowledged,
            "trained": found.trained,
            "lost": found.lost,
            "twice": found.twice,
            "out_of_balance": balance - sum(ledger["in_flight"].values()),
            "counters": {name: count for name, count in counted.items() if count},
        }
    )
    return made


def longest_pause(folder: Path, begin: float, end: float) -> float:
    """Seconds between two steps, at most, of those in a time; `begin` and `end` count as steps."""
    times = [row["time"] for row in rows(folder, "step") if begin < row["time"] < end]
    return max(later - sooner for sooner, later in pairwise([begin, *times, end]))


def row_of(deed: Deed, tally: Tally) -> dict[str, Any]:
    """A deed as a row."""
    return {
        "row": "deed",
        "role": deed.role,
        "what": deed.what,
        "server": deed.server,
        "frames": tally.done.frames,
        "bytes": tally.done.sent_bytes,
        "answers": dict(tally.done.answers),
        "beyond": tally.done.beyond,
        "memory": [tally.before, tally.peak, tally.after],
        "wait_s": tally.wait_s,
    }


def await_version(run: DemoRun, version: int) -> int:
    """Wait until so many steps are trained; how many are."""
    deadline = Deadline(END_S)
    while (at := now_at(run)) < version:
        if run.poll() is not None or deadline.passed:
            raise SystemExit(f"the run trains no more: {run.said()} (see {run.home / 'up.log'})")
        time.sleep(0.2)
    return at


def now_at(run: DemoRun) -> int:
    """Steps that are trained; 0 while the buffer does not answer."""
    status = run.look()
    return 0 if status is None else status.version


def now_trained(run: DemoRun) -> int:
    """The same of a run that has ended."""
    content = json.loads((run.folder / "buffer.json").read_text(encoding="utf-8"))
    return int(content["version"])


def carried_out(row: dict[str, Any]) -> int:
    """Messages that were answered by anything but a refusal, though the key does not allow them."""
    if row["role"] == STRANGER:
        return row["answers"].get("let in", 0)
    role, kind = row["role"], TYPES.get(row["what"])
    if kind is None or role not in KEY_ROLES or may_send(role, kind):
        return 0
    return sum(count for name, count in row["answers"].items() if name in TYPES)


def summarise(report: Report) -> None:
    """State what the attackers came to; a row is a deed, the last one the run."""
    (run,) = (row for row in report.rows if row["row"] == "run")
    done = [row for row in report.rows if row["row"] == "deed"]
    single = [row for row in done if row["what"] in TYPES]
    report.table(
        "deeds",
        ["key", "what", "frames", "MiB sent", "answers", "MiB before, at most, after", "wait ms"],
        [_line(row) for row in done if row not in single],
    )
    keys = dict.fromkeys((row["role"], row["server"]) for row in single)
    merged = [[row for row in single if (row["role"], row["server"]) == key] for key in keys]
    report.table(
        "schema",
        ["key", "what", "frames", "MiB sent", "answers", "MiB before, at most, after", "wait ms"],
        [_line(_merged(rows)) for rows in merged],
    )
    report.figure("frames", sum(row["frames"] for row in done))
    report.figure("sent_mib", sum(row["bytes"] for row in done) / MIB)
    report.figure("deeds", len(done))
    report.figure("pairs", len(single))
    for name in ("seconds", "steps_meanwhile", "asked", "acknowledged", "trained"):
        report.figure(name, run[name])
    report.figure("refused", sum(_refused(row) for row in done))
    held = next(row for row in done if row["what"] == "connections" and row["role"] != STRANGER)
    report.figure("connections", run["many"])
    report.figure("connection_kib", (held["memory"][1] - held["memory"][0]) / 1024 / run["many"])
    report.goal("services that ended", run["services_ended"], "<=", 0)
    report.goal("exit code of the run", run["exit_code"], "<=", 0)
    report.goal("steps trained meanwhile", run["steps_meanwhile"], ">=", 1)
    report.goal("longest time without a step, s", round(run["longest_pause_s"], 1), "<", 10.0)
    report.goal("acknowledged samples lost", run["lost"], "<=", 0)
    report.goal("samples trained twice", run["twice"], "<=", 0)
    report.goal("samples that the ledger lacks", abs(run["out_of_balance"]), "<=", 0)
    report.goal("messages carried out without the key", sum(map(carried_out, done)), "<=", 0)
    poisoned = sum(row["answers"].get("SubmitAck", 0) for row in done if row not in single)
    report.goal("poisoned samples accepted", poisoned, "<=", 0)
    report.goal("deeds that were not answered", run["unanswered"], "<=", 0)
    for server, seconds in run["waits"].items():
        report.goal(f"longest wait at the {server}, s", round(seconds, 3), "<", 1.0)
    beyond = max((row["beyond"] for row in single), default=0)
    report.goal("MiB that a frame took beyond 4 times its size", beyond / MIB, "<=", 16)
    for server, (before, after) in run["levels"].items():
        report.goal(f"MiB more in the {server} afterwards", (after - before) / MIB, "<=", 32)


def _refused(row: dict[str, Any]) -> int:
    return sum(count for name, count in row["answers"].items() if name not in TYPES)


def _merged(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """All messages of one key to one service."""
    answers: Counter[str] = Counter()
    for row in rows:
        answers.update(row["answers"])
    return {
        **rows[0],
        "what": f"each message to the {rows[0]['server']}",
        "answers": dict(answers),
        "frames": sum(row["frames"] for row in rows),
        "bytes": sum(row["bytes"] for row in rows),
        "memory": [
            rows[0]["memory"][0],
            max(row["memory"][1] for row in rows),
            rows[-1]["memory"][2],
        ],
        "wait_s": max(row["wait_s"] for row in rows),
    }


def _line(row: dict[str, Any]) -> list[Any]:
    answers = sorted(row["answers"].items(), key=lambda item: -item[1])
    said = ", ".join(f"{name} {count}" for name, count in answers[:6])
    levels = " / ".join(f"{level / MIB:.0f}" for level in row["memory"])
    return [
        row["role"],
        row["what"],
        row["frames"],
        row["bytes"] / MIB,
        said or "-",
        levels,
        1e3 * row["wait_s"],
    ]


def say(line: str) -> None:
    """Tell what goes on."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def main() -> int:
    """The attack; 0 if all goals are met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, help="to attack; 10, or 0.5 with --quick")
    parser.add_argument("--quick", action="store_true", help="smaller frames and fewer connections")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, help="make the run here and leave it")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.minutes is None:
        options.minutes = 0.5 if options.quick else 10.0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # with all that was started
    with tempfile.TemporaryDirectory() as scratch:
        home = (options.dir or Path(scratch)).resolve()
        home.mkdir(parents=True, exist_ok=True)
        say("task, model and warm start")
        make_task(home, 30 if options.quick else 350)
        report = Report("hostile", rows=attacked_run(home, options))
        report.restate(summarise)
        return 0 if report.show(options.json) else 1


if __name__ == "__main__":
    sys.exit(main())
