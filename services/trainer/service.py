"""The trainer as a service: loads the policy, joins the run, trains, exports, leaves."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import closing, nullcontext

from transformers import PreTrainedTokenizerBase

from umbra.proto.errors import EXIT_DONE, UsageError
from umbra.proto.messages import FinishRun, RunFinished
from umbra.proto.records import Manifest
from umbra.services.config import RunConfig
from umbra.services.config.loader import as_dict
from umbra.services.modeling.lora import adapter_facts
from umbra.services.modeling.model_directory import weights_checksum
from umbra.services.process.command import ServiceContext
from umbra.services.trainer.checkpoints.folder import CheckpointFolder
from umbra.services.trainer.checkpoints.loader import resume
from umbra.services.trainer.checkpoints.saver import Saver
from umbra.services.trainer.critic import LearnedCritic, open_critic
from umbra.services.trainer.distributed.commands import (
    Export,
    Gather,
    Stop,
    follow_commands,
    send_command,
)
from umbra.services.trainer.distributed.ranks import join_ranks
from umbra.services.trainer.distributed.shards import Snapshots, row_owners
from umbra.services.trainer.learner import Learner
from umbra.services.trainer.loop import Loop
from umbra.services.trainer.phases import Profile
from umbra.services.trainer.policy import export_policy, open_policy
from umbra.services.trainer.rollout_log import RolloutLog
from umbra.services.trainer.sinks import open_sinks
from umbra.services.trainer.snapshot import tensor_layout
from umbra.services.trainer.update import Update, guarded_update
from umbra.services.weights.manifest import build_manifest
from umbra.services.weights.publisher import Publisher

HUB_DEADLINE_S = 60.0  # a hub starts within seconds; the rest is for slow machines
FINISH_S = 60.0  # the buffer ends and drains what is in flight


def run(
    context: ServiceContext,
    listener: socket.socket | None = None,
    make_update: Callable[[RunConfig, Learner, LearnedCritic | None], Update] = guarded_update,
) -> int:
    """Train to `run.steps`, write the model to `<run_dir>/model`, end the run; the exit code.

    Goes on from the newest whole checkpoint in `<run_dir>/checkpoints`, if there is one. Asked to
    stop before the end, it leaves between two steps and exports nothing. `listener` is where the
    other ranks come to, if `launch` started them. `make_update` makes what learns from batches.

    Raises:
        UsageError: no run directory, a model that cannot be loaded, or checkpoints that are of
            another one, or all damaged.
        UmbraError: a peer was lost, a wait ended without an answer, or a batch is not sound.
    """
    if context.run_dir is None:
        raise UsageError("--run-dir is missing: the trained model is written there")
    config = context.config
    if any(config.sampling_for(one).cuts_off for one in config.all_environments):
        context.log.warning(
            "sampling cuts off tokens (top_p, top_k or min_p): behaviour logprobs are those of the "
            "cut distribution and will differ from the trainer's"
        )
    with join_ranks(config.trainer, listener, context.stopping) as ranks:
        model, tokenizer, files = open_policy(
            config.model.name,
            checked=config.model.checked,
            trust=config.model.trust_remote_code,
        )
        learner = Learner(
            model,
            config.trainer,
            config.run.steps,
            ranks,
            config.run.seed,
            files,
            config.longest_turn,
        )
        base = weights_checksum(config.model.name) if config.trainer.lora_rank else ""
        adapter = adapter_facts(config.trainer, base)
        alone = adapter is not None
        served = config.weight_hub.dtype_on(learner.device.type)
        layout = tensor_layout(learner.model, served, adapter=alone)
        owners = row_owners(learner.model, ranks, adapter=alone)
        manifest = build_manifest(layout, config.weight_hub.bucket_bytes, owners, adapter)
        critic = open_critic(config, learner)
        update = make_update(config, learner, critic)
        parts = learner.parts(base) | (critic.parts() if critic is not None else {})
        folder = CheckpointFolder(
            context.run_dir / "checkpoints", config.checkpoint, node=ranks.node
        )
        step = resume(folder, parts, ranks)
        with (
            closing(Snapshots(learner.model, manifest, ranks)) as snapshots,
            closing(critic) if critic is not None else nullcontext(),
            closing(
                Saver(
                    folder,
                    parts,
                    ranks,
                    every=config.checkpoint.every,
                    begun=step,
                    run=context.run_dir.name,
                    config=as_dict(config),
                )
            ) as saver,
        ):
            if ranks.rank:
                profile = Profile(
                    context.run_dir / "profile", config.trainer.profile_steps, ranks.rank
                )
                say = context.log.info
                follow_commands(ranks, learner, update, snapshots, critic, saver, profile, say)
                return EXIT_DONE
            code = _lead(context, learner, update, snapshots, critic, manifest, tokenizer, saver)
            send_command(ranks, Stop("rank 0 has left the run"))
            return code


def _lead(
    context: ServiceContext,
    learner: Learner,
    update: Update,
    snapshots: Snapshots,
    critic: LearnedCritic | None,
    manifest: Manifest,
    tokenizer: PreTrainedTokenizerBase,
    saver: Saver,
) -> int:
    """What rank 0 does, and alone does towards the run."""
    config = context.config
    assert context.run_dir is not None
    vocabulary, routers = learner.model.config.vocab_size, learner.replayed
    with context.join("trainer", vocabulary=vocabulary, routers=routers) as session:
        hub, pace = session.weights(deadline_s=HUB_DEADLINE_S), config.weight_hub.pace
        with (
            closing(Publisher(hub, manifest, session.stopping, pace)) as publisher,
            open_sinks(config, context.run_dir, saver.begun) as sinks,
            closing(
                RolloutLog(
                    context.run_dir,
                    tokenizer,
                    config.log.samples,
                    lambda row: session.emit("rollout", **row),
                )
            ) as rollouts,
        ):
            publisher.register(pace.limit_s(config.weight_hub.slots * manifest.total_bytes))
            loop = Loop(
                context, session, learner, update, snapshots, publisher, saver, sinks, rollouts
            )
            loop.resume()
            loop.publish()
            context.ready({"device": str(learner.device), "bytes": manifest.total_bytes})
            with closing(loop):
                done = loop.run()
            loop.save()
            if done:
                send_command(learner.ranks, Gather())
                weights = learner.weights()
                out = context.run_dir / "model"
                context.log.info(
                    "model written to %s", export_policy(learner.model, tokenizer, out, weights)
                )
                if critic is not None:
                    out = context.run_dir / "critic"
                    send_command(learner.ranks, Export(str(out)))
                    context.log.info("critic written to %s", critic.export(out))
                finish = FinishRun(reason="steps reached")
                end = session.data.call(finish, RunFinished, timeout_s=_finish_s(config))
                sinks.write_evals(end.evals)
                ledger = end.ledger
                context.log.info("%d samples trained of %d issued", ledger.trained, ledger.issued)
                return EXIT_DONE
        context.log.info(
            "stopped at version %d: %s", loop.version, session.stop_reason or "by a signal"
        )
        return session.failure.exit_code if session.failure else EXIT_DONE


def _finish_s(config: RunConfig) -> float:
    """What the end of the run may take: an evaluation under way is completed before."""
    return FINISH_S + (config.eval.timeout_s if config.eval.prompts else 0.0)
