"""Supervised warm start: its target, that it is learned, and that a seed repeats it."""

import json
import re
from pathlib import Path

import pytest

from umbra import cli
from umbra.proto.errors import UsageError
from umbra.services.config import TrainerConfig
from umbra.services.trainer.make_model import make_model, make_tokenizer
from umbra.services.trainer.warm_start import (
    ChatMessage,
    WarmStartResult,
    join,
    read_conversations,
    tokenise,
    warm_start,
)

CHAT: list[ChatMessage] = [
    {"role": "user", "content": "a?"},
    {"role": "assistant", "content": "xy"},
    {"role": "user", "content": "b?"},
    {"role": "assistant", "content": "z"},
]


@pytest.fixture
def demos(tmp_path: Path) -> Path:
    path = tmp_path / "demos.jsonl"
    rows = [{"messages": CHAT}, {"messages": CHAT[:2]}, {"messages": CHAT[2:]}]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_model(tmp_path / "model", hidden=16, ff=32, layers=1)
    return tmp_path / "model"


def test_only_what_the_assistant_said_is_learned() -> None:
    tokenizer = make_tokenizer()
    tokens = join(tokenise([CHAT, CHAT[:2]], tokenizer))
    text = "<|user|>a?<|assistant|>xy<|end|><|user|>b?<|assistant|>z<|end|>"
    assert tokenizer.decode(tokens.ids) == text + "<|user|>a?<|assistant|>xy<|end|>"
    assert tokens.lengths.tolist() == [13, 7]
    learned = tokenizer.convert_ids_to_tokens(tokens.ids[tokens.learned].tolist())
    assert learned == ["x", "y", "<|end|>", "z", "<|end|>", "x", "y", "<|end|>"]
    assert tokens.owner.tolist() == [0] * 5 + [1] * 3
    tokenizer.chat_template = None
    with pytest.raises(UsageError, match="chat template"):
        tokenise([CHAT], tokenizer)


def run(model: Path, demos: Path, out: Path, seed: int = 0) -> WarmStartResult:
    config = TrainerConfig(learning_rate=1e-2, threads=1, device="cpu")
    return warm_start(model, demos, out, steps=30, batch=2, seed=seed, config=config)


def test_the_examples_become_likely_and_a_seed_repeats_the_weights(
    model: Path, demos: Path, tmp_path: Path
) -> None:
    outcome = run(model, demos, tmp_path / "a")
    assert outcome.first_loss > 4
    assert outcome.final_loss < 1
    assert run(model, demos, tmp_path / "b").final_loss == outcome.final_loss
    run(model, demos, tmp_path / "c", seed=1)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in "abc"]
    assert weights[0] == weights[1] != weights[2]


def test_the_command_says_how_the_loss_went(
    model: Path, demos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["sft", str(model), "--data", str(demos), "--out", str(tmp_path / "out")]
    assert cli.main([*args, "--steps", "10", "--batch", "2", "--threads", "1"]) == 0
    captured = capsys.readouterr()
    assert re.search(r"out: loss \d\.\d+ -> \d\.\d+ in 10 steps, ", captured.out)
    assert len(captured.err.splitlines()) == 10
    assert captured.err.startswith("step 1/10  loss ")
    assert cli.main([*args, "--steps", "2", "--batch", "2", "--threads", "1", "--json"]) == 0
    outcome = json.loads(capsys.readouterr().out)
    assert outcome["out"].endswith("/out") and outcome["steps"] == 2
    assert outcome.keys() == {"out", "steps", "first_loss", "final_loss", "seconds"}


def test_bad_examples_are_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    for message, reason in (
        ({"role": "user"}, 'row 1: needs "messages"'),
        ({"role": "user", "content": "x"}, "row 1: no message of the assistant"),
    ):
        path.write_text(json.dumps({"messages": [message]}))
        with pytest.raises(UsageError, match=reason):
            read_conversations(path)
