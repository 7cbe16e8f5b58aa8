"""`umbra weight-hub`, and on other nodes `umbra weight-hub relay` and `umbra weight-hub part`."""

from __future__ import annotations

import socket
import threading
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from umbra.proto.access import KeyRole
from umbra.proto.bounds import OWNERS
from umbra.proto.errors import named_errors
from umbra.proto.messages import Role
from umbra.proto.net.keys import Security, open_security
from umbra.proto.net.session import Session
from umbra.proto.sockets import check_address
from umbra.services.config import RunConfig
from umbra.services.config.loader import load_config
from umbra.services.process.command import (
    ServiceContext,
    insecure_option,
    keys_option,
    security_overrides,
    service_command,
)
from umbra.services.process.logs import setup_logging
from umbra.services.process.metrics import MetricsFile
from umbra.services.process.parent import die_with_parent, tell_ready
from umbra.services.process.signals import stop_on_signals


def _run(context: ServiceContext) -> int:
    """Run the hub until it is told to stop; the exit code."""
    import zmq

    from umbra.proto.net.address import reachable
    from umbra.proto.net.server import Server
    from umbra.services.weight_hub.service import ACCEPTS, CHANNEL, WeightHub
    from umbra.services.weights.planes.plane import check_plane

    config = context.config.weight_hub
    check_plane(config.plane)
    context.security.check_bind(config.buckets_listen or config.listen)
    context.security.check_bind(config.connections_listen or config.listen)
    zmq_context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server = Server(zmq_context, context.name, uuid.uuid4().hex[:12], context.security)
    try:
        endpoint = reachable(server.bind(CHANNEL, config.listen, ACCEPTS), config.advertise)
        with context.join("weight_hub", {CHANNEL: endpoint}) as session:
            hub = WeightHub(server, session.welcome.run_id, config, context.metrics)
            try:
                context.ready({CHANNEL: endpoint})
                while not session.stopping.is_set():
                    served = hub.step()
                    held_back = bool(hub.protocol.held_back)
                    idle = "waiting for a part hub" if held_back else "waiting"
                    session.progress("serving" if served and not held_back else idle, 1)
                    session.stats(**hub.stats())
            finally:
                hub.close()
            if session.failure is not None:
                raise session.failure
    finally:
        server.close()
        zmq_context.term()
    return 0


def _with_subcommands(service: click.Command) -> click.Group:
    """Turn `service` into a group that runs the service itself when no sub-command is named."""

    def invoke(**values: Any) -> None:
        context = click.get_current_context()
        if context.invoked_subcommand is None:
            context.invoke(service, **values)

    return click.Group(
        service.name,
        callback=invoke,
        invoke_without_command=True,
        params=service.params,
        help=service.help,
    )


def _on_another_node(function: Callable[..., None]) -> click.Command:
    """Turn `function` into a command with the options of relays and part hubs."""
    options = (
        click.option("--hub", required=True, help="Weights endpoint of the hub."),
        click.option(
            "--broker",
            envvar="UMBRA_BROKER",
            default="",
            help="Address of the buffer: join its run, and end with it.",
        ),
        click.option("--config", type=str, help="Run file (TOML): its section weight_hub is used."),
        keys_option,
        insecure_option,
        click.option(
            "--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Override."
        ),
        click.option("--run-dir", type=click.Path(path_type=Path), help="Folder for metrics."),
        click.option(
            "--wait-s", default=600.0, show_default=True, help="Seconds to wait for the hub."
        ),
    )
    for option in reversed(options):
        function = option(function)
    return click.command()(function)


@dataclass(frozen=True, slots=True)
class _Beginning:
    """What relays and part hubs have before they start."""

    settings: RunConfig
    security: Security
    metrics: MetricsFile
    stopping: threading.Event
    broker: str

    def join(self, stack: ExitStack, role: Role, name: str) -> Session | None:
        """Join the run of `--broker`, if that was given."""
        if not self.broker:
            return None
        return stack.enter_context(
            Session.join(
                role=role,
                name=name,
                broker=self.broker,
                stopping=self.stopping,
                deadline_s=self.settings.run.broker_grace_s,
                grace_s=self.settings.run.broker_grace_s,
                security=self.security,
                metrics=self.metrics,
            )
        )


def _begin(stack: ExitStack, role: KeyRole, name: str, values: dict[str, Any]) -> _Beginning:
    """Read the options of `_on_another_node` and start logging as `name`."""
    check_address(values["hub"], "--hub")
    if values["broker"]:
        check_address(values["broker"], "--broker")
    overrides = [*values["overrides"], *security_overrides(values["keys"], values["insecure"])]
    settings = load_config(values["config"], overrides=overrides)
    run_dir: Path | None = values["run_dir"]
    security = open_security(settings.security, [role], run_dir)
    die_with_parent()
    setup_logging(settings.log, name)
    if run_dir is not None:
        run_dir.mkdir(parents=True, exist_ok=True)
    stopping = threading.Event()
    metrics = MetricsFile(run_dir / "metrics.jsonl" if run_dir else None, name)
    stack.callback(metrics.close)
    stack.enter_context(stop_on_signals(stopping))
    stack.enter_context(named_errors(name))
    return _Beginning(settings, security, metrics, stopping, values["broker"])


@_on_another_node
@click.option("--listen", required=True, help="Address for this node's generators.")
@click.option("--name", default="", help="Name in the run.  [default: relay-<host name>]")
def relay(name: str, listen: str, **values: Any) -> None:
    """Get each version once for this node, serve its generators, hand buckets on."""
    from umbra.services.weight_hub.relay import Relay
    from umbra.services.weights.planes.receiving import find_gpu

    name = name or f"relay-{socket.gethostname()}"
    with ExitStack() as stack:
        begun = _begin(stack, "relay", name, values)
        config = begun.settings.weight_hub
        gpu = find_gpu(config, ["nccl"], config.device)
        relaying = Relay(
            name, values["hub"], listen, config, begun.metrics, gpu=gpu, security=begun.security
        )
        tell_ready({"weights": relaying.endpoint, "buckets": relaying.buckets})
        session = begun.join(stack, "relay", name)
        relaying.run(begun.stopping, values["wait_s"], session)
        if session is not None and session.failure is not None:
            raise session.failure


@_on_another_node
@click.option("--listen", required=True, help="Address at which receivers fetch buckets.")
@click.option(
    "--owner",
    required=True,
    type=click.IntRange(1, OWNERS - 1),
    help="Trainer host (its --node-rank) whose share of the weights this is.",
)
@click.option("--name", default="", help="Name in the run.  [default: part-<owner>]")
def part(name: str, listen: str, owner: int, **values: Any) -> None:
    """Hold what the ranks of one more trainer host write of each version, and hand it out."""
    from umbra.services.weight_hub.part import PartHub

    name = name or f"part-{owner}"
    with ExitStack() as stack:
        begun = _begin(stack, "part", name, values)
        config = begun.settings.weight_hub
        holding = PartHub(name, owner, values["hub"], listen, config, security=begun.security)
        stack.callback(holding.close)
        tell_ready({"buckets": holding.buckets})
        session = begun.join(stack, "part", name)
        holding.run(begun.stopping, values["wait_s"], session)
        if session is not None and session.failure is not None:
            raise session.failure


command = _with_subcommands(service_command("weight_hub", _run))
command.add_command(relay)
command.add_command(part)
