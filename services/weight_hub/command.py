"""`umbra weight-hub`: the weight daemon of a host."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import ExitStack, closing
from typing import Any

import click

from umbra.proto.bounds import OWNERS
from umbra.proto.errors import UsageError
from umbra.proto.messages import Role
from umbra.proto.sockets import check_address
from umbra.services.config.run import START_S
from umbra.services.modeling.run_file import load_service
from umbra.services.process.command import ServiceContext, service_command

OPTIONS = (
    click.Option(
        ["--upstream"],
        default="",
        help="Weights endpoint of the hub: get each version once for this host, serve its "
        "generators and hand buckets on.",
    ),
    click.Option(
        ["--owner"],
        type=click.IntRange(1, OWNERS - 1),
        help="With --upstream: hold what the ranks of this trainer host (its --node-rank) write of "
        "each version, and hand it out at --listen.",
    ),
)


def _identify(options: Mapping[str, Any]) -> tuple[Role, str]:
    upstream, owner = options["upstream"], options["owner"]
    if not upstream and owner is not None:
        raise UsageError("--owner is for the daemon of another trainer host: add --upstream")
    if not upstream:
        return "weight_hub", "weight-hub"
    check_address(upstream, "--upstream")
    if owner is not None:
        return "part", f"part-{owner}"
    return "relay", f"relay-{socket.gethostname()}"


def _run(context: ServiceContext) -> int:
    from umbra.services.weight_hub.daemon import Daemon, PartHub
    from umbra.services.weights.planes.plane import check_plane
    from umbra.services.weights.planes.receiving import find_gpu

    options, config, security = context.options, context.config.weight_hub, context.security
    upstream, owner = options["upstream"], options["owner"]
    is_member = context.config.run.broker_given
    session = None
    context.begin(f"{context.role} on {socket.gethostname()}", f"plane {config.plane}")
    with ExitStack() as stack:
        if owner is not None:
            part = PartHub(context.name, owner, upstream, config, security=security)
            stack.enter_context(closing(part))
            context.ready({"buckets": part.buckets.endpoint})
            if is_member:
                session = stack.enter_context(context.join())
            part.run(context.stopping, START_S, session)
        else:
            if not upstream:
                check_plane(config.plane)
            gpu = find_gpu(config, ["nccl"], config.device) if upstream else None
            name, metrics = context.name, context.metrics
            daemon = Daemon(name, config, metrics, upstream=upstream, gpu=gpu, security=security)
            stack.enter_context(closing(daemon))
            endpoints = {"weights": daemon.endpoint}
            if is_member:
                session = context.join(endpoints={} if upstream else endpoints)
                stack.enter_context(session)
            context.ready(endpoints)
            run_id = session.run_id if session is not None else context.name
            daemon.run(run_id, context.stopping, START_S, session)
    if session is not None and session.failure is not None:
        raise session.failure
    return 0


command = service_command(
    "weight_hub", _run, load=load_service, options=OPTIONS, identify=_identify
)
