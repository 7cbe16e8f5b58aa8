"""Try a run before it starts: its model, chat template and environment.

    python -m umbra.services.generator.checks CONFIG ROWS [model [DIRECTORY]]

It is a process of its own since it runs the user's code, which may hang. "model" takes torch.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from umbra.proto.errors import UmbraError, UsageError
from umbra.services.config import EnvironmentConfig, RunConfig
from umbra.services.config.loader import load_config
from umbra.services.environments.pool import open_pool, outcomes_of
from umbra.services.environments.protocol import Opening, StepResult, prompt_messages
from umbra.services.environments.tools import calculator
from umbra.services.modeling.model_directory import check_model_dir
from umbra.services.modeling.pretrained import (
    import_without_torch,
    load_tokenizer,
    loading,
    named_tokens,
    read_generation,
    read_transformers_config,
    stop_ids,
)
from umbra.services.process.parent import die_with_parent

if TYPE_CHECKING:
    from umbra.services.modeling.chat import Chat

log = logging.getLogger(__name__)

_PLAIN, _TOOLS = Opening([]), Opening([], [calculator])

UNREAD = "no parser reads the tool calls that the model's chat template writes"
REMEDY = (
    "name one that does in model.parser (docs/models.md, Parsers), or set "
    "model.chat_template to a template whose calls are read"
)


class RowsToTry(msgspec.Struct, frozen=True):
    first: list[tuple[str, str, dict[str, Any]]]  # key of the prompts, environment's name or ""
    long: dict[str, dict[str, Any]]  # by their places


def row_bytes(row: dict[str, Any]) -> int:
    return len(msgspec.json.encode(row.get("prompt")))


def open_chat(config: RunConfig, model: Any = None, source: str = "model.path") -> Chat:
    """Return the chat of a run's model, which is not built if it is not given.

    Raises UsageError: no model or tokenizer, or settings that don't fit it; names `source`.
    """
    from umbra.services.modeling.chat import Chat  # brings Transformers

    tokenizer = load_tokenizer(config.model.path, source, trust=config.model.trust_remote_code)
    named = named_tokens(tokenizer, config.sampling.stop_tokens)
    if model is None:
        directory = check_model_dir(config.model.path, source, weights=False)
        with loading(directory, source):
            generation = read_generation(directory, read_transformers_config(directory))
        model = SimpleNamespace(generation_config=generation)
    return Chat.configured(config.model, tokenizer, named | stop_ids(model, tokenizer))


def check_template(environment: EnvironmentConfig, chat: Chat) -> None:
    """Raise UsageError if the template cannot write the environment's turns.

    Agents and classes of users may need several turns or not: for them it is a warning, and a
    sample that does need them fails.
    """
    kind = environment.kind
    if environment.max_turns == 1:
        return
    if kind == "guess":
        _check(chat, "user")
    elif kind == "tools":
        _check(chat, "tool", _TOOLS)
        if not chat.parser.calls:
            raise UsageError(f"{UNREAD}: {REMEDY}")
    elif environment.asks or ":" in kind:
        for role, opening in (("user", _PLAIN), ("tool", _TOOLS)):
            try:
                _check(chat, role, opening)
            except UsageError as error:
                log.warning("a sample fails if it needs this: %s", error)
        if not chat.parser.calls:
            log.warning("%s: agents that name tools are refused; %s", UNREAD, REMEDY)


def _check(chat: Chat, role: str, opening: Opening = _PLAIN) -> None:
    if not chat.check_turns([role], opening):
        log.info(
            "after a message of role %r the chat template drops parts of the model's earlier "
            "turns, such as reasoning; this run's samples keep them as they were sampled",
            role,
        )


def check_model(config: RunConfig, rows: RowsToTry) -> list[str]:
    """Try adapter, engine arguments and chat template, and write prompts; return warnings.

    Raises UsageError: one does not fit the model, or a first prompt leaves no room for an answer.
    """
    from umbra.services.modeling.models import outline_model  # brings torch

    outline = outline_model(config.model.path, checked=config.model.checked)
    if config.trainer.lora_rank:
        from umbra.services.modeling.lora import add_adapter

        add_adapter(outline, config.trainer, config.run.seed)
    if config.generator.engine == "vllm":
        from umbra.services.generator.vllm.options import check_run  # may bring vLLM

        check_run(config, outline)
    return check_chat(config, rows, outline)


def check_chat(config: RunConfig, rows: RowsToTry, model: Any = None) -> list[str]:
    """Do the part of `check_model` that needs no torch, without a `model`."""
    chat = open_chat(config, model)
    for environment in config.all_environments:
        check_template(environment, chat)
    return list(_prompt_warnings(config, chat, rows))


def _prompt_warnings(config: RunConfig, chat: Chat, rows: RowsToTry) -> Iterator[str]:
    limit, context = config.generator.max_context, 0
    key = f"generator.max_context = {limit}"
    for of, _, row in rows.first:
        tokens = context = _prompt_tokens(chat, row)
        _check_room(config, tokens, of)
        environment = config.environment_of(row)
        most = config.sampling_for(environment).max_tokens
        if limit - tokens < most:
            yield (
                f"the first of {of} has {tokens} tokens, so {key} leaves {limit - tokens} for an "
                f"answer, less than {environment.sampling_key('max_tokens')} = {most}: longer "
                "answers are cut off"
            )
    # A token is a byte at least; the first prompt has what the template adds.
    able = [(place, row) for place, row in rows.long.items() if row_bytes(row) + context >= limit]
    counts = [(place, _prompt_tokens(chat, row)) for place, row in able]
    too_long = [(place, tokens) for place, tokens in counts if tokens >= limit]
    for where, tokens in too_long[:1]:
        more = f", as in {len(too_long) - 1} more" if len(too_long) > 1 else ""
        yield (
            f"{where} has {tokens} tokens, which leaves no room for an answer in {key}{more}: "
            "samples of it fail; raise max_context, or leave it out"
        )


def _check_room(config: RunConfig, tokens: int, of: str = "data.prompts") -> None:
    if tokens >= (limit := config.generator.max_context):
        raise UsageError(
            f"the first of {of} has {tokens} tokens, which leaves no room for an answer in "
            f"generator.max_context = {limit}: raise it"
        )


def _prompt_tokens(chat: Chat, row: dict[str, Any]) -> int:
    try:
        return len(chat.prompt_ids(prompt_messages(row), []))
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"model.path: the chat template cannot write a prompt: {error}") from error


_LOOK_S = 0.01


def check_environment(config: RunConfig, row: dict[str, Any], *, light: bool = False) -> None:
    """Load the environment and put an empty response to `row` into it, or a whole group of them.

    A model can say nothing at all, so every reward must take an empty response. If there are more
    turns, the chat template must be able to write them; for that a `light` process does without
    torch. Agents are only loaded: they ask a model.

    Raises UsageError: the environment fails at that.
    """
    environment = config.environment
    if environment.asks and not environment.starts_agents:
        return  # its agents come to the generators
    key = "environment.reward" if environment.kind == "reward" else "environment.kind"
    size = config.buffer.group_size if environment.reward_scope == "group" else 1
    with closing(open_pool(environment)) as pool:
        plays = [
            outcome
            for text in (() if environment.asks else ([], [""] * size))
            for outcome in outcomes_of(pool, {"first": (row, text)}, lambda: time.sleep(_LOOK_S))
        ]
    for error in [outcome.error for outcome in plays if outcome.error]:
        raise UsageError(f"{key} fails on an empty answer to the first prompt: {error}")
    match [outcome.value for outcome in plays]:
        case [Opening() as opening, StepResult() as answer]:
            if not opening.tools and (environment.max_turns == 1 or answer.done):
                return  # no template writes tools or a later turn
            if light:
                import_without_torch()
            chat = open_chat(config)
            check_template(environment, chat)
            prompt = chat.prompt_ids(opening.messages, opening.tools)
            _check_room(config, len(prompt))
            if opening.tools and environment.max_turns != 1:
                _check(chat, "tool", opening)
            if not answer.done and prompt:
                last = min(chat.stop_ids)
                chat.turn_ids(answer.messages, last, answer.tool_calls, opening)


def main(path: str, rows: str, model: str = "", directory: str = "") -> int:
    """Check the environments of the configuration at `path`, then its `model`; print warnings.

    `rows` is a JSON file of RowsToTry.
    """
    die_with_parent()
    config = load_config(Path(path), environ={})
    if directory:
        config = replace(config, model=replace(config.model, path=directory))
    where, named = "", {environment.name: environment for environment in config.environments}
    try:
        tried = msgspec.json.decode(Path(rows).read_bytes(), type=RowsToTry)
        for of, name, row in tried.first:
            where = f"environment {name}: " if named else ""
            where += "eval.prompts: " if of == "eval.prompts" else ""
            own = replace(config, environment=named.get(name, config.environment))
            check_environment(own, row, light=not model)
        where = ""
        for warning in check_model(config, tried) if model else ():
            print(warning)
    except UmbraError as error:
        print(f"{where}{error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
