"""`umbra keep`: starts a command again when it fails, the same way under every launcher.

By themselves Docker knows no exit codes that are final, Kubernetes heeds them only in pods whose
containers it does not restart, and SLURM restarts no steps.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence

import click

from umbra.proto.errors import UsageError
from umbra.services.process.child import describe_exit, own_exit_code, with_fast_copies
from umbra.services.process.parent import PARENT_PID_VARIABLE, READY_FD_VARIABLE
from umbra.services.process.signals import SignalCounter
from umbra.services.process.supervisor import FINAL_CODES, RestartPolicy

LOOK_S = 0.2
# Twenty pauses take a quarter of an hour: a node may be away for so long.
FIRST_S = 2.0
MOST_S = 60.0
WINDOW_S = 3600.0


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--restarts", type=click.IntRange(0), default=20, show_default=True,
    help="Restarts within an hour; one more failure is final.",
)  # fmt: skip
@click.option("--name", help="What messages call it.  [default: the command's first word]")
@click.argument("argv", metavar="COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
def command(restarts: int, name: str | None, argv: tuple[str, ...]) -> int:
    """Run COMMAND, and again when it fails, after a pause that doubles from 2 to 60 seconds.

    Ends with its exit code: 0, one that is final because the same would happen again (2, 4, 7, 8),
    or the last. SIGTERM and SIGINT are passed on; then it ends as if it had died of the signal,
    however COMMAND ends.
    """
    policy = RestartPolicy(first_s=FIRST_S, most_s=MOST_S, limit=restarts, window_s=WINDOW_S)
    with SignalCounter() as signals:
        return keep(argv, name or argv[0], policy, signals)


def keep(argv: Sequence[str], name: str, policy: RestartPolicy, signals: SignalCounter) -> int:
    """Run `argv` until it ends for good; the exit code to end with.

    Raises:
        UsageError: it cannot be started.
    """
    while True:
        code = _run(argv, signals)
        if signals.count:
            return signals.exit_code
        how = describe_exit(code)
        delay = None if code in (0, *FINAL_CODES) else policy.failed(time.monotonic())
        if delay is None:
            if code:
                click.echo(f"{name} ended ({how}) and is not restarted", err=True)
            return own_exit_code(code) if code else code
        click.echo(f"{name} ended ({how}): restart in {delay:g} s", err=True)
        until = time.monotonic() + delay
        while not signals.count and (left := until - time.monotonic()) > 0:
            signals.wait(left)
        if signals.count:
            return signals.exit_code


def _run(argv: Sequence[str], signals: SignalCounter) -> int:
    """Run `argv` once; its exit code (negative: the signal that ended it)."""
    ours = (PARENT_PID_VARIABLE, READY_FD_VARIABLE)
    environ = {name: value for name, value in os.environ.items() if name not in ours}
    try:
        # In a session of its own: Ctrl-C in a terminal would reach it twice.
        child = subprocess.Popen(
            argv, env=with_fast_copies(environ), stdin=subprocess.DEVNULL, start_new_session=True
        )
    except OSError as error:
        raise UsageError(f"{argv[0]} cannot be started: {error.strerror}") from error
    passed_on = 0
    while (code := child.poll()) is None:
        if signals.count > passed_on:
            passed_on = signals.count
            child.send_signal(signals.number)
        signals.wait(LOOK_S)
    return code
