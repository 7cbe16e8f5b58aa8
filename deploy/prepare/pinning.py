"""Names of models and prompts that are elsewhere, pinned where a run begins.

A model on the hub gets the commit that its revision stands for, a data set too, and a URL the
checksum of its bytes. So all processes of the run read the same, on whatever machine and after
whatever restart; each resolves what it needs by itself, from its cache or by a download.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from umbra.proto.errors import UsageError
from umbra.services.config import ModelConfig, RunConfig
from umbra.services.modeling.hub import HubName, is_hub_name, looks_like_name, pin
from umbra.services.prompts.download import shown
from umbra.services.prompts.readers import is_elsewhere, pin_source


def pinned(config: RunConfig, say: Callable[[str], None]) -> RunConfig:
    """`config` with all names pinned; one that was pinned before stays as it is.

    Args:
        config: with absolute paths, so that a model's path that is none is a name on the hub.
        say: is told what names stand for.

    Raises:
        UsageError: there is nothing of such a name, or this machine may not read it.
        StartupError: it cannot be reached, and no cache has it.
    """
    replace = msgspec.structs.replace
    prompts: dict[str, str] = {}

    def source(name: str) -> str:
        if name and name not in prompts:
            prompts[name] = pin_source(name) if is_elsewhere(name) else name
            if prompts[name] != name:
                say(f"prompts: {shown(prompts[name])}")
        return prompts.get(name, name)

    def sources(prompts: str | dict[str, float]) -> str | dict[str, float]:
        if isinstance(prompts, str):
            return source(prompts)
        return {source(name): weight for name, weight in prompts.items()}

    def model(name: str, key: str) -> str:
        return str(pin(name, key)) if is_hub_name(name) else name

    return replace(
        config,
        model=_pinned_model(config, say),
        scorer=replace(config.scorer, model=model(config.scorer.model, "scorer.model")),
        critic=replace(config.critic, path=model(config.critic.path, "critic.path")),
        data=replace(
            config.data,
            prompts=sources(config.data.prompts),
        ),
        environments=tuple(
            replace(one, prompts=source(one.prompts)) for one in config.environments
        ),
        eval=replace(config.eval, prompts=source(config.eval.prompts)),
    )


def is_pinned(model: ModelConfig) -> bool:
    """True if it is a commit on the hub, even if a folder of its name exists by now."""
    return looks_like_name(model.path) and HubName.of(model.name).pinned


def _pinned_model(config: RunConfig, say: Callable[[str], None]) -> ModelConfig:
    model = config.model
    if is_pinned(model):
        return model
    if not is_hub_name(model.path):
        if model.revision and model.path:
            raise UsageError(
                f"model.revision = {model.revision} is for models on the hub, and model.path is "
                f"the directory {model.path}: remove it"
            )
        return model
    if "@" in model.path and model.revision:
        raise UsageError(
            f"model.path = {model.path} names a revision, and model.revision = {model.revision} "
            "does too: remove one of them"
        )
    name = pin(model.name, "model.path")
    if name != HubName.of(model.name):
        say(f"model: {name.repo}, commit {name.revision}")
    return msgspec.structs.replace(model, path=name.repo, revision=name.revision)
