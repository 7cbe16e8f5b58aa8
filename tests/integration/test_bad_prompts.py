"""A run some of whose prompts cannot be answered: they are named, the others are trained on."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from test_up import UpProcess, up

__all__ = ["up"]  # a fixture


@pytest.mark.e2e
@pytest.mark.timeout(180)
def test_prompts_that_are_too_long_are_left_out(
    project: Path, up: Callable[..., UpProcess]
) -> None:
    rows = [{"prompt": f"say {word}" * (40 if word == "b" else 1), "word": word} for word in "abcd"]
    (project / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    process = up("run.steps=2", "data.shuffle=false")
    summary = process.finish()
    assert process.popen.returncode == 0, process.lines
    ledger = summary["ledger"]
    assert (summary["steps"], ledger["trained"], ledger["balance"]) == (2, 2 * 16, 0)
    assert ledger["ended"]["failed"] >= 4
    log = (process.run_dir / "logs" / "generator-0.log").read_text()
    assert (
        ": prompt 2: the prompt has 202 tokens, which leaves no room for an answer in the context "
        "length, generator.max_context = 64\n"
    ) in log
