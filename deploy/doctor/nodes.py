"""Between the nodes of a plan: the ports that one must reach on others, their clocks and versions.

`umbra doctor --listen` on each node stands in for the processes that the plan puts there: it binds
their ports and tells everyone who connects its time and versions in one line of JSON.
"""

from __future__ import annotations

import errno
import selectors
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from umbra.deploy.doctor.diagnosis import Diagnosis, Result, unmade
from umbra.deploy.doctor.judge import SKEW_S
from umbra.proto.bounds import one_line
from umbra.proto.errors import UsageError

CONNECT_S = 3.0
GREETING_S = 3.0
RETRY_S = 0.5
GREETING_BYTES = 4096
ANY_PORT = 0  # a port that the other node has chosen, as gloo and NCCL do
# Whose ports a node connects to, by what it runs itself; the buffer's are for all.
REACHED_BY: dict[str, frozenset[str]] = {
    "weight_hub": frozenset({"relay", "part", "train"}),
    "part": frozenset({"relay", "generate", "logp"}),
    "train": frozenset({"train"}),
}
BUFFER_PORTS = 3  # control, data, events in; the fourth is for monitors
# What must be the same everywhere, and what should be.
SAME, ALIKE = ("umbra-rl",), ("torch", "transformers", "vllm", "pyzmq")
NCCL = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")

How = Literal["connected", "refused", "no route", "timed out", "name not resolved"]
Word = Annotated[str, Meta(max_length=200)]


class Greeting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a listener tells of its node."""

    umbra_doctor: int
    node: Word
    time: float  # seconds since the epoch
    versions: Annotated[dict[Word, Word], Meta(max_length=64)]
    any_port: int = ANY_PORT


@dataclass(frozen=True, slots=True)
class Target:
    """A port on another node; `what` listens there."""

    node: str
    address: str
    port: int
    what: str


@dataclass(frozen=True, slots=True)
class Reached:
    """What came of connecting to a target.

    Attributes:
        offset_s: the other clock less ours; `error_s` is how far that may be off.
        greeting: None where no `umbra doctor --listen` answered.
    """

    how: How | str
    greeting: Greeting | None = None
    offset_s: float = 0.0
    error_s: float = 0.0


def own_node(plan: Mapping[str, Any], named: str, host: str) -> Mapping[str, Any]:
    """The node of `plan` that this machine, called `host`, is; or the one that is `named`.

    Raises:
        UsageError: it is none of them.
    """
    nodes = plan["nodes"]
    short = host.partition(".")[0]
    for node in nodes:
        if node["name"] == named or (not named and node["name"] in (host, short)):
            return node
    if not named:
        for node in nodes:
            with suppress(OSError), socket.socket() as here:
                here.bind((node["address"], 0))  # works for addresses of this machine alone
                return node
    known = ", ".join(node["name"] for node in nodes)
    raise UsageError(
        f"--node: {named or f'this machine, {host},'} is no node of the plan: name one of {known}"
    )


def targets(plan: Mapping[str, Any], here: str) -> list[Target]:
    """What the node called `here` must reach on the others, as the processes are placed."""
    (own,) = (node for node in plan["nodes"] if node["name"] == here)
    tasks = {process["task"] for process in own["processes"]}
    found: list[Target] = []
    for node in plan["nodes"]:
        if node["name"] == here or not tasks:
            continue
        for process in node["processes"]:
            task, ports = process["task"], process["ports"]
            if task == "buffer":
                ports = ports[:BUFFER_PORTS]
            elif not REACHED_BY.get(task, frozenset()) & tasks:
                continue
            name = process["name"]
            found += [Target(node["name"], node["address"], port, name) for port in ports]
        if "train" in tasks and any(one["task"] == "train" for one in node["processes"]):
            found.append(Target(node["name"], node["address"], ANY_PORT, "ranks (gloo, NCCL)"))
    return found


def connect(address: str, port: int) -> Reached:
    """Connect once, and hear whether a listener of ours is there; takes a few seconds at most."""
    begin = time.time()
    try:
        with socket.create_connection((address, port), timeout=CONNECT_S) as link:
            link.settimeout(GREETING_S)
            data = b""
            with suppress(OSError):
                while b"\n" not in data and len(data) < GREETING_BYTES:
                    if not (more := link.recv(GREETING_BYTES)):
                        break
                    data += more
            end = time.time()
    except socket.gaierror:
        return Reached("name not resolved")
    except TimeoutError:
        return Reached("timed out")
    except ConnectionRefusedError:
        return Reached("refused")
    except OSError as error:
        unreachable = error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH)
        return Reached("no route" if unreachable else str(error.strerror))
    try:
        greeting = msgspec.json.decode(data, type=Greeting)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Reached("connected")
    return Reached("connected", greeting, greeting.time - (begin + end) / 2, (end - begin) / 2)


def reach(target: Target, until: float, any_port: Mapping[str, int]) -> Reached:
    """Connect to `target`, again until `until` (monotonic) if nobody listens there yet."""
    while True:
        port = target.port or any_port.get(target.node, ANY_PORT)
        found = connect(target.address, port) if port else Reached("")
        if found.how == "connected" or time.monotonic() >= until:
            return found
        time.sleep(RETRY_S)


def judge_reach(target: Target, found: Reached, here: str) -> Diagnosis:
    """What `found` means, and what to do."""
    where = f"{target.address}:{target.port}" if target.port else f"{target.address}, any port"
    check = f"{here} to {target.node}"
    if found.how == "":
        return unmade(check, f"{where}: no `umbra doctor --listen` has told of one")
    if found.how == "connected":
        return Diagnosis(check, "ok", f"{where} ({target.what})")
    remedies = {
        "refused": f"start `umbra doctor --plan ... --listen` on {target.node} meanwhile, or the "
        "run; if it is there, a firewall rejects: open the port, and publish it if it is a "
        "container's",
        "no route": f"correct the address of {target.node} in the cluster file, or the route to it",
        "timed out": f"something drops the packets: open the port on {target.node} for {here} in "
        "firewalls and security groups, or correct its address in the cluster file",
        "name not resolved": f"write the address of {target.node} as a number in the cluster file, "
        "or put the name into DNS or /etc/hosts here",
    }
    remedy = remedies.get(found.how, f"see that {target.node} can be reached from {here}")
    return Diagnosis(check, "problem", f"{where} ({target.what}): {found.how}", remedy)


def judge_clocks(here: str, found: Mapping[str, Reached]) -> list[Diagnosis]:
    """How far the clocks of the nodes are from this one's; `found` has one answer of each."""
    findings: list[Diagnosis] = []
    for node, one in found.items():
        check = f"clock of {node}"
        if one.greeting is None:
            why = "no `umbra doctor --listen` there; `umbra monitor` shows it once the run is up"
            findings.append(unmade(check, why))
            continue
        fact = f"{one.offset_s:+.3f} s from that of {here}, to {one.error_s:.3f} s"
        off = abs(one.offset_s) - one.error_s > SKEW_S
        remedy = f"set the clocks of {here} and {node} by NTP (chrony)" if off else ""
        findings.append(Diagnosis(check, "warning" if off else "ok", fact, remedy))
    return findings


