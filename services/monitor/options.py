"""Options that the commands on a running job share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import click

from umbra.proto.access import KeyRole
from umbra.proto.errors import UsageError
from umbra.proto.net.keys import open_security
from umbra.services.config import SecurityConfig
from umbra.services.monitor.run_address import find_address
from umbra.services.process.command import KEYS

timeout_option = click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0, min_open=True),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for an answer.",
)

Command = Callable[..., Any]


def _run_option(*roles: KeyRole, unless: Sequence[str] = ()) -> Callable[[Command], Command]:
    """Gives a command `broker` and `security` of the run that the user means.

    The key is that of the first of `roles` whose secret half is in the folder of keys. No run is
    looked for if one of the options `unless` is given.
    """

    def decorate(command: Command) -> Command:
        @click.argument("run", default="")
        @click.option(
            "--broker",
            envvar="UMBRA_BROKER",
            help="Address of its buffer instead of RUN: tcp://host:port.",
        )
        @click.option("--keys", envvar="UMBRA_SECURITY__KEYS", **KEYS)
        @wraps(command)
        def invoke(run: str, broker: str | None, keys: str | None, **others: Any) -> Any:
            if run and broker and _by_flag("broker"):
                raise UsageError(f"RUN {run} and --broker {broker} both name a run: give one")
            if run or not (broker or any(others[name] for name in unless)):
                address = find_address(run)
                broker, keys = address.broker, keys or address.keys
            security = open_security(SecurityConfig(keys=keys or ""), roles)
            return command(broker=broker, security=security, **others)

        return invoke

    return decorate


def _by_flag(name: str) -> bool:
    source = click.get_current_context().get_parameter_source(name)
    return source is click.core.ParameterSource.COMMANDLINE


# The folder of an operator holds all keys, that of a monitor just its own.
operated_run = _run_option("operator", "monitor")
checked_run = _run_option("monitor", "operator", unless=("hub", "relay"))
