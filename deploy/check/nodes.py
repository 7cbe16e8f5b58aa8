"""Does a plan place the run on a cluster, and do its nodes answer from here?"""

from __future__ import annotations

import errno
import socket

from umbra.deploy.check.machine import Verdict
from umbra.deploy.cluster.cluster_file import ClusterFile
from umbra.deploy.cluster.plan import make_plan
from umbra.services.config import RunConfig
from umbra.services.config.feasibility import check_feasible

CONNECT_S = 5.0


def look_at_cluster(file: ClusterFile, config: RunConfig) -> list[Verdict]:
    """Plan the run on the nodes of `file`, and try to reach each of them.

    Raises:
        UsageError: it cannot be placed, or its numbers do not fit the plan's ranks.
    """
    plan = make_plan(file, config, "check")
    check_feasible(plan.config)
    placed = [f"{group.describe()}: {group.arithmetic}" for group in plan.groups]
    found = [Verdict("plan", "ok", one) for one in placed]
    port = plan.cluster.base_port
    return [*found, *(reach(node.name, node.address, port) for node in plan.nodes)]


def reach(name: str, address: str, port: int) -> Verdict:
    """Check that a host answers: a connection that it refuses is an answer, too."""
    check = f"node {name}"
    try:
        socket.create_connection((address, port), CONNECT_S).close()
    except ConnectionRefusedError:
        return Verdict(check, "ok", f"{address} answers")
    except socket.gaierror:
        remedy = "correct the address of the node, or give it as a number"
        return Verdict(check, "problem", f"{address}: nobody knows this name", remedy)
    except TimeoutError:
        remedy = f"open ports {port} to {port + 9} on {name} for the other nodes"
        return Verdict(check, "problem", f"{address}:{port} did not answer", remedy)
    except OSError as error:
        routed = error.errno not in (errno.EHOSTUNREACH, errno.ENETUNREACH)
        said = error.strerror or str(error)
        remedy = f"see that {name} runs" if routed else f"correct the address of {name}"
        return Verdict(check, "problem", f"{address}: {said}", remedy)
    return Verdict(check, "ok", f"{address}:{port} is in use: a run may be under way there")
