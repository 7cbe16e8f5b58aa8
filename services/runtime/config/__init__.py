"""The run's configuration: one typed tree, filled from defaults < TOML file < environment < flags.

Each section belongs to one service, and that service's flags are generated from it (`command.py`),
so that file, environment and command line can't drift apart. Field descriptions are the
documentation.
"""

from __future__ import annotations

from umbra.services.runtime.config.base import Section
from umbra.services.runtime.config.buffer import Buffer
from umbra.services.runtime.config.checkpoint import Checkpoint
from umbra.services.runtime.config.critic import Critic
from umbra.services.runtime.config.generation import Environment, Generator, SamplingConfig, Scorer
from umbra.services.runtime.config.metrics import Metrics
from umbra.services.runtime.config.run import Data, Log, Model, Run
from umbra.services.runtime.config.security import Security
from umbra.services.runtime.config.training import Eval, Trainer
from umbra.services.runtime.config.weights import WeightHub

__all__ = [
    "Buffer",
    "Checkpoint",
    "Critic",
    "Data",
    "Environment",
    "Eval",
    "Generator",
    "Log",
    "Metrics",
    "Model",
    "Run",
    "RunConfig",
    "SamplingConfig",
    "Scorer",
    "Section",
    "Security",
    "Trainer",
    "WeightHub",
]


class RunConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole tree: what a run file holds."""

    run: Run = Run()
    model: Model = Model()
    data: Data = Data()
    environment: Environment = Environment()
    sampling: SamplingConfig = SamplingConfig()
    buffer: Buffer = Buffer()
    generator: Generator = Generator()
    trainer: Trainer = Trainer()
    critic: Critic = Critic()
    checkpoint: Checkpoint = Checkpoint()
    weight_hub: WeightHub = WeightHub()
    scorer: Scorer = Scorer()
    eval: Eval = Eval()
    metrics: Metrics = Metrics()
    security: Security = Security()
    log: Log = Log()
