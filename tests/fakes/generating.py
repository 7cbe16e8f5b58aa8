"""A trainer of a tiny model, and generators that decode while its versions are pushed to them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import xxhash
from fakes.hub_bench import WAIT_S

from umbra.proto.records import Manifest, Sampling
from umbra.services.generator.engines.engine import EngineRequest
from umbra.services.generator.engines.torch_engine import TorchEngine
from umbra.services.modeling.models import load_model
from umbra.services.trainer.snapshot import tensor_layout, write_shards
from umbra.services.weights.manifest import build_manifest
from umbra.services.weights.publisher import Publisher
from umbra.services.weights.receiver import Receiver, StagedVersion
from umbra.services.weights.verify import Checksums

CPU = torch.device("cpu")
DTYPE = torch.bfloat16
BUCKET_BYTES = 1 << 10
TOKENS = 8


def checksum_of(model: Any, manifest: Manifest) -> int:
    state = model.state_dict()
    digest = xxhash.xxh3_64()
    for entry in manifest.tensors:
        digest.update(state[entry.name].to(DTYPE).contiguous().view(torch.uint8).numpy())
    return digest.intdigest()


class Policy:
    """A float32 model whose versions differ by some of their weights; it is served as bfloat16."""

    def __init__(self, model_dir: Path) -> None:
        torch.manual_seed(0)
        self._model = load_model(model_dir, CPU, torch.float32)
        self.manifest = build_manifest(tensor_layout(self._model, "bfloat16"), BUCKET_BYTES)
        self.checksums: list[int] = []
        self.sums: list[int] = []  # of the buckets written last

    @torch.no_grad()
    def write(self, publisher: Publisher) -> int:
        """Learn something, write the next version into its slot; the version."""
        version = len(self.checksums)
        for parameter in self._model.parameters():
            parameter.add_(torch.randn_like(parameter) * (torch.rand_like(parameter) < 0.02))
        self.checksums.append(checksum_of(self._model, self.manifest))
        slot = publisher.slot(version, WAIT_S)
        sums = Checksums(self.manifest, slot)
        write_shards(self._model, self.manifest, slot, sums=sums)
        self.sums = sums.result()
        return version

    def publish(self, publisher: Publisher) -> int:
        """As `write`; publish."""
        version = self.write(publisher)
        publisher.publish(version, 0.0, self.sums)
        return version


class Generating:
    """An engine that always decodes, and takes every version that its receiver has.

    After each load the bytes of the engine's own weights are compared with the trainer's.

    Args:
        receiver: subscribed.
        loading: called before each load.
    """

    def __init__(
        self,
        policy: Policy,
        model_dir: Path,
        receiver: Receiver,
        loading: Callable[[], None] = lambda: None,
    ) -> None:
        self.model = load_model(model_dir, CPU, DTYPE)
        self.engine = TorchEngine(self.model, stop_ids=set(), slots=2, max_context=64, seed=0)
        self.failure: Exception | None = None
        self._policy = policy
        self._receiver = receiver
        self._loading = loading
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._main, name="generating")
        self._thread.start()

    def until(self, version: int) -> None:
        """Wait until it serves `version`, and decodes with it."""
        self.wait(lambda: self.engine.version >= version, f"version {version}")
        self.goes_on()

    def goes_on(self) -> None:
        goal = self.engine.decoded_tokens + 3 * TOKENS
        self.wait(lambda: self.engine.decoded_tokens >= goal, "tokens")

    def close(self) -> None:
        self._stop.set()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "the generator hangs"

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until `condition` holds."""
        with self._changed:
            met = self._changed.wait_for(lambda: condition() or self.failure is not None, WAIT_S)
        if self.failure is not None:
            raise self.failure
        assert met, f"no {what} within {WAIT_S:g} s; version {self.engine.version} is served"

    def _main(self) -> None:
        try:
            while not self._stop.is_set():
                self._turn()
                with self._changed:
                    self._changed.notify_all()
        except Exception as error:  # noqa: BLE001 - raised in the test's own thread
            self.failure = error
            with self._changed:
                self._changed.notify_all()

    def _turn(self) -> None:
        staged = self._receiver.poll()
        if staged is not None:
            self._load(staged)
        if self.engine.version < 0:
            with self._receiver._changed:
                self._receiver._changed.wait(0.01)
            return
        if not self.engine.busy:
            self.engine.submit([EngineRequest("r", [5, 6, 7], Sampling(), TOKENS)])
        self.engine.poll(0.0)

    def _load(self, staged: StagedVersion) -> None:
        self._loading()

        def apply(staged: StagedVersion) -> None:
            self.engine.load(staged.manifest, staged.data, staged.version, "keep", staged.guard)

        self._receiver.load(staged, apply, WAIT_S, threading.Event())
        if self.engine.version >= 0:
            held = checksum_of(self.model, self._policy.manifest)
            assert held == self._policy.checksums[self.engine.version], "not the trainer's weights"
