"""What samples with branches are refused with: by name, before a run starts."""

from __future__ import annotations

from typing import Any

import pytest

from umbra.proto.errors import UsageError
from umbra.services.config.loader import load_config
from umbra.services.config.rules import check_feasible

AGENT = ("environment.kind=agent", "environment.agent=my:agent")
BRANCHES = ("environment.branches=train",)


def check(*overrides: str) -> None:
    check_feasible(load_config(overrides=overrides, environ={}))


def test_agents_may_have_branches() -> None:
    check(*AGENT, *BRANCHES)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (BRANCHES, "is for programs that ask the model themselves"),
        (
            (*AGENT, *BRANCHES, "generator.max_context=131072"),
            "lower max_context to 65536",
        ),
        ((*AGENT, *BRANCHES, "trainer.objective=reinforce_pp"), "advantage = reinforce_pp"),
        (
            (*AGENT, *BRANCHES, "trainer.objective=reinforce_pp_baseline"),
            "advantage = reinforce_pp_baseline",
        ),
        ((*AGENT, *BRANCHES, "trainer.objective=ppo_critic"), "trainer.advantage = gae"),
        ((*AGENT, *BRANCHES, "trainer.objective=m2po"), "trainer.mask = m2po"),
        ((*AGENT, *BRANCHES, "trainer.overlong_buffer=4"), "trainer.overlong_buffer"),
        ((*AGENT, *BRANCHES, "trainer.overlong_filter=true"), "trainer.overlong_filter"),
        (
            (*AGENT, *BRANCHES, "trainer.objective=reinforce_pp", "trainer.kl_coef=0.1",
             'buffer.stages=["ref_logp"]'),
            "takes the KL of one response off the reward",
        ),
        ((*AGENT, *BRANCHES, "trainer.router_replay=true"), "trainer.router_replay"),
    ],
)  # fmt: skip
def test_what_is_not_proven_is_refused(overrides: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        check(*overrides)
