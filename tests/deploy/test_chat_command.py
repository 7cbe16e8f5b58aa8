"""`umbra chat`: who is talked to, what is remembered, and how answers come."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fakes.engine import ScriptedEngine

from umbra import cli
from umbra.deploy.commands import chat as chat_command
from umbra.deploy.commands.chat import CONTEXT, TOKENS, command
from umbra.deploy.files.run_folder import RunFolder
from umbra.proto.records import Sampling
from umbra.services.config import RunConfig
from umbra.services.generator.engines.opening import OpenEngine
from umbra.services.generator.talk import Talk
from umbra.services.modeling.chat import Chat
from umbra.services.modeling.models import load_tokenizer

Begin = Callable[..., tuple[Talk, list[str]]]


@pytest.fixture
def tokenizer(tiny_model_dir: Path) -> Any:
    return load_tokenizer(tiny_model_dir)


@pytest.fixture
def talk(tokenizer: Any) -> Begin:
    """Makes a conversation with a model that gives `answers`, and the texts that it was asked."""

    def make(*answers: str, stops: Sequence[str] = (), **options: Any) -> tuple[Talk, list[str]]:
        asked: list[str] = []
        end = tokenizer.eos_token_id

        def script(ids: Sequence[int]) -> list[int]:
            prompt = engine.requests[-1].prompt_ids
            if len(ids) == len(prompt):
                asked.append(tokenizer.decode(list(ids)))
            answer = tokenizer(answers[len(asked) - 1], add_special_tokens=False)["input_ids"]
            return [[*answer, end][len(ids) - len(prompt)]]

        engine = ScriptedEngine(script, stop_ids=frozenset({end}))
        chat = Chat(tokenizer, {end})
        opened = OpenEngine(engine, chat, "cpu")
        return Talk(opened, Sampling(max_tokens=64), list(stops), **options), asked

    return make


def said(conversation: Talk, text: str) -> list[str]:
    return [piece for piece in conversation.say(text) if piece]


def test_answers_come_piece_by_piece_and_are_remembered(talk: Begin) -> None:
    conversation, asked = talk("1 2 3", "4")
    pieces = said(conversation, "first")
    assert "".join(pieces) == "1 2 3"
    assert len(pieces) > 1
    said(conversation, "second")
    for part in ("first", "1 2 3", "second"):
        assert part in asked[1], asked[1]
    assert asked[1].startswith(asked[0])


def test_a_reset_forgets_all_but_the_system_message(talk: Begin) -> None:
    conversation, asked = talk("1", "2", system="3 4")
    said(conversation, "5")
    conversation.reset()
    said(conversation, "6")
    assert "3 4" in asked[1]
    assert "5" not in asked[1]


def test_an_answer_that_is_stopped_is_taken_back(talk: Begin) -> None:
    conversation, asked = talk("1 2 3 1 2 3", "4")
    answer = conversation.say("5")
    next(answer)
    answer.close()  # what Ctrl-C does
    said(conversation, "6")
    assert "5" not in asked[1]
    assert "1" not in asked[1]


def test_a_stop_string_ends_an_answer_and_is_no_part_of_it(talk: Begin) -> None:
    conversation, _ = talk("1 2 3 1 2 3", stops=["3 1"])
    assert "".join(said(conversation, "5")) == "1 2 "


def test_without_a_chat_template_each_text_is_continued_by_itself(
    tokenizer: Any, talk: Begin
) -> None:
    tokenizer.chat_template = None
    conversation, asked = talk("1", "2")
    assert "".join(said(conversation, "3 3")) == "1"
    said(conversation, "4 4")
    assert asked == ["3 3", "4 4"]


# -- the command ----------------------------------------------------------------------------------


def test_lines_that_are_piped_in_are_answered_by_a_real_model(tiny_model_dir: Path) -> None:
    words = [str(tiny_model_dir), "--temperature", "0", "--max-tokens", "5", "--device", "cpu"]
    once = CliRunner().invoke(command, words, input="1 2\n\n/reset\n1 2\n")
    assert once.exit_code == 0, once.output
    first, second = once.output.splitlines()
    assert first == second
    drawn = CliRunner().invoke(command, [*words[:1], *words[3:], "--seed", "1"], input="1 2\n")
    again = CliRunner().invoke(command, [*words[:1], *words[3:], "--seed", "1"], input="1 2\n")
    assert drawn.output == again.output


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[RunConfig, dict[str, Any]]]:
    """What conversations were opened with; none answers."""
    found: list[tuple[RunConfig, dict[str, Any]]] = []

    def remember(config: RunConfig, name: str, **options: Any) -> Talk:
        found.append((config, {"name": name, **options}))
        opened = OpenEngine(ScriptedEngine(lambda ids: [3]), None, "cpu")  # pyright: ignore[reportArgumentType]
        return Talk(opened, Sampling(), [])

    monkeypatch.setattr(Talk, "open", remember)
    return found


def run_with(trained: Path | None, **sections: Any) -> RunFolder:
    """A run in `runs/` here, with a trained model unless `trained` is None."""
    folder = RunFolder.create("runs", "run")
    folder.config.write_text(json.dumps(sections))
    if trained is not None:
        folder.model.symlink_to(trained)
    return folder


def test_a_run_is_talked_to_as_it_was_trained(
    tmp_path: Path,
    tiny_model_dir: Path,
    opened: list[tuple[RunConfig, dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = run_with(
        tiny_model_dir,
        model={"path": "elsewhere", "chat_template_kwargs": {"thinking": False}},
        sampling={"top_p": 0.5, "max_tokens": 99},
        trainer={"lora_rank": 8},
        generator={"engine": "vllm", "engine_args": {"x": 1}, "device": "cpu"},
    )
    for words in ([], [folder.id], [str(folder.path), "--temperature", "0", "--system", "be kind"]):
        assert CliRunner().invoke(command, words, input="").exit_code == 0
    (first, options), (second, _), (_, greedy) = opened
    assert first == second
    assert first.model.path == str(folder.model)
    assert first.model.chat_template_kwargs == {"thinking": False}
    assert (first.sampling.top_p, first.sampling.max_tokens) == (0.5, 99)
    assert (first.generator.engine, first.generator.engine_args) == ("torch", {})
    assert first.generator.slots == 1
    assert first.trainer.lora_rank == 0  # an exported model has its adapter in it
    assert (options["greedy"], greedy["greedy"], greedy["system"]) == (False, True, "be kind")


def test_a_models_folder_gets_room(
    tiny_model_dir: Path, opened: list[tuple[RunConfig, dict[str, Any]]]
) -> None:
    flags = ["--engine", "vllm", "--max-tokens", "7", "--temperature", "0.5"]
    assert CliRunner().invoke(command, [str(tiny_model_dir)], input="").exit_code == 0
    assert CliRunner().invoke(command, [str(tiny_model_dir), *flags], input="").exit_code == 0
    (plain, _), (told, _) = opened
    limit = json.loads((tiny_model_dir / "config.json").read_text())["max_position_embeddings"]
    assert plain.generator.max_context == min(limit, CONTEXT)
    assert (plain.sampling.max_tokens, told.sampling.max_tokens) == (TOKENS, 7)
    assert (told.generator.engine, told.sampling.temperature) == ("vllm", 0.5)


def test_a_name_on_the_hub(
    tiny_model_dir: Path,
    opened: list[tuple[RunConfig, dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def check(name: str, source: str) -> Path:
        asked.append(name)
        return tiny_model_dir

    monkeypatch.setattr(chat_command, "check_model_dir", check)
    assert CliRunner().invoke(command, ["an-org/a-model"], input="").exit_code == 0
    assert asked == [opened[0][0].model.path] == ["an-org/a-model"]


def test_who_cannot_be_talked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["chat", "nobody"]) == 2
    assert "nobody is no run" in capsys.readouterr().err
    folder = run_with(None)
    assert cli.main(["chat"]) == 2
    said = capsys.readouterr().err
    assert f"run {folder.id} has no trained model yet: wait for its end, or write" in said
    assert cli.main(["chat", "runs/misspelt"]) == 2
    assert "runs/misspelt is no run" in capsys.readouterr().err


def test_what_is_piped_in_and_does_not_fit_is_refused(tiny_model_dir: Path) -> None:
    words = ["chat", str(tiny_model_dir), "--device", "cpu"]
    done = CliRunner().invoke(command, words[1:], input="1 " * CONTEXT + "\n")
    assert "do not fit a context of" in str(done.exception)
    assert "/reset begins a new conversation" in str(done.exception)
