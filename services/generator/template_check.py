"""Whether a run's environment can go on after the model's first turn, with the model's template.

Asked before anything is generated: what an environment says must stand in the tokens as the chat
template writes it, and a template that can't be continued that way is no reason to lose samples.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from umbra.proto.errors import UsageError
from umbra.services.config import EnvironmentConfig, RunConfig
from umbra.services.environments.calculator import calculator
from umbra.services.environments.protocol import Opening, StepResult
from umbra.services.environments.tools import schema
from umbra.services.modeling.chat import Chat

_TOOLS = Opening([], [schema(calculator)])

UNREAD = "nothing here reads the tool calls that the model's chat template writes"
REMEDY = (
    "name one that does in model.parser (docs/agents.md, Parsers), or set model.chat_template to "
    "a template whose calls are read"
)

log = logging.getLogger(__name__)


def open_chat(config: RunConfig) -> Chat:
    """The chat of a run's model, whose weights are not read.

    Raises:
        UsageError: no model or tokenizer, or settings that don't fit it.
    """
    from umbra.services.modeling.models import (
        load_tokenizer,
        named_tokens,
        outline_model,
        stop_ids,
    )

    tokenizer = load_tokenizer(config.model.name, trust=config.model.trust_remote_code)
    named = named_tokens(tokenizer, config.sampling.stop_tokens)
    stops = named | stop_ids(outline_model(config.model.name), tokenizer)
    return Chat.configured(config.model, tokenizer, stops)


def check_template(environment: EnvironmentConfig, chat: Chat) -> None:
    """Check what is known of the environment from its kind.

    Agents and classes of users may need several turns or not: for them it is a warning, and a
    sample that does need them fails.

    Raises:
        UsageError: the template can't do what the environment needs; says why.
    """
    kind = environment.kind
    if environment.max_turns == 1:
        return
    if kind == "guess":
        _check(chat, ["user"])
    elif kind == "tools":
        _check(chat, ["tool"], _TOOLS)
        _check_readable(chat)
    elif environment.asks or ":" in kind:
        for roles, opening in ((["user"], Opening([])), (["tool"], _TOOLS)):
            try:
                _check(chat, roles, opening)
            except UsageError as error:
                log.warning("a sample fails if it needs this: %s", error)
        if not chat.parser.calls:
            log.warning("%s: agents that name tools are refused; %s", UNREAD, REMEDY)


def check_play(config: RunConfig, opening: Opening, answer: StepResult) -> None:
    """Check the first turns of an environment; a model is looked at only if there are several.

    Raises:
        UsageError: as of `check_template`.
    """
    environment = config.environment
    several = not answer.done or bool(opening.tools)
    if environment.max_turns == 1 or not several:
        return
    chat = open_chat(config)
    check_template(environment, chat)
    prompt = chat.prompt_ids(opening.messages, opening.tools)
    if opening.tools:
        _check(chat, ["tool"], opening)
    if not answer.done and prompt:
        last = min(chat.stop_ids)
        chat.turn_ids(answer.messages, last, answer.tool_calls, opening)


def _check(chat: Chat, roles: Sequence[str], opening: Opening | None = None) -> None:
    exact = chat.check_turns(roles, opening) if opening else chat.check_turns(roles)
    if not exact:
        log.info(
            "after a message of role %r the chat template drops something of the model's earlier "
            "turns, such as their reasoning; in this run's samples it stays, as it was sampled",
            roles[0],
        )


def _check_readable(chat: Chat) -> None:
    """The environment "tools" must understand the calls of this model.

    Raises:
        UsageError: nothing here reads them.
    """
    if not chat.parser.calls:
        raise UsageError(f"{UNREAD}: {REMEDY}")
