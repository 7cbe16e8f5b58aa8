"""`umbra weights` against a hub over real sockets and shared memory."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import zmq
from click.testing import CliRunner
from fakes.slowness import seconds
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from umbra.proto.errors import RejectedError, UsageError
from umbra.proto.net.io_thread import IoThread
from umbra.proto.net.server import Server
from umbra.services.config import WeightHubConfig as WeightHubConfig
from umbra.services.modeling.weights import tensors_in
from umbra.services.process.metrics import MetricsFile
from umbra.services.trainer.snapshot import tensor_layout, write_shards
from umbra.services.weight_hub.service import ACCEPTS, CHANNEL, WeightHub
from umbra.services.weight_hub.weights_command import command
from umbra.services.weights.arena import SHM, remove_leftovers
from umbra.services.weights.manifest import build_manifest
from umbra.services.weights.planes.receiving import StagedPlanes
from umbra.services.weights.publisher import Publisher
from umbra.services.weights.receiver import Receiver

WAIT_S = seconds(20.0)


class Bench:
    """A hub with a trainer of a tiny model; version v has all weights multiplied by v + 1."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], model_dir: Path, slots: int
    ) -> None:
        self.run_id = f"test-{uuid.uuid4().hex[:8]}"
        self.model_dir = model_dir
        self.model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self.manifest = build_manifest(tensor_layout(self.model, "bfloat16"), 16 << 10)
        self._closers: list[Callable[[], None]] = []
        self._server = Server(context, "weight-hub", "h1")
        self.endpoint = self._server.bind(CHANNEL, "tcp://127.0.0.1:*", ACCEPTS)
        config = WeightHubConfig(slots=slots)
        metrics = MetricsFile(None, "weight-hub")
        self.hub = WeightHub(self._server, self.run_id, config, metrics, str(model_dir))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._main)
        self._thread.start()
        link = IoThread("trainer", "t1")
        self.publisher = Publisher(link.channel(self.endpoint, "weight hub"), self.manifest)
        self._closers += [link.close, self.publisher.close]
        self.publisher.register(WAIT_S)

    def _main(self) -> None:
        while not self._stop.is_set():
            self.hub.step(0.01)
        self.hub.close()

    def weights(self, version: int) -> dict[str, torch.Tensor]:
        return {
            n: (p.detach() * (version + 1)).bfloat16() for n, p in self.model.named_parameters()
        }

    @torch.no_grad()
    def publish(self, version: int) -> None:
        slot = self.publisher.slot(version, WAIT_S)
        for parameter in self.model.parameters():
            parameter.mul_(version + 1)
        write_shards(self.model, self.manifest, slot)
        for parameter in self.model.parameters():
            parameter.div_(version + 1)
        self.publisher.publish(version, 0.0)

    def receiver(self) -> Receiver:
        link = IoThread("a", uuid.uuid4().hex)
        receiver = Receiver(link.channel(self.endpoint, "weight hub"), StagedPlanes())
        self._closers += [link.close, receiver.close]
        receiver.subscribe(WAIT_S)
        return receiver

    def load(self, receiver: Receiver, version: int) -> None:
        staged = receiver.wait_first(WAIT_S, threading.Event())
        assert staged is not None
        assert staged.version == version
        expected = self.weights(version)
        for name, tensor in tensors_in(staged.manifest, next(staged.parts())):
            assert torch.equal(tensor, expected[name]), name
        receiver.committed(staged, 0.0)

    def umbra_weights(self, *arguments: str) -> str:
        result = CliRunner().invoke(
            command, [*arguments, "--hub", self.endpoint, "--timeout", str(WAIT_S)],
            standalone_mode=False,
        )  # fmt: skip
        if result.exception is not None:
            raise result.exception
        return result.output

    def held(self) -> list[tuple[int, str, bool, bool]]:
        """Version, "slot" or "file", pinned, newest."""
        return [
            (h["version"], h["place"].split()[0].split("/")[0] or "file", h["pinned"], h["newest"])
            for h in json.loads(self.umbra_weights("list", "--json"))["versions"]
        ]

    def close(self) -> None:
        for close in reversed(self._closers):
            close()
        self._stop.set()
        self._thread.join(WAIT_S)
        self._server.close()


