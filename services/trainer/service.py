"""The trainer as a service: loads the policy, joins the run, trains, exports, leaves."""

from __future__ import annotations

import socket
from contextlib import ExitStack, closing

from umbra.proto.errors import EXIT_DONE
from umbra.services.config.loader import as_dict
from umbra.services.modeling.lora import adapter_facts
from umbra.services.modeling.model_directory import weights_checksum
from umbra.services.process.command import ServiceContext
from umbra.services.trainer.checkpoints.folder import CheckpointFolder
from umbra.services.trainer.checkpoints.saver import Saver
from umbra.services.trainer.checkpoints.state import resume
from umbra.services.trainer.critic import open_critic
from umbra.services.trainer.distributed.ranks import join_ranks
from umbra.services.trainer.learner import Learner, rank_device
from umbra.services.trainer.loop import Loop
from umbra.services.trainer.member import RunMember, join_run
from umbra.services.trainer.mismatch import MismatchCheck
from umbra.services.trainer.policy import export_policy, open_policy
from umbra.services.trainer.snapshot import Snapshots, row_owners, tensor_layout
from umbra.services.trainer.update import PolicyUpdate
from umbra.services.weights.manifest import build_manifest


def run(context: ServiceContext, listener: socket.socket | None = None) -> int:
    """Train to `run.steps`, write the model to `<run_dir>/model`, end the run; return an exit code.

    All ranks run this. It resumes from the newest whole checkpoint in `<run_dir>/checkpoints`.
    Asked to stop before the end, it leaves between two steps and exports nothing. `listener` is
    where the other ranks come to, if `launch` started them.

    Raises:
        UsageError: a model that cannot be loaded, or checkpoints of another one, or all damaged.
        UmbraError: a peer was lost, a wait ended without an answer, or a batch is not sound.
    """
    config, run_dir = context.config, context.run_dir
    assert run_dir is not None
    with join_ranks(config.trainer, listener, context.stopping) as ranks, ExitStack() as stack:
        device = rank_device(config.trainer, ranks)
        served = config.weight_hub.dtype_on(device.type)
        context.begin(
            f"on {device} ({config.trainer.computes_in(device.type)})", f"versions in {served}"
        )
        model, tokenizer, files = open_policy(
            config.model.path, checked=config.model.checked, trust=config.model.trust_remote_code
        )
        steps, seed, longest = config.run.steps, config.run.seed, config.longest_turn
        learner = Learner(model, config.trainer, steps, ranks, seed, files, longest)
        base = weights_checksum(config.model.path) if config.trainer.lora_rank else ""
        adapter = adapter_facts(config.trainer, base)
        alone = adapter is not None
        layout = tensor_layout(learner.model, served, adapter=alone)
        owners = row_owners(learner.model, ranks, adapter=alone)
        manifest = build_manifest(layout, config.weight_hub.bucket_bytes, owners, adapter)
        critic = open_critic(config, learner)
        models = [learner.state(base), *([critic.state] if critic is not None else [])]
        folder = CheckpointFolder(run_dir / "checkpoints", config.checkpoint, node=ranks.node)
        step = resume(folder, models, ranks)
        saver = stack.enter_context(closing(Saver(folder, models, ranks, step, as_dict(config))))
        snapshots = stack.enter_context(closing(Snapshots(learner.model, manifest, ranks)))
        if critic is not None:
            stack.enter_context(closing(critic))
        member: RunMember | None = None
        if ranks.rank == 0:
            joined = join_run(context, learner, manifest, tokenizer, folder, step)
            member = stack.enter_context(joined)
        update = PolicyUpdate(config, learner, critic, MismatchCheck(config, learner, step))
        loop = Loop(context, learner, update, snapshots, saver, member)
        if member is not None and step:
            member.resume(step)
        loop.publish()
        if member is not None:
            context.ready({"device": str(learner.device), "bytes": manifest.total_bytes})
        done = loop.run()
        loop.save()
        if done:
            weights = learner.weights()
            if member is not None:
                out = export_policy(learner.model, tokenizer, run_dir / "model", weights)
                context.log.info("model written to %s", out)
            if critic is not None:
                ranks.agree(True)  # the others wait here, however long the disk takes
                out = critic.export(run_dir / "critic")
                if member is not None:
                    context.log.info("critic written to %s", out)
        if member is None:
            return EXIT_DONE
        if done and member.finish():
            return EXIT_DONE
        session = member.session
        reason = session.stop_reason or "by a signal"
        context.log.info("stopped at version %d: %s", loop.version, reason)
        return session.failure.exit_code if session.failure else EXIT_DONE
