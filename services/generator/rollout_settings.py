"""What a run's configuration says about its rollouts, for each of its environments."""

from __future__ import annotations

from collections.abc import Mapping

from umbra.services.config import EnvironmentConfig, RunConfig
from umbra.services.config.trajectory_rules import sampling_of
from umbra.services.generator.rollout import Limits, RolloutSettings
from umbra.services.modeling.chat import Chat


def settings_for(
    config: RunConfig, chat: Chat, *, generator: str = "", greedy: bool = False
) -> RolloutSettings:
    """The settings of rollouts in the configured environment, or in each of several.

    Args:
        config: the run.
        chat: turns messages into tokens and back.
        generator: name of the process, which trajectories have.
        greedy: take the most likely token instead of sampling.
    """

    def one(
        environment: EnvironmentConfig, several: Mapping[str, RolloutSettings]
    ) -> RolloutSettings:
        sampling = config.sampling_for(environment)
        return RolloutSettings(
            chat=chat,
            sampling=sampling_of(sampling, greedy=greedy),
            max_context=config.generator.max_context,
            limits=Limits(
                environment.max_turns,
                environment.max_tokens,
                environment.max_s,
                environment.max_branches if environment.branches == "train" else 1,
            ),
            stops=tuple(sampling.stop),
            generator=generator,
            agents=environment.asks,
            several=several,
        )

    return one(config.environment, {each.name: one(each, {}) for each in config.environments})
