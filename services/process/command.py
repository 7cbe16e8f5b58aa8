"""The frame of every service's command: signals, configuration, logging, exit codes.

At the first SIGINT, SIGTERM or SIGHUP a process drains, at the second it ends at once. SIGHUP is
SIGTERM, but comes several times when a terminal is closed, so only the first counts; one that is
ignored (nohup) stays so.
"""

from __future__ import annotations

import _thread
import json
import logging
import os
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIG_IGN
from types import FrameType
from typing import Any, cast, get_type_hints

import click

from umbra.proto.errors import named_errors
from umbra.proto.messages import Role
from umbra.proto.net.keys import OPEN, Security, open_security
from umbra.proto.net.session import Session
from umbra.proto.sockets import advertise, check_address
from umbra.services.config import LogConfig, RunConfig, RunSection
from umbra.services.config.loader import load_config
from umbra.services.process.files import explained
from umbra.services.process.host import versions_line
from umbra.services.process.metrics import MetricsFile
from umbra.services.process.parent import is_supervised, tell_ready

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def _handled(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Call `handle` at these signals; handlers are restored after. Only for the main thread."""
    numbers = [n for n in HANDLED if n != signal.SIGHUP or signal.getsignal(n) != SIG_IGN]
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def stop_on_signals(stopping: threading.Event) -> Iterator[None]:
    """Set `stopping` at the first signal; at the second, die of it.

    Only signals count: one that comes while `stopping` is set for another reason is the first. A
    supervised process drains whatever comes: its supervisor kills when it means to, and the kernel
    may tell of its death several times, once for each of its threads.
    """
    signalled = False

    def handle(number: int, _frame: FrameType | None) -> None:
        nonlocal signalled
        if not signalled:
            signalled = True
            # In a thread: the handler may have interrupted the main thread within a method of this
            # very event, whose lock it holds; to set it here would then wait for ever.
            _thread.start_new_thread(stopping.set, ())
        elif not is_supervised() and number != signal.SIGHUP:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    with _handled(handle):
        yield


class SignalCounter(ExitStack):
    """A counter of signals until its block ends, for a supervisor: the second can mean more.

    Handlers only count, and wake through a pipe: setting a `threading.Event` in one can wait for a
    lock that the interrupted code holds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.number = 0  # the first signal's
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        for fd in (self._read_fd, self._write_fd):
            self.callback(os.close, fd)
        self.enter_context(_handled(self._handle))

    @property
    def exit_code(self) -> int:
        return 128 + self.number

    def wait(self, seconds: float) -> None:
        """Sleep, but not through a signal."""
        if select.select([self._read_fd], [], [], seconds)[0]:
            os.read(self._read_fd, 64)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP and self.count:
            return
        self.number = self.number or (signal.SIGTERM if number == signal.SIGHUP else number)
        self.count += 1
        with suppress(BlockingIOError):  # full: it is awake
            os.write(self._write_fd, b"!")


class LineFormatter(logging.Formatter):
    """`12:34:56.789 service level message`, or one JSON object per record."""

    def __init__(self, service: str, *, as_json: bool) -> None:
        super().__init__()
        self._service = service
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        level, message = record.levelname.lower(), record.getMessage()
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        if not self._as_json:
            clock = time.strftime("%H:%M:%S", time.localtime(record.created))
            line = f"{clock}.{record.msecs:03.0f} {self._service} {level} {message}"
            return f"{line}\n{trace}" if trace else line
        row = {"time": record.created, "level": level, "service": self._service}
        row |= {"logger": record.name, "message": message}
        return json.dumps({**row, "exception": trace} if trace else row)


def setup_logging(config: LogConfig, service: str) -> None:
    """Send all of this process's logging to standard error as `config` says."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(service, as_json=config.format == "json"))
    logging.basicConfig(level=config.level.upper(), handlers=[handler], force=True)
    if config.level == "info":  # a line for each request of the hub's client is for debugging
        for client in ("httpx", "httpx2"):
            logging.getLogger(client).setLevel(logging.WARNING)


OPEN_FILES = 65_536
STANDALONE: tuple[Role, ...] = ("relay", "part")  # may run without a buffer


@dataclass(frozen=True)
class ServiceContext:
    config: RunConfig
    role: Role
    name: str
    run_dir: Path | None
    stopping: threading.Event
    log: logging.Logger
    metrics: MetricsFile
    security: Security = OPEN
    options: Mapping[str, Any] = field(default_factory=dict)  # of this command alone

    def join(self, **facts: Any) -> Session:
        """Join the run, with `facts` of `Session`."""
        return Session(
            role=self.role,
            name=self.name,
            broker=self.config.run.broker,
            stopping=self.stopping,
            grace_s=self.config.run.broker_grace_s,
            metrics=self.metrics,
            security=self.security,
            **facts,
        )

    def begin(self, *facts: str) -> None:
        """Log where and by what this process computes, and its versions: its first line."""
        self.log.info("%s; %s", ", ".join(facts), versions_line())

    def ready(self, facts: dict[str, Any]) -> None:
        """Tell whoever started this process that it is up, and where (one JSON line)."""
        self.log.info("ready: %s", ", ".join(f"{key} {value}" for key, value in facts.items()))
        tell_ready(facts)


KEYS: dict[str, Any] = {
    "metavar": "FOLDER",
    "help": "Keys of the run, from `umbra keys` (security.keys).",
}


# Flags of every service, by the key of the configuration that each sets.
FLAGS: dict[str, click.Option] = {
    "run.broker": click.Option(
        ["--broker"],
        envvar="UMBRA_BROKER",
        help=f"Address of the buffer.  [default: {RunSection().broker}]",
    ),
    "run.advertise": click.Option(["--advertise"], help="Host by which others reach this process."),
    "security.keys": click.Option(["--keys"], **KEYS),
}


def service_command(
    section: str,
    run: Callable[[ServiceContext], int],
    *,
    load: Callable[..., RunConfig] = load_config,
    options: Sequence[click.Option] = (),
    identify: Callable[[Mapping[str, Any]], tuple[Role, str]] | None = None,
) -> click.Command:
    """Return the command of a service; `load` reads run file, environment and --set.

    What `options` say differs from process to process and is no part of the configuration; `run`
    finds it in its context. `identify` returns the role and the default name of a process with
    these options, where they decide that.
    """
    service = section.replace("_", "-")

    def invoke(**values: Any) -> None:
        own = {option.name: values[option.name] for option in options if option.name}
        given = ((key, values[flag.name or ""]) for key, flag in FLAGS.items())
        flags = [f"{key}={value}" for key, value in given if value is not None]
        config: RunConfig = load(values["config"], overrides=[*values["set"], *flags])
        role, name = identify(own) if identify is not None else (cast(Role, section), service)
        name, run_dir = values["name"] or name, cast(Path | None, values["run_dir"])
        setup_logging(config.log, name)
        advertise(config.run.advertise)
        allow_connections()
        if role != "buffer" and (config.run.broker_given or role not in STANDALONE):
            check_address(config.run.broker, "--broker")
        keys, insecure = config.security.keys, config.security.insecure
        security = open_security(keys, [role], run_dir, insecure=insecure)
        if run_dir is not None:
            remedy = "name a folder that this user may write to"
            with explained(f"--run-dir {run_dir} cannot be made", remedy):
                run_dir.mkdir(parents=True, exist_ok=True)
        stopping, log = threading.Event(), logging.getLogger(f"umbra.{name}")
        metrics = MetricsFile(run_dir / "metrics.jsonl" if run_dir else None, name)
        context = ServiceContext(config, role, name, run_dir, stopping, log, metrics, security, own)
        with closing(metrics), stop_on_signals(stopping), named_errors(name):
            code = run(context)
        raise SystemExit(code)

    params: list[click.Parameter] = [
        click.Option(["--config"], type=str, help="Run file (TOML, or the resolved JSON)."),
        click.Option(["--set"], multiple=True, metavar="SECTION.KEY=VALUE", help="Set a key."),
        *FLAGS.values(),
        click.Option(["--name"], help="Name in the run.  [default: " + service + "]"),
        click.Option(["--run-dir"], type=click.Path(path_type=Path), help="Folder for results."),
        *options,
    ]
    summary = f"{get_type_hints(RunConfig)[section].__doc__}  Its keys are in docs/config.md."
    return click.Command(service, params=params, callback=invoke, help=summary)


def allow_connections() -> None:
    """Raise the limit on open files to the most allowed; the default is mostly 1,024.

    Each generator takes three connections of the buffer, each unauthenticated peer takes one.
    """
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = OPEN_FILES if hard_limit == resource.RLIM_INFINITY else min(OPEN_FILES, hard_limit)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard_limit))
