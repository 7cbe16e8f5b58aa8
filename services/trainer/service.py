"""The trainer as a service: loads the policy, joins the run, trains, exports, leaves."""

from __future__ import annotations

from contextlib import closing

from umbra.proto.errors import EXIT_DONE, UsageError
from umbra.proto.messages import FinishRun, RunFinished
from umbra.services.runtime.command import ServiceContext
from umbra.services.runtime.config import RunConfig
from umbra.services.runtime.manifest import build_manifest
from umbra.services.runtime.publisher import Publisher
from umbra.services.trainer.learner import Learner
from umbra.services.trainer.loop import Loop, Outlet
from umbra.services.trainer.policy import export_policy, load_policy
from umbra.services.trainer.snapshot import tensor_layout

HUB_DEADLINE_S = 60.0  # a hub starts within seconds; the rest is for slow machines
FINISH_S = 60.0  # the buffer ends and drains what is in flight


def run(context: ServiceContext) -> int:
    """Train to `run.steps`, write the model to `<run_dir>/model`, end the run; the exit code.

    Asked to stop before that, it leaves between two steps and exports nothing.

    Raises:
        UsageError: no run directory, or a model that cannot be loaded.
        UmbraError: a peer was lost, a wait ended without an answer, or a batch is not sound.
    """
    if context.run_dir is None:
        raise UsageError("--run-dir is missing: the trained model is written there")
    config = context.config
    sampling = config.sampling
    if sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0:
        context.log.warning(
            "sampling cuts off tokens (top_p, top_k or min_p): behaviour logprobs are those of the "
            "cut distribution and will differ from the trainer's"
        )
    model, tokenizer = load_policy(config.model.path)
    learner = Learner(model, config.trainer, config.run.steps)
    layout = tensor_layout(learner.model, config.weight_hub.dtype)
    manifest = build_manifest(layout, config.weight_hub.bucket_bytes)
    with context.join("trainer") as session:
        hub = session.weights(deadline_s=HUB_DEADLINE_S)
        with closing(Publisher(hub, manifest)) as publisher:
            publisher.register(config.weight_hub.deadline_s)
            loop = Loop(context, session, learner, Outlet(manifest, publisher))
            loop.publish()
            context.ready({"device": str(learner.device), "bytes": manifest.total_bytes})
            if loop.run():
                where = export_policy(learner.model, tokenizer, context.run_dir / "model")
                context.log.info("model written to %s", where)
                finish = FinishRun(reason="steps reached")
                ledger = session.data.call(finish, RunFinished, timeout_s=_finish_s(config)).ledger
                context.log.info("%d samples trained of %d issued", ledger.trained, ledger.issued)
                return EXIT_DONE
        context.log.info(
            "stopped at version %d: %s", loop.version, session.stop_reason or "by a signal"
        )
        return session.failure.exit_code if session.failure else EXIT_DONE


def _finish_s(config: RunConfig) -> float:
    """What the end of the run may take: an evaluation under way is completed before."""
    return FINISH_S + (config.eval.timeout_s if config.eval.every else 0.0)