def judge_versions(
    here: str, own: Mapping[str, str], others: Mapping[str, Mapping[str, str]], ranks: Sequence[str]
) -> list[Diagnosis]:
    """Whether what is installed is the same on all nodes; NCCL's on those with `ranks`."""
    findings: list[Diagnosis] = []
    for node, theirs in others.items():
        both = here in ranks and node in ranks
        for name in (*SAME, *NCCL, *ALIKE):
            ours, other = own.get(name), theirs.get(name)
            if ours == other or (None in (ours, other) and name not in SAME):
                continue
            needed = name in SAME or (name in NCCL and both)
            result: Result = "problem" if needed else "warning"
            fact = f"{name} {ours or 'missing'} on {here}, {other or 'missing'} on {node}"
            remedy = f"pip install {name}=={max(ours or '', other or '')} on both nodes"
            findings.append(Diagnosis("versions", result, one_line(fact), one_line(remedy)))
    if not findings and others:
        findings.append(Diagnosis("versions", "ok", f"the same on {', '.join([here, *others])}"))
    return findings


@dataclass
class Listener:
    """Binds the ports of a node's processes and greets whoever connects; a context manager.

    Args:
        ports: those that cannot be bound are in `taken`, with the reason.
        any_port: whether to bind one more, which the system chooses.
    """

    node: str
    versions: Mapping[str, str]
    ports: Sequence[int]
    any_port: bool
    taken: dict[int, str] = field(default_factory=dict[int, str])

    def __enter__(self) -> Listener:
        self._ending, self._selector, self._chosen = False, selectors.DefaultSelector(), ANY_PORT
        for port in [*self.ports, *([ANY_PORT] if self.any_port else [])]:
            try:
                listening = socket.create_server(("", port))
            except OSError as error:
                self.taken[port] = f"port {port}: {error.strerror}"
                continue
            listening.setblocking(False)
            self._chosen = self._chosen if port else int(listening.getsockname()[1])
            self._selector.register(listening, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._greet, name="umbra-doctor", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_raised: object) -> None:
        self._ending = True
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # pyright: ignore[reportAttributeAccessIssue]
        self._selector.close()

    def _greet(self) -> None:
        while not self._ending:
            for key, _ in self._selector.select(0.1):
                with suppress(OSError):
                    link, _ = key.fileobj.accept()  # pyright: ignore[reportAttributeAccessIssue]
                    with link:
                        said = Greeting(
                            1, self.node, time.time(), dict(self.versions), self._chosen
                        )
                        link.setblocking(False)
                        link.send(msgspec.json.encode(said) + b"\n")
