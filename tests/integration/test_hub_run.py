"""A run whose model is elsewhere, from its start to its model on the hub."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.commands import UMBRA, call
from fakes.hub import Hub, environment, serving

SETTINGS = (
    *("model.path=acme/tiny", "trainer.lora_rank=2", "run.steps=2", "checkpoint.every=2"),
    *("data.columns.prompt=question", "eval.columns.prompt=question", "eval.samples=8"),
)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving() as found:
        yield found


@pytest.mark.real  # two whole runs, an export
def test_from_a_name_to_a_name(hub: Hub, project: Path) -> None:
    variables = {**environment(hub, project / "home"), "XDG_CACHE_HOME": str(project / "cache")}

    def umbra(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        return call(
            [*UMBRA, *arguments],
            cwd=project,
            env=variables | more,
            quiet_s=150,
        )

    commit = hub.add_model("acme/tiny", (project / "model").resolve())
    rows = (project / "prompts.jsonl").read_text().replace('"prompt"', '"question"')
    (project / "model").unlink()
    (project / "prompts.jsonl").unlink()
    (project / "sums.jsonl").write_text(rows)
    settings = (*SETTINGS, "data.prompts=sums.jsonl", "eval.prompts=sums.jsonl")
    done = umbra("up", "run.toml", "--json", *(p for one in settings for p in ("--set", one)))
    assert done.returncode == 0, done
    (folder,) = (project / "runs").iterdir()
    config = json.loads((folder / "config.json").read_bytes())
    assert config["model"]["path"] == f"acme/tiny@{commit}"
    files = [one for one in hub.requests if one.startswith("GET") and "/resolve/" in one]
    assert len(files) == len(set(files)), "each file was downloaded once, by whichever process"

    # What the run needs is in the caches now, and it began from a commit: the branch may move on.
    hub.add("models/acme/tiny", {"config.json": b"{}"})
    more = umbra("up", str(folder), "--set", "run.steps=3", "--quiet", HF_HUB_OFFLINE="1")
    assert more.returncode == 0, more
