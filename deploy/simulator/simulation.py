"""A whole run in simulated time: the broker, the hub and its relays, and everyone who asks them."""

from __future__ import annotations

import gc
import math
from bisect import bisect
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from umbra.deploy.simulator.answers import Chance
from umbra.deploy.simulator.desk import SimulatedBroker
from umbra.deploy.simulator.failures import RESTART_S, Failures
from umbra.deploy.simulator.generator import SimGenerator
from umbra.deploy.simulator.hub import Hub, NodeRelay, SimulatedWire
from umbra.deploy.simulator.prediction import Prediction, Window
from umbra.deploy.simulator.rows import SimulatedEngine
from umbra.deploy.simulator.scenario import Scenario
from umbra.deploy.simulator.scorer import SimScorer
from umbra.deploy.simulator.tables import ScoringSpeed
from umbra.deploy.simulator.timeline import Timeline
from umbra.deploy.simulator.trainer import SimTrainer
from umbra.proto.errors import DeadlineError
from umbra.proto.records import SampleTask
from umbra.services.buffer.broker import Broker, Endpoints
from umbra.services.buffer.prompts import GroupEnd
from umbra.services.buffer.state import RunState
from umbra.services.buffer.store.api import MemoryStore
from umbra.services.config import NamedEnvironment
from umbra.services.config.generation import ENVIRONMENT
from umbra.services.prompts.rows import Prompt
from umbra.services.weights.planes.tcp import RelayChain

GC_THRESHOLD = 50_000  # new objects between collections: thousands are made at once, and live on
_GOLDEN = (math.sqrt(5) - 1) / 2
FEW = 64  # generators that ask for work once a second; more ask less often, so that few are idle


class _EndlessPrompts:
    """Prompts without end, of `environments` by their weights; nobody reads more of them."""

    def __init__(self, environments: Sequence[NamedEnvironment]) -> None:
        self._names = [one.name for one in environments]
        self._ends = list(accumulate(one.weight for one in environments))
        self._drawn = 0

    def __next__(self) -> Prompt:
        self._drawn += 1
        if not self._names:
            return Prompt(str(self._drawn), {})
        place = self._drawn * _GOLDEN % 1.0 * self._ends[-1]  # spread as evenly as can be
        return Prompt(str(self._drawn), {ENVIRONMENT: self._names[bisect(self._ends, place)]})

    def ended(self, end: GroupEnd) -> None:
        """It makes no difference."""

    def shares(self) -> dict[str, float]:
        return {}

    def position(self) -> dict[str, Any]:
        return {"drawn": self._drawn}

    def changes(self) -> dict[str, Any]:
        return {}

    def seek(self, position: dict[str, Any], kept: Mapping[str, Any]) -> None:
        self._drawn = position["drawn"]


class _SimulatedNode:
    """A machine with engines: its relay, unless it is the hub's own, and they."""

    def __init__(self, relay: NodeRelay | None, generators: list[SimGenerator]) -> None:
        self.relay = relay
        self.generators = generators
        self.is_up = True


