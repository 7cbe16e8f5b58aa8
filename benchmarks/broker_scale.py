"""A thousand generators against one real buffer, hub and trainer; and what if 30 % of them vanish.

    python benchmarks/broker_scale.py [--json FILE] [--generators 10 100 1000] [--seconds 20]

However many generators there are, they decode 2,000 sequences at once: about 500 trajectories a
second of 200 + 1,000 tokens (long-tailed, at 4 ms a token). They are light clients, many in each of
ten processes (`generator_hosts.py`), with replay engines; each has three connections of its own.
The trainer is real but for its update, which takes no time; every step is pushed to everyone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec
import noted
from click.testing import CliRunner
from generator_hosts import MAX_CONTEXT
from replay_cells import MIXES
from report import Report, percentile_ms

from umbra.proto.messages import Status
from umbra.services.generator.replay_model import ReplayModel
from umbra.services.monitor.client import StatusClient
from umbra.services.process.child import ChildProcess, child_environ, umbra_argv
from umbra.services.process.parent import PARENT_PID_VARIABLE
from umbra.services.trainer.make_model import command as make_model
from umbra.services.weights.arena import remove_leftovers

HERE = Path(__file__).parent
HOSTS = 10
SEQUENCES = 2000
VANISH = 3  # of the hosts
LOST_S = 120.0  # for the trainer to come to all that was acknowledged
WARM_S = 30.0  # the longest sequence takes 26 s
START_S = 120.0
TICKS = os.sysconf("SC_CLK_TCK")
RUN = """
[run]
steps = 1000000
[model]
path = "{folder}/model"
[data]
prompts = "{folder}/prompts.jsonl"
[buffer]
group_size = 8
batch_groups = 128
run_ahead = 6
max_staleness = 1000000
store_max_bytes = 1073741824
[generator]
max_context = {max_context}
[trainer]
device = "cpu"
threads = 1
[checkpoint]
every = 10
"""


@dataclass
class Server:
    """A process whose memory and CPU time are watched."""

    process: ChildProcess

    def cpu_s(self) -> float:
        """CPU seconds so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def rss_mb(self) -> float:
        """Resident memory now, MB."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


class Host:
    """A process of many generators, and the lines that it says."""

    def __init__(self, prefix: str, arguments: Sequence[str], log: Path) -> None:
        argv = [sys.executable, str(HERE / "generator_hosts.py"), *arguments]
        environ = {**os.environ, **noted_in(log.parent), PARENT_PID_VARIABLE: str(os.getpid())}
        with log.open("w") as errors:
            self._popen = subprocess.Popen(
                argv, stdout=subprocess.PIPE, stderr=errors, text=True, env=environ
            )
        self.prefix = prefix
        self.ready = threading.Event()
        self.rows: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def kill(self) -> None:
        """End it as if by a power cut."""
        self._popen.kill()
        self._popen.wait()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            row = json.loads(line)
            if "ready" in row:
                self.ready.set()
            else:
                self.rows.append(row)


class World:
    """Buffer, hub, trainer and hosts in `folder`."""

    def __init__(self, folder: Path, generators: int) -> None:
        self._folder = folder
        self._generators = generators
        self._slots = SEQUENCES // generators
        folder.mkdir(parents=True)
        self._write()
        self.servers: dict[str, Server] = {}
        self.hosts: list[Host] = []
        broker = str(self._start("buffer", umbra_argv("buffer"))["broker"])
        self._start("weight-hub", umbra_argv("weight-hub"), broker)
        timed = (sys.executable, str(HERE / "timed_trainer.py"), "0", "0", "0")
        self._start("trainer", timed, broker)
        self._broker = broker
        self.client = StatusClient(broker)
        self._run_id = self.status().run_id
        for number in range(min(HOSTS, generators)):
            self.host(number)

    def host(self, number: int) -> None:
        """Start a host."""
        hub = self.status().weights
        each = self._generators // min(HOSTS, self._generators)
        prefix = f"host-{number}-{len(self.hosts)}"
        replay = str(self._folder / "replay.json")
        arguments = (self._broker, hub, prefix, str(each), str(self._slots), replay)
        self.hosts.append(Host(prefix, arguments, self._folder / f"{prefix}.log"))

    def ready(self) -> None:
        """Wait until all hosts have joined."""
        for host in self.hosts:
            if not host.ready.wait(START_S):
                raise TimeoutError((self._folder / f"{host.prefix}.log").read_text()[-2000:])

    def status(self) -> Status:
        """What the buffer says of the run."""
        return self.client.status(30.0)

    def lost(self, seconds: float) -> tuple[int, int, int]:
        """Of what the hosts have noted as acknowledged until now, what the trainer never had.

        It is given so many seconds to come to all of it, since others keep generating. Also how
        many were acknowledged, and how many the trainer had more than once.
        """
        acknowledged = noted.read_notes(self._folder).acknowledged
        until = time.monotonic() + seconds
        while True:
            found = noted.read_notes(self._folder)
            left = acknowledged - found.trained.keys()
            if not left or time.monotonic() > until:
                return len(left), len(acknowledged), found.twice
            time.sleep(2.0)

    def close(self) -> None:
        """End everything."""
        for host in self.hosts:
            host.kill()
        with contextlib.suppress(Exception):
            self.client.close()
        for server in self.servers.values():
            server.process.kill()
            while server.process.poll() is None:
                time.sleep(0.02)
        remove_leftovers(self._run_id)

    def _write(self) -> None:
        CliRunner().invoke(make_model, [str(self._folder / "model")], catch_exceptions=False)
        prompts = "".join(json.dumps({"prompt": "1 2", "answer": str(n)}) + "\n" for n in range(99))
        (self._folder / "prompts.jsonl").write_text(prompts)
        (self._folder / "run.toml").write_text(
            RUN.format(folder=self._folder, max_context=MAX_CONTEXT)
        )
        shares = [n / 400 for n in range(401)]
        lengths = [MIXES["long-tailed"](share) for share in shares]
        scale = 1000 / mean(lengths)
        replay = ReplayModel(step_s=4e-3, lengths=[max(1.0, scale * one) for one in lengths])
        (self._folder / "replay.json").write_bytes(msgspec.json.encode(replay))

    def _start(self, name: str, command: Sequence[str], broker: str = "") -> dict[str, Any]:
        run = self._folder / "run"
        argv = [*command, "--config", str(self._folder / "run.toml"), "--run-dir", str(run)]
        argv += ["--name", name, *(["--broker", broker] if broker else [])]
        log = self._folder / f"{name}.log"
        environ = {**child_environ(), **noted_in(self._folder)}
        process = ChildProcess(argv, environ=environ, stdout=log, stderr=log)
        self.servers[name] = Server(process)
        until = time.monotonic() + START_S
        while (facts := process.ready()) is None:
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{name} did not start: {log.read_text()[-2000:]}")
            time.sleep(0.05)
        return facts


def noted_in(folder: Path) -> dict[str, str]:
    """The part of an environment by which clients note what they were told, in `folder`."""
    return {noted.VARIABLE: str(folder)}


@contextlib.contextmanager
def world(generators: int) -> Iterator[World]:
    """A world in a folder of its own, ended afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        made = World(Path(folder) / "world", generators)
        try:
            made.ready()
            yield made
        finally:
            made.close()


