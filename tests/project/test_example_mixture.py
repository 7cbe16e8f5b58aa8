"""The mixture of examples/reasoning-gym: its questions and rewards, and the learning."""

import runpy
from pathlib import Path
from typing import Any

from umbra.services.config.loader import load_config
from umbra.services.environments.loading import load_environment
from umbra.services.environments.protocol import StepResult
from umbra.services.process.files import read_jsonl
from umbra.services.trainer.make_model import CHARACTERS

FOLDER = Path(__file__).parents[2] / "examples" / "reasoning-gym"
PROGRAM: dict[str, Any] = runpy.run_path(str(FOLDER / "prepare.py"))
SIZES = ("--hidden", "512", "--layers", "4", "--heads", "8", "--kv-heads", "4", "--ff", "1152")


def test_rows_fit_their_environments_and_the_limits(tmp_path: Path) -> None:
    """Each row is for an environment of the run, which rewards its answer; all of it has room."""
    config = load_config(FOLDER / "run.toml", environ={})
    environments = {one.name: load_environment(one) for one in config.environments}
    assert list(environments) == list(PROGRAM["TASKS"])
    PROGRAM["write"](tmp_path, prompts=40, heldout=4, demos=12)
    prompts, held, demos = (
        read_jsonl(tmp_path / f"{name}.jsonl") for name in ("prompts", "heldout", "demos")
    )
    names = [row["environment"] for row in prompts]
    assert names == list(environments) * 40, "they take turns"
    assert len(held) == 12
    for row in [*prompts, *held]:
        world = environments[row["environment"]]()
        world.reset(row)
        right, wrong = world.step(row["answer"]), world.step("?")
        assert isinstance(right, StepResult)
        assert isinstance(wrong, StepResult)
        assert (right.reward, wrong.reward < 0.5) == (1.0, True)
        assert set(row["prompt"]) <= set(CHARACTERS)
        assert len(row["answer"]) < config.sampling.max_tokens
        told = len(row["prompt"]) + 2  # the marks of user and assistant
        assert told + config.sampling.max_tokens <= config.generator.max_context
    assert len({demo["messages"][0]["content"] for demo in demos}) > 12