class Simulation:
    """Build it, `run` it once."""

    def __init__(self, scenario: Scenario) -> None:
        config, tables = scenario.config, scenario.tables
        network = tables.speed.network
        self._scenario = scenario
        self._chance = Chance(config.run.seed)
        self._store = MemoryStore(durable=bool(tables.failures))
        self.timeline = Timeline()
        self.desk = SimulatedBroker(
            self.timeline,
            self._make_broker,
            tables.speed.broker,
            network.latency_s,
            config.generator.partial_flush_tokens,
        )
        self.chain = RelayChain(hub="")
        self.hub = Hub(
            self.timeline,
            config.weight_hub.slots,
            config.weight_hub.pace,
            int(network.weight_bytes),
            network.latency_s,
            left=self.chain.leave,
        )
        self.trainer = SimTrainer(
            self.timeline,
            self.desk,
            self.hub,
            config,
            tables.speed.training.of(scenario.trainer_gpus, scenario.colocated),
            lambda step: self._window.stepped(step),
            lambda: self._trainer_dies(RESTART_S),
        )
        self.nodes: list[_SimulatedNode] = []
        self.failures = Failures(self.timeline, tables.failures, config.run.seed)
        self._relays: dict[str, NodeRelay] = {}
        self._wire = SimulatedWire(
            self.timeline,
            source=self.chain.source,
            alive=lambda name: self._relays[name].is_alive,
            wire_bytes=network.weight_bytes * network.wire_share,
            bucket_bytes=config.weight_hub.receive_bucket_bytes,
            bytes_per_s=network.bytes_per_s,
            latency_s=network.latency_s,
        )
        self._place_generators()
        self.scorers = self._make_scorers()
        steps, ahead = config.run.steps, config.buffer.run_ahead
        first = min(ahead + 2, steps // 2)
        self._window = Window(
            self.timeline,
            self.desk,
            self.trainer,
            self.generators,
            self.scorers,
            self.failures,
            slots=config.generator.slots,
            counted=range(first + 1, max(first + 1, steps - ahead) + 1),
        )

    @property
    def generators(self) -> list[SimGenerator]:
        """Those of all nodes."""
        return [generator for node in self.nodes for generator in node.generators]

    def run(self) -> Prediction:
        """Let the run take place.

        Raises:
            DeadlineError: the trainer would have given up: no batch came.
        """
        threshold = gc.get_threshold()
        gc.set_threshold(GC_THRESHOLD)
        try:
            self._start()
            self.timeline.run(until=lambda: self.trainer.finished is not None)
        finally:
            gc.set_threshold(*threshold)
        if self.trainer.finished is None:
            raise DeadlineError("nothing happens any more, and the run is not at its end")
        return self._window.close(self.trainer.finished.ledger, self._scenario.trainer_gpus)

    def _start(self) -> None:
        self.trainer.start()
        for scorer in self.scorers:
            scorer.start()
        for index, node in enumerate(self.nodes):
            if node.relay is not None:
                node.relay.start()
            for generator in node.generators:
                generator.start()
                self.failures.plan(
                    "generator",
                    generator.name,
                    lambda s, n=node, g=generator: self._generator_dies(n, g, s),
                )
            self.failures.plan("node", f"node-{index}", lambda s, n=node: self._node_dies(n, s))
        self.failures.plan("trainer", "trainer", self._trainer_dies)
        self.failures.plan("buffer", "buffer", self._buffer_dies)

    def _make_broker(self, now: float) -> Broker:
        prompts = _EndlessPrompts(self._scenario.config.environments)
        broker = Broker(
            RunState(self._scenario.config, self._store, prompts),
            run_id="simulated",
            endpoints=Endpoints("data", "events-in", "events-out"),
            now=now,
        )
        broker.run.facts.samplings = {}  # what is simulated is drawn by nobody
        return broker

    # -- who takes part ---------------------------------------------------------------------------

    def _place_generators(self) -> None:
        """As many as there is room for, from the first free GPU on; a relay on every other node."""
        scenario = self._scenario
        cluster, weight_hub = scenario.tables.cluster, scenario.config.weight_hub
        engine = self._engine()
        network = scenario.tables.speed.network
        latency_s, nbytes = network.latency_s, int(network.weight_bytes)
        by_node: dict[int, _SimulatedNode] = {}
        for index in range(scenario.generators):
            gpu = scenario.first_generator_gpu + index * cluster.generator_gpus
            place = gpu // cluster.gpus_per_node
            node = by_node.get(place)
            if node is None:
                relay = None
                if place:  # the hub is on the first one
                    name = f"relay-{place}"
                    own = Hub(self.timeline, weight_hub.slots, weight_hub.pace, nbytes, latency_s)
                    relay = self._relays[name] = NodeRelay(
                        self.timeline, name, self.hub, own, self._wire,
                        lambda name: self.chain.join(name, name),
                    )  # fmt: skip
                node = by_node[place] = _SimulatedNode(relay, [])
            node.generators.append(self._make_generator(index, node, engine))
        self.nodes = list(by_node.values())

    def _make_generator(
        self, index: int, node: _SimulatedNode, engine: SimulatedEngine
    ) -> SimGenerator:
        hub = node.relay.own if node.relay is not None else self.hub
        generator = SimGenerator(
            self.timeline,
            f"generator-{index}",
            self.desk,
            hub,
            engine,
            lambda: self._generator_dies(node, generator, RESTART_S),
        )
        return generator

    def _engine(self) -> SimulatedEngine:
        scenario = self._scenario
        samples, speed = scenario.tables.samples, scenario.tables.speed
        return SimulatedEngine(
            model=scenario.engine,
            config=scenario.config.generator,
            chance=self._chance,
            prompt_tokens=samples.prompt_tokens,
            environment_s=samples.environment_s,
            reward=self._reward,
            stage_s=speed.network.weight_bytes / speed.network.local_bytes_per_s,
            spread_s=speed.network.spread_s,
            wait_s=max(1.0, scenario.generators / FEW),
        )

    def _make_scorers(self) -> list[SimScorer]:
        scenario, made = self._scenario, []
        stages = scenario.config.buffer.stages
        on_gpus = [stage for stage in stages if stage != "reward"]
        for stage in stages:
            speed = scenario.tables.speed.scoring.get(stage, ScoringSpeed())
            count = speed.workers
            if stage in on_gpus:  # the GPUs in turn
                gpus = range(scenario.tables.cluster.scorer_gpus)
                count = sum(gpu % len(on_gpus) == on_gpus.index(stage) for gpu in gpus)
            for index in range(count):
                name = f"{stage}-{index}"
                capacity = scenario.config.scorer.capacity
                made.append(
                    SimScorer(self.timeline, name, self.desk, stage, capacity, speed, _unexpected)
                )
        return made

    def _reward(self, task: SampleTask) -> float:
        """1 for every other sample, 0 for all of a group that is level."""
        share = self._scenario.tables.samples.level_share
        if share and self._chance.of(f"{task.group_id} level") < share:
            return 0.0
        return float(int(task.sample_id.rpartition("-")[2]) % 2)

    # -- who dies ---------------------------------------------------------------------------------

    def _generator_dies(
        self, node: _SimulatedNode, generator: SimGenerator, recovery_s: float
    ) -> bool:
        if not generator.is_alive:
            return False
        generator.die()

        def start() -> None:
            if node.is_up and not generator.is_alive:
                generator.start()

        self.timeline.after(recovery_s, start)
        return True

    def _node_dies(self, node: _SimulatedNode, recovery_s: float) -> bool:
        if not node.is_up:
            return False
        node.is_up = False
        if node.relay is not None:
            node.relay.die()
        for generator in node.generators:
            if generator.is_alive:
                generator.die()

        def start() -> None:
            node.is_up = True
            if node.relay is not None:
                node.relay.start()
            for generator in node.generators:
                if not generator.is_alive:
                    generator.start()

        self.timeline.after(recovery_s, start)
        return True

    def _trainer_dies(self, recovery_s: float) -> bool:
        if not self.trainer.is_alive or self.trainer.finished is not None:
            return False
        self.trainer.die()
        self.timeline.after(recovery_s, self.trainer.start)
        return True

    def _buffer_dies(self, recovery_s: float) -> bool:
        if self.desk.is_down:
            return False
        self.desk.crash(recovery_s)
        return True


def _unexpected() -> None:
    raise RuntimeError("a scorer that does not fail was taken for dead")
