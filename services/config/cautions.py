"""What may be meant, and seldom is: said before a run starts, which it may nevertheless."""

from __future__ import annotations

from collections.abc import Iterator

from umbra.services.config import RunConfig
from umbra.services.config.objective_rules import lone_groups

# Rates of AdamW at which models of any size have been seen to learn; adapters take more.
LEAST_RATE, MOST_RATE, MOST_ADAPTER_RATE = 1e-8, 5e-3, 5e-2


def cautions(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Name and sentence of each."""
    trainer = config.trainer
    if config.model.trust_remote_code:
        yield (
            "trust_remote_code",
            "model.trust_remote_code = true: Python code of the model's repository may run, with "
            "all rights of this user, in trainer, generators, scorers and `umbra eval`",
        )
    if text := lone_groups(config):
        yield "lone_groups", text
    most = MOST_ADAPTER_RATE if trainer.lora_rank else MOST_RATE
    if trainer.optimizer == "adamw" and not LEAST_RATE <= trainer.learning_rate <= most:
        usual = "1e-5 to 1e-3 for an adapter" if trainer.lora_rank else "1e-7 to 1e-4"
        yield (
            "learning_rate",
            f"trainer.learning_rate = {trainer.learning_rate:g} is out of the usual range of "
            f"AdamW ({usual})",
        )
    if trainer.warmup_steps >= config.run.steps > 1:
        yield (
            "warmup",
            f"trainer.warmup_steps = {trainer.warmup_steps} is not less than run.steps = "
            f"{config.run.steps}: the learning rate never reaches its peak",
        )
    longest = max(config.all_environments, key=lambda one: config.sampling_for(one).max_tokens)
    if config.longest_turn >= config.generator.max_context:
        yield (
            "max_tokens",
            f"{longest.sampling_key('max_tokens')} = {config.longest_turn} does not fit into "
            f"generator.max_context = {config.generator.max_context}, which the prompt needs room "
            "in too: answers are cut off there",
        )
    batch = config.buffer.group_size * config.buffer.batch_groups
    if batch % trainer.minibatches:
        yield (
            "minibatches",
            f"trainer.minibatches = {trainer.minibatches} does not divide the {batch} samples of a "
            "batch: its updates are of different sizes",
        )
