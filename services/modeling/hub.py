"""Models by their names on the Hugging Face hub: `ORG/NAME`, or `ORG/NAME@REVISION`.

`huggingface_hub` downloads, caches, locks and reads its variables (`HF_TOKEN`, `HF_HOME`, ...). The
process that starts a run pins names to commits, so that all others load the same bytes (`fetch`).
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

from umbra.proto.errors import StartupError, UmbraError, UsageError

SMALL = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
"""Files of a model besides its weights: configuration, chat template and tokenizer."""
CODE = ["*.py"]
WEIGHTS = ["model*.safetensors"]
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_HERE = Path()


class HubName(NamedTuple):
    """A repository of models, and a branch, tag or commit in it."""

    repo: str
    revision: str = "main"

    @classmethod
    def of(cls, text: str) -> HubName:
        repo, _, revision = text.partition("@")
        return cls(repo, revision or "main")

    @property
    def pinned(self) -> bool:
        return bool(_COMMIT.fullmatch(self.revision))

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}"


def looks_like_name(text: str) -> bool:
    return bool(_NAME.fullmatch(text))


def is_hub_name(text: str, folder: Path = _HERE) -> bool:
    """True if `text` has the form of a name on the hub, and is no path here or from `folder`."""
    return looks_like_name(text) and not (Path(text).exists() or (folder / text).exists())


def _refuse_misspelt(text: str, source: str, folder: Path) -> None:
    """Raise a UsageError for a name without a revision whose first part is a folder in `folder`."""
    here = folder / text
    if looks_like_name(text) and "@" not in text and here.parent.is_dir() and not here.exists():
        raise UsageError(
            f"{source}: {text} is taken for a path, as {Path(text).parent} is a folder in "
            f"{here.parent.parent.resolve()}, and it is not there; for the model of that "
            f"name on the hub write {text}@main"
        )


def pin(text: str, source: str, folder: Path = _HERE) -> HubName:
    """Return the name in `text` with the commit that its revision stands for.

    Raises UsageError if there is no such model, this machine may not read it, or it looks like a
    misspelt path here or from `folder`, StartupError if neither hub nor cache can be asked.
    """
    name = HubName.of(text)
    if name.pinned:
        return name
    for base in (folder, _HERE):
        _refuse_misspelt(text, source, base)
    return HubName(name.repo, Path(_snapshot(name, SMALL, source)).name)


def fetch(text: str, source: str, *, weights: bool = True, code: bool = False) -> Path:
    """Return the directory of a model in the cache, after downloading missing files.

    `source` is the key or flag it came from; with `code` come the Python files too. Raises as
    `pin`, and UsageError if there are no safetensors weights.
    """
    name = pin(text, source)
    patterns = [*SMALL, *(CODE if code else ()), *(WEIGHTS if weights else ())]
    if folder := _cached(name, patterns, weights=weights):
        return folder
    if weights:
        check_weights(str(name), source)
    folder = Path(_snapshot(name, patterns, source))
    if weights and not _has_weights(folder):
        raise UsageError(f"{source}: {name} lacks weights that its index names, or has none")
    return folder


def check_weights(text: str, source: str) -> None:
    """Raise as `fetch` if a model has no safetensors weights, before any are downloaded."""
    name = HubName.of(text)
    if name.pinned and _cached(name, [*SMALL, *WEIGHTS], weights=True):
        return
    if not _snapshot(name, WEIGHTS, source, dry_run=True):
        raise UsageError(
            f"{source}: {name} has no safetensors weights: choose a model that has, or convert it "
            "and name its directory"
        )


def _cached(name: HubName, patterns: list[str], *, weights: bool) -> Path | None:
    """Return the directory if all of it is in the cache."""
    try:
        folder = Path(_snapshot(name, patterns, "", local_files_only=True))
    except (StartupError, UsageError):  # a download does better, or says why not
        return None
    cut = any(not path.exists() and any(map(path.match, patterns)) for path in folder.iterdir())
    whole = (folder / "config.json").is_file() and not cut
    return folder if whole and (not weights or _has_weights(folder)) else None


def _has_weights(folder: Path) -> bool:
    if (folder / "model.safetensors").is_file():
        return True
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_bytes())
        shards = set(index["weight_map"].values())
        return bool(shards) and all((folder / shard).is_file() for shard in shards)
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return False


def _snapshot(name: HubName, patterns: list[str], source: str, **how: Any) -> Any:
    """Call `snapshot_download` for the files at the top of a repository."""
    try:
        hub: Any = importlib.import_module("huggingface_hub")
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{source}: {name} is no directory here, and huggingface_hub, which would look for it "
            "on the hub, is not installed: pip install 'umbra-rl[trainer]'"
        ) from error
    if not sys.stderr.isatty() and "ipykernel" not in sys.modules:
        importlib.import_module("huggingface_hub.utils").disable_progress_bars()  # not into a log
    errors: Any = importlib.import_module("huggingface_hub.errors")
    try:
        return hub.snapshot_download(
            name.repo,
            revision=name.revision,
            allow_patterns=patterns,
            ignore_patterns=["*/*"],  # other formats, in folders of their own
            **how,
        )
    except (errors.HFValidationError, errors.HTTPError, OSError) as error:
        raise _refusal(error, name, source) from error


def _refusal(error: Exception, name: HubName, source: str) -> UmbraError:
    """Return one sentence for an error of the library."""
    errors: Any = importlib.import_module("huggingface_hub.errors")
    constants: Any = importlib.import_module("huggingface_hub.constants")
    hub, where = constants.ENDPOINT, f"{source}: {name.repo}"
    sentences = {  # a subclass goes before its base
        errors.GatedRepoError: f"is gated: accept its terms at {hub}/{name.repo} and set HF_TOKEN "
        "to a token of that account (or use `hf auth login`)",
        errors.RepositoryNotFoundError: f"is no directory here, and {hub} shows no model of that "
        "name: correct it, or set HF_TOKEN if it is a private one",
        errors.RevisionNotFoundError: f"has no revision {name.revision!r} on {hub}",
        errors.HFValidationError: "is neither a directory here nor a name on a hub",
    }
    if sentence := next((s for kind, s in sentences.items() if isinstance(error, kind)), ""):
        return UsageError(f"{where} {sentence}")
    if constants.HF_HUB_OFFLINE:
        return UsageError(
            f"{where} is no directory here, the cache has not all of {name.revision}, and "
            "HF_HUB_OFFLINE is set: unset it, download the model, or name a directory"
        )
    cause = str(error.__cause__ or error).strip().partition("\n")[0]
    cause = re.sub(r"(://[^\s?]*)\?\S+", r"\1?...", cause)  # queries of URLs may be secret
    return StartupError(
        f"{where} is no directory here, and cannot be downloaded from {hub} ({cause}): connect "
        f"this machine, make room in {constants.HF_HUB_CACHE}, or name a directory"
    )
