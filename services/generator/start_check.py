"""What only the model's tokenizer and this machine's devices tell about a run; brings torch."""

from __future__ import annotations

from typing import Any

from umbra.proto.errors import UsageError
from umbra.services.config import RunConfig
from umbra.services.environments.protocol import prompt_messages
from umbra.services.generator.template_check import check_template, open_chat
from umbra.services.modeling.models import pick_device


def check_devices(config: RunConfig) -> None:
    """Whether the devices that the run names are here.

    Raises:
        UsageError: one is not, or is no device; names the key.
    """
    devices = {
        "trainer.device": config.trainer.device,
        "generator.device": config.generator.device,
        **({"scorer.device": config.scorer.device} if config.buffer.stages else {}),
    }
    for key, device in devices.items():
        try:
            pick_device(device)
        except UsageError as error:
            raise UsageError(f"{key}: {error}") from error


def check_chat(config: RunConfig, row: dict[str, Any]) -> str:
    """Write the first prompt with the model's chat template; a warning, or "".

    Raises:
        UsageError: there is no tokenizer or template for it, or the prompt leaves no room for an
            answer.
    """
    chat = open_chat(config)
    check_template(config.environment, chat)
    if "prompt" not in row:
        return ""
    try:
        tokens = len(chat.prompt_ids(prompt_messages(row), []))
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"model.path: the chat template cannot write the first prompt: {error}"
        ) from error
    room = config.generator.max_context - tokens
    if room <= 0:
        raise UsageError(
            f"the first prompt has {tokens} tokens, which leaves no room for an answer in "
            f"generator.max_context = {config.generator.max_context}: raise it"
        )
    environment = config.environment_of(row)
    most = config.sampling_for(environment).max_tokens
    if room < most:
        return (
            f"after the first prompt of {tokens} tokens, generator.max_context = "
            f"{config.generator.max_context} leaves {room} of "
            f"{environment.sampling_key('max_tokens')} = {most}: longer answers are cut off there"
        )
    return ""