def fairness(work: Sequence[int]) -> float:
    """Jain's index: 1 if all have done the same work, 1/n if one has done all."""
    total = sum(work)
    return total**2 / (len(work) * sum(one**2 for one in work)) if total else 0.0


def measure(made: World, seconds: float) -> dict[str, Any]:
    """What happens in so many seconds."""
    before = {host.prefix: len(host.rows) for host in made.hosts}
    begun = {host.prefix: host.rows[-1] for host in made.hosts}
    cpu = {name: server.cpu_s() for name, server in made.servers.items()}
    step, start = made.status().version, time.monotonic()
    time.sleep(seconds)
    waited = time.monotonic() - start
    rows = [row for host in made.hosts for row in host.rows[before[host.prefix] :]]
    ended = {host.prefix: host.rows[-1] for host in made.hosts}
    decoded = [
        now - then
        for name, row in ended.items()
        for now, then in zip(row["decoded"], begun[name]["decoded"], strict=True)
    ]
    accepted = sum(row["answered"] - begun[name]["answered"] for name, row in ended.items())
    elapsed = mean(row["time"] - begun[name]["time"] for name, row in ended.items())
    acks = [one for row in rows for one in row["acks"]]
    grants = [one for row in rows for one in row["grants"]]
    spent = {name: server.cpu_s() - cpu[name] for name, server in made.servers.items()}
    steps = made.status().version - step
    return {
        "per_s": accepted / elapsed,
        "steps_per_s": steps / waited,
        "buffer_us": 1e6 * spent["buffer"] / max(accepted, 1),
        "buffer_core": spent["buffer"] / waited,
        "hub_core": spent["weight-hub"] / waited,
        "ack_p50_ms": percentile_ms(acks, 0.5),
        "ack_p99_ms": percentile_ms(acks, 0.99),
        "lease_p50_ms": percentile_ms(grants, 0.5),
        "lease_p99_ms": percentile_ms(grants, 0.99),
        "fairness": fairness(decoded),
        "buffer_mb": made.servers["buffer"].rss_mb(),
        "hub_mb": made.servers["weight-hub"].rss_mb(),
        "pushes_per_s": sum(row.get("commits", 0) for row in rows) / elapsed,
        "refused": sum(row.get("refused", 0) for row in rows),
    }


def within(seconds: float, condition: Callable[[], bool]) -> float:
    """Seconds until `condition` held; infinite if that is longer than `seconds`."""
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        if condition():
            return time.monotonic() - began
        time.sleep(0.25)
    return float("inf")