@pytest.fixture
def bench(
    zmq_context: zmq.Context[zmq.Socket[bytes]], tiny_model_dir: Path
) -> Iterator[Callable[[int], Bench]]:
    made: list[Bench] = []

    def start(slots: int) -> Bench:
        torch.set_num_threads(1)
        made.append(Bench(zmq_context, tiny_model_dir, slots))
        return made[-1]

    yield start
    for bench in made:
        bench.close()
        assert remove_leftovers(bench.run_id) == []


def test_a_pin_takes_a_slot_if_two_are_left_else_a_file(bench: Callable[[int], Bench]) -> None:
    one = bench(3)
    assert "no version" in one.umbra_weights("list")
    one.publish(0)
    assert "pinned" in one.umbra_weights("pin", "0")
    one.publish(1)
    one.umbra_weights("pin", "1")  # would leave one slot
    for version in (2, 3, 4):
        one.publish(version)
    assert one.held() == [
        (1, "file", True, False),
        (0, "slot", True, False),
        (3, "slot", False, False),
        (4, "slot", False, True),
    ]
    assert len(list(SHM.glob(f"umbra-{one.run_id}-pin_*"))) == 1
    one.umbra_weights("unpin", "1")
    one.umbra_weights("unpin", "0")
    assert not list(SHM.glob(f"umbra-{one.run_id}-pin_*"))
    one.publish(5)
    assert [held[0] for held in one.held()] == [3, 4, 5], "the slot is used again"
    with pytest.raises(RejectedError, match="version 1 is not held any more, or not yet; held: 3"):
        one.umbra_weights("pin", "1")
    with pytest.raises(RejectedError, match="version 3 is not pinned"):
        one.umbra_weights("unpin", "3")


@pytest.mark.parametrize("slots", [2, 3])
def test_generators_are_rolled_back_and_go_on(bench: Callable[[int], Bench], slots: int) -> None:
    """With 2 slots the pin is a file, which is copied back; with 3 it is still in its slot."""
    one = bench(slots)
    receiver = one.receiver()
    for version in range(4):
        one.publish(version)
        one.load(receiver, version)
        if version == 0:
            one.umbra_weights("pin", "0")
    one.umbra_weights("rollback", "0")
    one.load(receiver, 0)
    one.umbra_weights("rollback", "0")  # is served already
    one.publish(4)
    one.load(receiver, 4)
    with pytest.raises(RejectedError, match="version 1 is not held"):
        one.umbra_weights("rollback", "1")


def test_no_slot_for_a_roll_back_is_said_after_the_deadline(bench: Callable[[int], Bench]) -> None:
    one = bench(2)
    one.publish(0)
    one.umbra_weights("pin", "0")
    one.publish(1)
    one.publisher.slot(2, WAIT_S)  # and nothing more
    arguments = ["rollback", "0", "--hub", one.endpoint, "--timeout", "0.3"]
    result = CliRunner().invoke(command, arguments, standalone_mode=False)
    assert isinstance(result.exception, RejectedError)
    assert result.exception.code == "busy"


def test_an_export_loads_with_the_auto_classes(
    bench: Callable[[int], Bench], tmp_path: Path
) -> None:
    one = bench(2)
    for version in (0, 1, 2):
        one.publish(version)
        if version == 0:
            one.umbra_weights("pin", "0")
    for version in (0, 1, 2):  # a file, an old slot, the newest
        out = tmp_path / str(version)
        assert f"version {version} written to {out}" in one.umbra_weights(
            "export", str(version), str(out)
        )
        expected = one.weights(version)
        stored = load_file(out / "model.safetensors")
        assert stored.keys() == expected.keys()
        assert all(torch.equal(stored[name], expected[name]) for name in expected)
    model = AutoModelForCausalLM.from_pretrained(out, local_files_only=True)
    assert model.dtype == torch.bfloat16
    assert torch.equal(model.state_dict()["model.norm.weight"], expected["model.norm.weight"])
    assert AutoTokenizer.from_pretrained(out, local_files_only=True)("12")["input_ids"]
    assert {p.name for p in tmp_path.iterdir()} == {"0", "1", "2"}, "nothing half-written"
    with pytest.raises(RejectedError, match="must be a new directory"):
        one.umbra_weights("export", "2", str(out))


def test_who_is_asked_must_be_named() -> None:
    result = CliRunner().invoke(command, ["list"], standalone_mode=False, env={"UMBRA_BROKER": ""})
    assert isinstance(result.exception, UsageError)
