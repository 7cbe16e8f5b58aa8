"""Every key of the configuration in words, for help texts and docs/config.md."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import get_type_hints

import msgspec
import msgspec.inspect as introspect

from umbra.services.config import NamedEnvironment, RunConfig, Section
from umbra.services.config.loader import ENVIRONMENTS, SECTIONS, bare, expected

READERS = {
    "run": "all processes",
    "model": "generators, trainer, scorers",
    "data": "buffer",
    "environment": "generators; scorers of stage reward",
    "environments": "buffer, generators",
    "sampling": "generators",
    "buffer": "buffer",
    "generator": "generators",
    "trainer": "trainer",
    "critic": "trainer",
    "checkpoint": "trainer",
    "weight_hub": "weight hub and its relays; trainer and generators for `dtype`",
    "scorer": "scorers",
    "eval": "`umbra up` before and after the run, the buffer within it",
    "metrics": "trainer",
    "security": "all processes",
    "log": "all processes",
}
WITH_FLAGS = ("buffer", "generator", "trainer", "weight_hub", "scorer")
_UNITS = {"_s": "seconds", "_bytes": "bytes", "_mib": "MiB", "_mb": "MiB", "_tokens": "tokens"}
_ODD_UNITS = {"max_context": "tokens", "least_rate": "bytes per second", "steps": "steps",
              "warmup_steps": "steps"}  # fmt: skip
_NO_UNITS = ("stop_tokens",)
# Keys that are chosen together, beside those that name each other in their meanings.
GROUPS = (
    ("buffer.run_ahead", "buffer.max_staleness", "buffer.stale_policy"),
    ("buffer.group_size", "buffer.batch_groups", "trainer.minibatches"),
    ("sampling.max_tokens", "environment.max_tokens", "generator.max_context"),
    ("sampling.max_tokens", "trainer.response_limit"),
    ("generator.device", "trainer.device", "weight_hub.plane"),
    ("generator.slots", "generator.sessions"),
    ("trainer.pack_tokens", "trainer.micro_tokens", "trainer.share_prompts"),
    ("trainer.learning_rate", "trainer.schedule", "trainer.warmup_steps", "run.steps"),
    ("trainer.ranks", "generator.tensor_parallel", "generator.count"),
    ("trainer.weights", "trainer.optimizer", "trainer.offload", "trainer.activation_checkpointing"),
    ("buffer.heartbeat_s", "buffer.dead_after_s", "buffer.stall_s", "generator.stall_s"),
    ("environment.timeout_s", "buffer.max_failed_share"),
    ("environment.setup_s", "environment.reset_s", "environment.timeout_s", "environment.score_s"),
    ("buffer.stages", "scorer.stage"),
    ("weight_hub.deadline_s", "weight_hub.least_rate"),
    ("eval.prompts", "eval.every", "eval.mode", "eval.run_samples", "eval.timeout_s"),
    ("data.prompts", "eval.prompts"),
    ("environment.kind", "environment.reward", "environment.rewards", "environment.agent"),
    ("environment.reward", "environment.rewards", "environment.reward_scope", "buffer.stages"),
    ("environment.kind", "environment.id", "environment.options"),
    ("environment.sandbox", "environment.sandbox_options"),
    ("environment.python", "environment.workers", "environment.memory_mb", "environment.setup_s"),
    ("sampling.stop", "sampling.stop_tokens"),
    ("sampling.temperature", "sampling.top_p", "sampling.top_k", "sampling.min_p"),
    ("sampling.temperature", "sampling.max_tokens", "environments.sampling"),
    ("buffer.straggler", "buffer.straggler_s", "buffer.min_survivors"),
    ("buffer.partial_policy", "buffer.partial_max_segments", "buffer.partial_max_age_s"),
    ("buffer.partial_max_segments", "generator.partial_flush_tokens"),
    ("buffer.oversample", "buffer.on_batch"),
    ("buffer.dynamic_sampling", "buffer.max_filtered", "buffer.prompt_attempts"),
    ("buffer.lease_s", "buffer.max_attempts"),
    ("buffer.score_lease_s", "buffer.score_attempts", "buffer.stages"),
    ("buffer.store", "buffer.store_max_bytes"),
    ("generator.engine", "generator.engine_args", "generator.tensor_parallel", "generator.device"),
    ("generator.serve", "generator.serve_key", "generator.serve_advertise"),
    ("generator.kv_policy", "buffer.max_staleness"),
    ("trainer.objective", "trainer.advantage", "buffer.group_size"),
    ("trainer.clip", "trainer.clip_low", "trainer.clip_high", "trainer.dual_clip"),
    ("trainer.kl_coef", "trainer.kl_estimator", "trainer.kl_to", "trainer.kl_in"),
    ("trainer.schedule", "trainer.final_lr_ratio"),
    ("trainer.optimizer", "trainer.betas", "trainer.weight_decay"),
    ("trainer.minibatches", "trainer.epochs"),
    ("trainer.precision", "trainer.weights", "weight_hub.dtype"),
    ("trainer.lora_rank", "trainer.lora_alpha", "trainer.lora_targets", "trainer.lora_publish"),
    ("trainer.max_mismatch", "trainer.on_mismatch", "trainer.mismatch_every"),
    ("trainer.ranks", "trainer.nodes", "trainer.replicas", "trainer.sequence_parallel"),
    ("trainer.ranks", "trainer.expert_parallel", "trainer.rank_timeout_s"),
    ("trainer.nodes", "trainer.rendezvous", "trainer.rendezvous_timeout_s"),
    ("trainer.advantage", "critic.kind"),
    ("checkpoint.every", "checkpoint.keep"),
    ("checkpoint.best_metric", "checkpoint.best_mode"),
    ("metrics.wandb", "metrics.wandb_project"),
    ("security.keys", "security.insecure", "weight_hub.listen", "run.broker"),
    ("buffer.advertise", "weight_hub.advertise"),
)


@dataclass(frozen=True, slots=True)
class Described:
    """A key: what it may be, what it is if not set ("" for nothing), its unit and its meaning."""

    section: str
    name: str
    value: str
    default: str
    unit: str
    meaning: str

    @property
    def path(self) -> str:
        """The key as `--set` takes it."""
        return f"{self.section}.{self.name}"


def related(keys: Iterable[Described]) -> dict[str, list[str]]:
    """For each key, in the order of `keys`, those that are read or chosen with it.

    They are those that its meaning names, those in whose meaning it is named, and those that are
    with it in one of `GROUPS`.
    """
    every = {key.path: key for key in keys}
    pairs = {(one, other) for group in GROUPS for one in group for other in group}
    for path, key in every.items():
        for word in re.findall(r"[a-z_]+(?:\.[a-z_]+)?", key.meaning):
            named = word if "." in word else f"{key.section}.{word}"
            if named in every and ("." in word or "_" in word):
                pairs |= {(path, named), (named, path)}
    return {
        one: [other for other in every if one != other and (one, other) in pairs] for one in every
    }


def shown_default(field: msgspec.structs.FieldInfo) -> str:
    """The default as one writes it after `--set section.key=`; "" if it is nothing."""
    value = field.default
    if field.default_factory is not msgspec.NODEFAULT:
        value = field.default_factory()
    if value is None or value is msgspec.NODEFAULT or value is msgspec.UNSET or value == "":
        return ""
    return value if isinstance(value, str) else json.dumps(msgspec.to_builtins(value))


def described() -> Iterator[Described]:
    """All keys, in the order of the schema; of [[environments]] those that [environment] lacks."""
    for section in SECTIONS:
        for field in msgspec.structs.fields(_struct(section)):
            if section == ENVIRONMENTS and field.name in SECTIONS["environment"]:
                continue
            kind = introspect.type_info(SECTIONS[section][field.name])
            schema = getattr(kind, "extra_json_schema", None) or {}
            yield Described(
                section,
                field.name,
                expected(bare(kind)),
                "of the objective" if field.default is None else shown_default(field),
                _unit(field.name),
                str(schema.get("description", "")),
            )


def _unit(name: str) -> str:
    if name in _NO_UNITS:
        return ""
    ending = next((unit for end, unit in _UNITS.items() if name.endswith(end)), "")
    return _ODD_UNITS.get(name, ending)


def section_summary(section: str) -> str:
    """The first line about a section."""
    return (_struct(section).__doc__ or "").strip().splitlines()[0]


def _struct(section: str) -> type[Section]:
    return NamedEnvironment if section == ENVIRONMENTS else get_type_hints(RunConfig)[section]