def vanish(made: World, report: Report, before: dict[str, Any], seconds: float) -> None:
    """Kill some hosts at once; when are their samples with others, and what does it cost?"""
    gone, made.hosts = made.hosts[:VANISH], made.hosts[VANISH:]
    held = sum(host.rows[-1]["live"] for host in gone)
    names = {host.prefix for host in gone}

    def forgotten() -> bool:
        members = made.status().members
        return not any(one.name.rpartition("-")[0] in names for one in members)

    for host in gone:
        host.kill()
    noticed = within(60.0, forgotten)
    counters = made.status().counters
    time.sleep(WARM_S)  # the longest of what they had takes so long with others
    after = measure(made, seconds)
    share = len(made.hosts) / (len(made.hosts) + VANISH)
    for number in range(VANISH):
        made.host(number)
    made.ready()
    time.sleep(WARM_S)
    again = measure(made, seconds)
    lost, kept, twice = made.lost(LOST_S)
    report.add(
        what=f"{VANISH * 10} % of them killed at once ({held} samples with them)",
        generators=0,
        **after,
    )
    report.add(what="as many others have joined", generators=0, **again)
    report.facts |= {
        "given_up_s": noticed, "held": held, "taken_back": counters.get("taken_back", 0),
        "acknowledged": kept, "lost": lost, "twice": twice,
        "rate_of_the_others": after["per_s"] / (share * before["per_s"]),
        "rate_again": again["per_s"] / before["per_s"],
    }  # fmt: skip


def summarise(report: Report) -> None:
    """The table, and the goals: those of the most generators, and what the killed ones cost."""
    table = [
        [
            row["what"],
            row["per_s"],
            f"{row['buffer_us']:.0f} / {row['buffer_core']:.0%}",
            f"{row['hub_core']:.0%}",
            f"{row['ack_p50_ms']:.1f} / {row['ack_p99_ms']:.0f}",
            f"{row['lease_p50_ms']:.1f} / {row['lease_p99_ms']:.0f}",
            f"{row['fairness']:.3f}",
            f"{row['buffer_mb']:.0f} / {row['hub_mb']:.0f}",
            row["pushes_per_s"],
        ]
        for row in report.rows
    ]
    columns = ["", "trajectories/s", "buffer: us each / of a core", "hub: of a core"]
    columns += ["submit to ack ms p50 / p99", "lease ms p50 / p99", "fairness"]
    report.table("world", [*columns, "memory MB, buffer / hub", "pushes/s"], table)
    whole = [row for row in report.rows if row["generators"]]
    most = max(whole, key=lambda row: row["generators"])
    least = min(whole, key=lambda row: row["generators"])
    name = f"{most['generators']:,} generators"
    report.figure("buffer_core", most["buffer_core"])
    report.figure("buffer_us", most["buffer_us"])
    report.figure("ack_p99_ms", most["ack_p99_ms"])
    report.goal("answers refused while nobody is killed", sum(r["refused"] for r in whole), "<=", 0)
    if (facts := report.facts).get("held"):
        back = facts["taken_back"] / facts["held"]
        report.goal("s until the killed are given up (15 s silent)", facts["given_up_s"], "<=", 25)
        report.goal("of their samples with others, by the buffer's word", back, ">=", 0.9)
        report.goal("rate of the others, of their share", facts["rate_of_the_others"], ">=", 0.95)
        report.goal("rate once as many have joined, of before", facts["rate_again"], ">=", 0.95)
        report.goal("acknowledged samples that the trainer never had", facts["lost"], "<=", 0)
        report.goal("samples that the trainer had twice", facts["twice"], "<=", 0)
        report.figure("acknowledged", facts["acknowledged"])
    report.goal(f"p99 ms of an acknowledgement, {name}", most["ack_p99_ms"], "<", 100)
    report.goal(f"fairness, {name}", most["fairness"], ">=", 0.9)
    report.goal(f"MB of the buffer, {name}", most["buffer_mb"], "<", 512)
    if most is not least:
        ratio = most["per_s"] / least["per_s"]
        report.goal(f"rate at {name} over that at {least['generators']}", ratio, ">=", 0.95)


def main() -> int:
    """All sizes; 0 if every goal is met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--generators", nargs="+", type=int, default=[10, 100, 1000])
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--quick", action="store_true", help="200 generators, nothing vanishes")
    args = parser.parse_args()
    if args.quick:
        args.generators, args.seconds = [200], 5.0
    report = Report("broker_scale")
    found: dict[int, dict[str, Any]] = {}
    for count in args.generators:
        with world(count) as made:
            time.sleep(WARM_S)
            found[count] = measure(made, args.seconds)
            report.add(what=f"{count:,} generators", generators=count, **found[count])
            if count == max(args.generators) and not args.quick:
                vanish(made, report, found[count], args.seconds)
    report.restate(summarise)
    return 0 if report.show(args.json) else 1


if __name__ == "__main__":
    sys.exit(main())
