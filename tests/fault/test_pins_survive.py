"""Pinned versions outlive a hub that is killed, in their slots and in files of their own."""

from __future__ import annotations

import json
import threading
import uuid
from pathlib import Path

import pytest
from click.testing import CliRunner
from fakes.generating import Generating, Policy
from fakes.hub_bench import WAIT_S
from fault.test_weight_push_faults import HubProcess

from umbra.proto.net.io_thread import IoThread
from umbra.services.weight_hub.weights_command import command
from umbra.services.weights.arena import SHM
from umbra.services.weights.planes.receiving import StagedPlanes
from umbra.services.weights.publisher import Publisher
from umbra.services.weights.receiver import Receiver

pytestmark = pytest.mark.fault


def umbra_weights(endpoint: str, *arguments: str) -> str:
    result = CliRunner().invoke(
        command, [*arguments, "--hub", endpoint, "--timeout", str(WAIT_S)], standalone_mode=False
    )
    if result.exception is not None:
        raise result.exception
    return result.output


def held(endpoint: str) -> list[tuple[int, bool]]:
    """Version and whether it is pinned."""
    rows = json.loads(umbra_weights(endpoint, "list", "--json"))["versions"]
    return sorted((row["version"], row["pinned"]) for row in rows)


def test_pins_survive_a_hub_that_is_killed(run_id: str, tiny_model: Path) -> None:
    """1. Version 0 is pinned in its slot, version 1 as a file. 2. The hub is killed, twice.

    Result: the new hub has both; generators are rolled back to each, whole.
    """
    hub = HubProcess("tcp://127.0.0.1:*", run_id, "shm", "3")
    links = [IoThread("trainer", uuid.uuid4().hex), IoThread("gen-0", uuid.uuid4().hex)]
    channels = [link.channel(hub.endpoint, "weight hub") for link in links]
    policy = Policy(tiny_model)
    publisher = Publisher(channels[0], policy.manifest)
    publisher.register(WAIT_S)
    receiver = Receiver(channels[1], StagedPlanes(), check_s=0.05, retry_s=0.02)
    receiver.subscribe(WAIT_S)
    generator = Generating(policy, tiny_model, receiver)
    try:
        for version in range(4):
            generator.until(policy.publish(publisher))
            if version < 2:
                umbra_weights(hub.endpoint, "pin", str(version))
        look = threading.Event()
        for _ in range(2):
            hub.kill()
            hub = HubProcess(hub.endpoint, run_id, "shm", "3")
            for channel in channels:
                channel.move(hub.endpoint)
            while held(hub.endpoint) != [(0, True), (1, True), (3, False)]:
                assert not look.wait(0.02)
        for version in (1, 0):
            umbra_weights(hub.endpoint, "rollback", str(version))
            generator.wait(lambda v=version: generator.engine.version == v, f"version {version}")
        for version in (0, 1):
            umbra_weights(hub.endpoint, "unpin", str(version))
        assert not list(SHM.glob(f"umbra-{run_id}-pin_*"))
        generator.until(policy.publish(publisher))
    finally:
        generator.close()
        receiver.close()
        publisher.close()
        for link in links:
            link.close()
        hub.process.terminate()
        hub.process.communicate(timeout=WAIT_S)
    assert not list(SHM.glob(f"umbra-{run_id}-*"))
