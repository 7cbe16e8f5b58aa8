"""A trained model on the hub of Hugging Face: its repository, its files and its card."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from umbra._version import __version__
from umbra.proto.errors import UNREADABLE, StartupError, UsageError
from umbra.services.config import RunConfig
from umbra.services.modeling.hub import HubName, first_line, is_hub_name, looks_like_name
from umbra.services.prompts.readers import hub_data_set
from umbra.services.reporting.tables import number

SUMMARY = "summary.json"
CARD = "README.md"


def make_repository(repo: str, *, private: bool) -> None:
    """Make the repository `repo`, or take the one that is there.

    It is done before anything is computed, so that a token that may not write is noticed early.

    Raises:
        UsageError: the name is none, the token may not, or a private one was asked for and it is
            public.
        StartupError: the hub cannot be reached.
    """
    if not looks_like_name(repo) or "@" in repo:
        raise UsageError(f"--push {repo}: write it as ORG/NAME")
    with _told(repo):
        # Private from its first moment, or what it was before.
        _api().create_repo(repo, private=private or None, exist_ok=True)
        is_private = _api().model_info(repo).private
    if private and not is_private:
        raise UsageError(
            f"--push {repo}: this repository is there and public: leave out --private, make it "
            "private on the hub, or choose another name"
        )


def push(folder: Path, repo: str, card: str) -> str:
    """Upload the model in `folder` with `card` as one commit; its address.

    Raises:
        UsageError: the token may not write there.
        StartupError: the hub cannot be reached.
    """
    (folder / CARD).write_text(card, encoding="utf-8")
    with _told(repo):
        commit = _api().upload_folder(
            repo_id=repo, folder_path=folder, commit_message=f"Trained with Umbra {__version__}"
        )
    return str(commit.commit_url)


def run_summary(checkpoint: Path) -> dict[str, Any]:
    """Return the summary in the folder of the run of `checkpoint`; empty before its end."""
    for folder in (checkpoint, *checkpoint.absolute().parents[:3]):
        try:
            found = json.loads((folder / SUMMARY).read_bytes())
        except (OSError, *UNREADABLE):
            continue
        return found if isinstance(found, dict) else {}
    return {}


def model_card(
    repo: str, config: RunConfig, step: int, summary: Mapping[str, Any], base: str = ""
) -> str:
    """The card: what it was trained from, on and how, and what the run measured.

    Args:
        repo: the model's name on the hub.
        config: of the run.
        step: of the checkpoint.
        summary: see `run_summary`.
        base: where the run began, if not in `model.path`; a directory is not named.
    """
    begun = base or config.model.name
    of_hub = HubName.of(begun).repo if is_hub_name(begun) else ""
    data = (
        config.data.prompts,
        *config.data.sources,
        *(one.prompts for one in config.environments),
    )
    sets = sorted({found for name in data if (found := hub_data_set(name))})
    head: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    head |= {"base_model": of_hub, "base_model_relation": "finetune"} if of_hub else {}
    head |= {"datasets": sets} if sets else {}
    head["tags"] = ["umbra", "reinforcement-learning"]
    lines = [
        *("---", yaml.safe_dump(head, sort_keys=False).rstrip(), "---", ""),
        f"# {repo.partition('/')[2]}",
        "",
        f"{f'[{of_hub}](https://huggingface.co/{of_hub})' if of_hub else 'A model'}, trained with "
        f"reinforcement learning for {step:,} steps by Umbra {__version__}.",
        "",
        "## Training",
        "",
        *_table(_settings(config, step)),
    ]
    # What a run measured at its end is not of an earlier checkpoint.
    if summary.get("steps") == step and (measured := list(_measured(summary))):
        lines += ["", "## Results", "", *_table(measured)]
    return "\n".join(lines) + "\n"


def _table(rows: Iterator[tuple[str, str]] | list[tuple[str, str]]) -> list[str]:
    return ["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows)]


def _settings(config: RunConfig, step: int) -> Iterator[tuple[str, str]]:
    trainer, buffer = config.trainer, config.buffer
    yield "objective", trainer.objective
    yield "steps", f"{step:,} of {config.run.steps:,}"
    yield "batch", f"{buffer.batch_groups} groups of {buffer.group_size} samples"
    yield "learning rate", f"{trainer.learning_rate:g} ({trainer.optimizer})"
    yield "environment", ", ".join(one.kind for one in config.all_environments)
    temperatures = {config.sampling_for(one).temperature for one in config.all_environments}
    yield "temperature", ", ".join(f"{one:g}" for one in sorted(temperatures))
    yield "tokens per answer", f"{config.longest_turn:,} at most"
    yield "staleness", f"{buffer.max_staleness} versions at most"
    if trainer.lora_rank:
        yield "adapter", f"LoRA of rank {trainer.lora_rank}, merged"


def _measured(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for kind in ("accuracy", "greedy"):
        before, after = summary.get(f"{kind}_before"), summary.get(f"{kind}_after")
        if before is not None and after is not None:
            yield f"{kind} on held-out prompts", f"{before:.3f} before, {after:.3f} after"
    if (samples := summary.get("samples")) is not None:
        yield "samples", number(samples)
    if staleness := summary.get("staleness"):
        yield "staleness", f"mean {staleness['mean']:.2f}, max {staleness['max']:g}"
    if evals := summary.get("evals"):
        last = evals[-1]
        yield f"accuracy at step {last['version']}", f"{last['accuracy']:.3f}"


@contextmanager
def _told(repo: str) -> Iterator[None]:
    """Turn an error of the hub into one sentence with a remedy."""
    errors: Any = importlib.import_module("huggingface_hub.errors")
    hub = importlib.import_module("huggingface_hub.constants").ENDPOINT
    where = f"--push {repo}"
    try:
        yield
    except errors.HFValidationError as error:
        raise UsageError(f"{where}: the hub takes no such name; write it as ORG/NAME") from error
    except errors.LocalTokenNotFoundError as error:
        raise UsageError(_no_right(where, hub)) from error
    except errors.OfflineModeIsEnabled as error:
        raise UsageError(f"{where}: HF_HUB_OFFLINE is set, so nothing is sent: unset it") from error
    except (errors.HTTPError, OSError) as error:
        status = getattr(getattr(error, "response", None), "status_code", 0)
        if status in (401, 403, 404):
            raise UsageError(_no_right(where, hub)) from error
        said = f"{where}: {hub} cannot be reached, or refuses: {first_line(error)}"
        raise StartupError(said) from error


def _no_right(where: str, hub: str) -> str:
    return (
        f"{where}: {hub} does not let this machine write there: set HF_TOKEN to a token that may "
        "(or use `hf auth login`)"
    )


def _api() -> Any:
    return importlib.import_module("huggingface_hub").HfApi()
