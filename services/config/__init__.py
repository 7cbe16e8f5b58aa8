"""The run's configuration: one typed tree, filled from defaults < TOML file < environment < --set.

Each section belongs to one service. The descriptions of its keys are the documentation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from umbra.services.config.generation import (
    ENVIRONMENT,
    EnvironmentConfig,
    GeneratorConfig,
    NamedEnvironment,
    SamplingConfig,
    ScorerConfig,
)
from umbra.services.config.keys import Section
from umbra.services.config.run import (
    BufferConfig,
    DataConfig,
    LogConfig,
    ModelConfig,
    RunSection,
    SecurityConfig,
    WeightHubConfig,
)
from umbra.services.config.training import (
    CheckpointConfig,
    CriticConfig,
    EvalConfig,
    MetricsConfig,
    TrainerConfig,
)


class RunConfig(Section):
    """The whole tree: what a run file holds."""

    run: RunSection = RunSection()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    environments: tuple[NamedEnvironment, ...] = ()
    sampling: SamplingConfig = SamplingConfig()
    buffer: BufferConfig = BufferConfig()
    generator: GeneratorConfig = GeneratorConfig()
    trainer: TrainerConfig = TrainerConfig()
    critic: CriticConfig = CriticConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    weight_hub: WeightHubConfig = WeightHubConfig()
    scorer: ScorerConfig = ScorerConfig()
    eval: EvalConfig = EvalConfig()
    metrics: MetricsConfig = MetricsConfig()
    security: SecurityConfig = SecurityConfig()
    log: LogConfig = LogConfig()

    @property
    def all_environments(self) -> tuple[EnvironmentConfig, ...]:
        return self.environments or (self.environment,)

    def environment_of(self, row: Mapping[str, Any]) -> EnvironmentConfig:
        """Return the environment of a prompt's `row`: the one that it names, or the only one."""
        matches = (one for one in self.environments if one.name == row.get(ENVIRONMENT))
        return next(matches, self.environment)

    @property
    def rewarded_by_groups(self) -> tuple[EnvironmentConfig, ...]:
        """Return the environments whose rewards are given to all samples of a prompt at once."""
        return tuple(e for e in self.all_environments if e.reward_scope == "group")

    @property
    def rewarded_by_scorers(self) -> tuple[EnvironmentConfig, ...]:
        """Return the environments whose rewards stage "reward" computes."""
        if "reward" not in self.buffer.stages:
            return ()
        return self.rewarded_by_groups if self.environments else (self.environment,)

    def sampling_for(self, environment: EnvironmentConfig) -> SamplingConfig:
        return msgspec.structs.replace(self.sampling, **environment.own_sampling)

    @property
    def longest_turn(self) -> int:
        return max(self.sampling_for(e).max_tokens for e in self.all_environments)
