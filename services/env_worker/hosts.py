"""The environments of a run that this machine has, each with agents of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, closing

from umbra.proto.errors import UsageError
from umbra.proto.records import SessionTask
from umbra.services.config import EnvironmentConfig
from umbra.services.env_worker.host import AgentHost, EndedSession, Lease
from umbra.services.environments.agent_workers import offered_name

log = logging.getLogger(__name__)


class AgentHosts:
    """Hosts by what generators call their environment (`offered_name`)."""

    def __init__(self, hosts: Mapping[str, AgentHost]) -> None:
        self._hosts = hosts
        self._strange: list[EndedSession] = []

    @classmethod
    def open(
        cls, environments: Iterable[EnvironmentConfig], *, wake: Callable[[], None]
    ) -> AgentHosts:
        """Those of `environments` that this machine can run.

        Args:
            environments: all that env-workers run.
            wake: as of `AgentHost`.

        Raises:
            UsageError: none of them can be loaded.
            DeadlineError: loading one took too long.
        """
        hosts: dict[str, AgentHost] = {}
        faults: list[UsageError] = []
        with ExitStack() as opened:
            for environment in environments:
                name = offered_name(environment)
                try:
                    hosts[name] = opened.enter_context(closing(AgentHost(environment, wake=wake)))
                except UsageError as error:
                    faults.append(error)
                    log.warning("this env-worker is without %s: %s", name, error)
            if not hosts and faults:
                raise faults[0]
            opened.pop_all()
        return cls(hosts)

    @property
    def rooms(self) -> dict[str, int]:
        """Sessions at once that each environment has processes for."""
        return {name: host.room for name, host in self._hosts.items()}

    def begin(self, task: SessionTask) -> None:
        """Run an agent for the session."""
        host = self._hosts.get(task.environment)
        if host is not None:
            host.begin(task)
            return
        why = f"this env-worker has no environment {task.environment!r}"
        self._strange.append(EndedSession((task.sample_id, task.attempt), unreachable=why))

    def forget(self, leases: Iterable[Lease]) -> None:
        """These are not ours any more."""
        known = list(leases)
        for host in self._hosts.values():
            host.forget(known)

    def ended(self) -> list[EndedSession]:
        """The sessions that have ended since the last call."""
        strange, self._strange = self._strange, []
        return strange + [one for host in self._hosts.values() for one in host.ended()]

    def close(self) -> None:
        """End all agents."""
        with ExitStack() as stack:
            for host in self._hosts.values():
                stack.callback(host.close)
