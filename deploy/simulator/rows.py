"""What a simulated generator works on, and with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from umbra.deploy.simulator.answers import Chance, size_of
from umbra.proto.records import SampleTask
from umbra.services.config import GeneratorConfig as GeneratorConfig
from umbra.services.generator.replay_model import ReplayModel


@dataclass(frozen=True, slots=True)
class SimulatedEngine:
    """What all generators share.

    `wait_s` is how long a question for work may stay open, `stage_s` how long a version is copied
    and checked, up to `spread_s` more at random.
    """

    model: ReplayModel
    config: GeneratorConfig
    chance: Chance
    prompt_tokens: int
    environment_s: float
    reward: Callable[[SampleTask], float]
    stage_s: float
    spread_s: float
    wait_s: float

    def staging_s(self, name: str, version: int) -> float:
        """How long the engine called `name` takes to have `version` staged."""
        return self.stage_s + self.spread_s * self.chance.of(f"{name} has version {version}")

    @property
    def drains(self) -> bool:
        """Whether samples are finished before new weights are loaded."""
        return self.config.kv_policy == "drain"


@dataclass(slots=True)
class SimulatedRow:
    """A sample under way."""

    task: SampleTask
    total: int  # tokens that it will have
    done: int = 0  # those before what the engine decodes now
    versions: list[int] = field(default_factory=list[int])  # of its tokens, in order
    marked: int = 0  # tokens of what the engine decodes now whose version is known
    decoding: bool = True  # else it waits for its environment

    @property
    def name(self) -> str:
        return self.task.sample_id

    @property
    def kept_before(self) -> int:
        """Tokens of the partial that it began with."""
        partial = self.task.partial
        return 0 if partial is None else int(size_of(partial)[0])

    def add_version(self, version: int) -> None:
        """Some of its tokens are of `version`."""
        if not self.versions or self.versions[-1] != version:
            self.versions.append(version)
