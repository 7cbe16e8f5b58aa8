"""`umbra weight-hub`, and `umbra weight-hub relay` on other nodes."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from umbra.proto.sockets import check_address
from umbra.services.runtime.config.loader import load_config
from umbra.services.runtime.net.keys import open_security
from umbra.services.runtime.net.session import Session
from umbra.services.runtime.process.command import (
    ServiceContext,
    insecure_option,
    keys_option,
    security_overrides,
    service_command,
)
from umbra.services.runtime.process.logs import setup_logging
from umbra.services.runtime.process.metrics import MetricsFile
from umbra.services.runtime.process.parent import die_with_parent, tell_ready
from umbra.services.runtime.process.signals import stop_on_signals
from umbra.services.runtime.process.threads import named_errors


def _run(context: ServiceContext) -> int:
    from umbra.services.weight_hub.serve import serve

    return serve(context)


def _with_subcommands(service: click.Command) -> click.Group:
    """`service` as a group that is the service itself when no sub-command is named."""

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


@click.command()
@click.option("--hub", required=True, help="Weights endpoint of the hub.")
@click.option("--listen", required=True, help="Address for this node's generators.")
@click.option(
    "--broker",
    envvar="UMBRA_BROKER",
    default="",
    help="Address of the buffer: join its run, and end with it.",
)
@click.option("--name", default="", help="Name in the run.  [default: relay-<host name>]")
@click.option("--config", type=str, help="Run file (TOML): its section weight_hub is used.")
@keys_option
@insecure_option
@click.option("--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Override.")
@click.option("--run-dir", type=click.Path(path_type=Path), help="Folder for metrics.")
@click.option("--wait-s", default=600.0, show_default=True, help="Seconds to wait for the hub.")
def relay(
    hub: str,
    listen: str,
    broker: str,
    name: str,
    config: str | None,
    keys: str | None,
    insecure: bool | None,
    overrides: tuple[str, ...],
    run_dir: Path | None,
    wait_s: float,
) -> None:
    """Get each version once for this node, serve its generators, hand buckets on."""
    from umbra.services.runtime.planes.gpu import find_gpu
    from umbra.services.weight_hub.relay import Relay

    check_address(hub, "--hub")
    if broker:
        check_address(broker, "--broker")
    settings = load_config(config, overrides=[*overrides, *security_overrides(keys, insecure)])
    security = open_security(settings.security, ["relay"], run_dir)
    name = name or f"relay-{socket.gethostname()}"
    die_with_parent()
    setup_logging(settings.log, name)
    if run_dir is not None:
        run_dir.mkdir(parents=True, exist_ok=True)
    stopping = threading.Event()
    metrics = MetricsFile(run_dir / "metrics.jsonl" if run_dir else None, name)
    gpu = find_gpu(settings.weight_hub, ["nccl"], settings.weight_hub.device)
    with ExitStack() as stack:
        stack.callback(metrics.close)
        stack.enter_context(stop_on_signals(stopping))
        stack.enter_context(named_errors(name))
        relaying = Relay(
            name, hub, listen, settings.weight_hub, metrics, gpu=gpu, security=security
        )
        tell_ready({"weights": relaying.endpoint, "buckets": relaying.buckets})
        session = None
        if broker:
            session = stack.enter_context(
                Session.join(
                    role="relay",
                    name=name,
                    broker=broker,
                    stopping=stopping,
                    deadline_s=settings.run.broker_grace_s,
                    grace_s=settings.run.broker_grace_s,
                    security=security,
                    metrics=metrics,
                )
            )
        relaying.run(stopping, wait_s, session)
        if session is not None and session.failure is not None:
            raise session.failure


command = _with_subcommands(service_command("weight_hub", _run))
command.add_command(relay)
