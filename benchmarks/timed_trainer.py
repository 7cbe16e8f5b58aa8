"""`umbra trainer` with an update that takes a known time and learns nothing; the rest is real.

    python benchmarks/timed_trainer.py STEP_S TOKEN_S EVERY [flags of `umbra trainer`]

It joins the run, leases and commits batches, and publishes the weights of a (tiny) model after each
step. Only the update is left out: it sleeps for STEP_S + TOKEN_S * tokens of the batch, as if on
accelerators of its own. With EVERY > 0, one of EVERY weights changes, drawn at random, for there to
be something to send.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from noted import noting

from umbra.services.config import RunConfig
from umbra.services.process.command import ServiceContext, service_command
from umbra.services.process.parent import die_with_parent
from umbra.services.trainer.batch import TrainBatch
from umbra.services.trainer.critic import LearnedCritic
from umbra.services.trainer.learner import Learner
from umbra.services.trainer.metrics import Row
from umbra.services.trainer.service import run

SLICE_S = 0.5  # how soon it notices that it should stop


class TimedUpdate:
    """Takes the place of `PolicyUpdate`.

    Args:
        step_s: seconds of an update, whatever is in the batch.
        token_s: seconds for each of its tokens, those of prompts included.
        every: of so many weights one changes; 0 = none does.
    """

    def __init__(
        self,
        config: RunConfig,
        learner: Learner,
        critic: LearnedCritic | None,
        *,
        step_s: float,
        token_s: float,
        every: int,
    ) -> None:
        del config, critic
        self._learner = learner
        self._step_s = step_s
        self._token_s = token_s
        self._every = every

    def __call__(
        self, batch: TrainBatch, version: int, keep_going: Callable[[], bool]
    ) -> Row | None:
        """Let the time pass."""
        del version
        until = time.monotonic() + self._step_s + self._token_s * batch.tokens.ids.numel()
        if self._every:
            self._change()
        while (left := until - time.monotonic()) > 0:
            if not keep_going():
                return None
            time.sleep(min(left, SLICE_S))
        self._learner.updates += 1
        row: Row = dict.fromkeys(("mismatch/k3", "mismatch/k3_on_policy"))
        return row | {"loss": 0.0, "ess": 1.0, "skipped": 0.0}

    @torch.no_grad()
    def _change(self) -> None:
        for parameter in self._learner.model.parameters():
            flat = parameter.view(-1)
            flat[torch.randint(len(flat), (len(flat) // self._every,))] *= 1.02


def main() -> None:
    """Serve as the trainer of a run."""
    step_s, token_s, every = sys.argv[1:4]
    make_update = partial(
        TimedUpdate, step_s=float(step_s), token_s=float(token_s), every=int(every)
    )

    def serve(context: ServiceContext) -> int:
        return run(context, None, noting(make_update))

    service_command("trainer", serve).main(sys.argv[4:], prog_name="timed_trainer")


if __name__ == "__main__":
    die_with_parent()
    main()
