"""Puts a scorer together from its configuration and runs it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import closing
from functools import cache
from typing import TYPE_CHECKING, Any

from umbra.proto.net.session import Session
from umbra.services.config import RunConfig
from umbra.services.environments.protocol import Row
from umbra.services.modeling.model_directory import weights_bytes
from umbra.services.process.command import ServiceContext
from umbra.services.scorer.loop import score_stage
from umbra.services.weights.planes.receiving import open_planes
from umbra.services.weights.receiver import Receiver, StagedVersion

if TYPE_CHECKING:
    from umbra.services.scorer.reward import RewardWorker


def run(context: ServiceContext) -> int:
    """Score until the run ends or this process has to stop.

    Raises:
        UsageError: no model or reward where the configuration says.
        UmbraError: a peer was lost.
    """
    config = context.config
    stage = context.options["stage"]
    if stage == "reward":
        context.begin("stage reward, without a model")
    reward = reward_worker(config) if stage == "reward" else None
    with context.join("scorer") as session:
        if reward is not None:
            context.ready({"stage": stage})
            with closing(reward):
                score_stage(context, session, reward)
        else:
            _score_logprobs(context, session)
        if session.failure is not None:
            raise session.failure
        return 0


def reward_worker(config: RunConfig) -> RewardWorker:
    """Return the worker of stage "reward". Needs a tokenizer, but no model."""
    from umbra.services.environments.pool import open_rewards
    from umbra.services.modeling.chat import Chat
    from umbra.services.modeling.pretrained import load_tokenizer, named_tokens
    from umbra.services.scorer.reward import RewardWorker

    tokenizer = load_tokenizer(config.model.name, trust=config.model.trust_remote_code)
    stops = named_tokens(tokenizer, config.sampling.stop_tokens) | {tokenizer.eos_token_id} - {None}
    wake = threading.Event()

    def wait(seconds: float) -> None:
        wake.wait(seconds)
        wake.clear()

    def stop_strings(row: Row) -> Sequence[str]:
        return config.sampling_for(config.environment_of(row)).stop

    chat = Chat.configured(config.model, tokenizer, stops)
    whole = bool(config.rewarded_by_groups)
    return RewardWorker(chat, open_rewards(config, wake=wake.set), wait, stop_strings, whole=whole)


def _score_logprobs(context: ServiceContext, session: Session) -> None:
    import torch

    from umbra.services.modeling.models import load_model, pick_device
    from umbra.services.modeling.weights import weight_table
    from umbra.services.scorer.logprobs import LogprobWorker, ReferenceWorker, check_tokens

    config, scorer, stage = context.config, context.config.scorer, context.options["stage"]
    device = pick_device(scorer.device, "scorer.device")
    dtype = config.weight_hub.dtype_on(device.type)
    longest = config.longest_turn
    context.begin(f"stage {stage} on {device} ({dtype})", f"plane {config.weight_hub.plane}")

    def load(path: str, source: str) -> Any:
        return load_model(path, device, getattr(torch, dtype), source, config.model.checked)

    if stage == "ref_logp":

        @cache
        def reference(path: str) -> LogprobWorker:
            source = "scorer.model" if scorer.models else "model.path"
            check_tokens(config, path)
            return LogprobWorker(load(path, source), config.trainer, max_tokens=longest)

        models = scorer.models or {"": config.model.name}
        references = ReferenceWorker({name: reference(path) for name, path in models.items()})
        context.ready({"stage": stage, "model": ", ".join(dict.fromkeys(models.values()))})
        score_stage(context, session, references)
        return
    path = config.model.name
    model = load(path, "model.path")
    limit_s = config.weight_hub.first_version_s(weights_bytes(path))
    channel = session.weights(deadline_s=limit_s)
    table = weight_table(model, config)
    version = -1
    planes = open_planes(config.weight_hub, str(device))
    expected = config.weight_hub.expected_on(device.type)
    with closing(Receiver(channel, planes, dtype=expected)) as receiver:
        receiver.subscribe(limit_s)
        staged: StagedVersion | None = None

        def apply(staged: StagedVersion) -> None:
            table.load(staged.manifest, staged.data, staged.guard)

        def refresh() -> int:
            nonlocal staged, version
            staged = staged or receiver.poll()
            if staged is not None:
                loaded = receiver.load(staged, apply, limit_s, session.stopping)
                version, staged = loaded.version if loaded is not None else version, None
            return version

        while version < 0 and not session.stopping.is_set():
            staged = staged or receiver.wait_first(limit_s, session.stopping)
            refresh()
        context.ready({"stage": stage, "version": version})
        replay = config.trainer.router_replay  # as the policy that it stands for
        worker = LogprobWorker(model, config.trainer, refresh, replay=replay, max_tokens=longest)
        # Also while there is nothing to score, so that the hub need not wait.
        score_stage(context, session, worker, refresh)
