"""A run whose model is elsewhere, from its start to its model on the hub."""

import json
import subprocess
from pathlib import Path

import pytest
from fakes.commands import UMBRA, call
from fakes.hub import environment, serving
from fakes.whole_runs import sets

SETTINGS = (
    *("model.path=acme/tiny", "trainer.lora_rank=2", "run.steps=2", "checkpoint.every=2"),
    *("data.columns.prompt=question", "eval.columns.prompt=question", "eval.samples=8"),
    *("data.prompts=sums.jsonl", "eval.prompts=sums.jsonl"),
)


@pytest.mark.real  # two whole runs
def test_from_a_name_to_a_name(project: Path) -> None:
    with serving() as hub:
        variables = {**environment(hub, project / "home"), "XDG_CACHE_HOME": str(project / "cache")}

        def up(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
            return call([*UMBRA, "up", *words], cwd=project, env=variables | more, quiet_s=150)

        commit = hub.add_model("acme/tiny", (project / "model").resolve())
        rows = (project / "prompts.jsonl").read_text().replace('"prompt"', '"question"')
        (project / "model").unlink()
        (project / "prompts.jsonl").unlink()
        (project / "sums.jsonl").write_text(rows)
        done = up("run.toml", "--json", *sets(*SETTINGS))
        assert done.returncode == 0, done
        (folder,) = (project / "runs").iterdir()
        config = json.loads((folder / "config.json").read_bytes())
        assert config["model"]["path"] == f"acme/tiny@{commit}"
        files = [one for one in hub.requests if one.startswith("GET") and "/resolve/" in one]
        assert len(files) == len(set(files)), "each was downloaded once, by whichever process"

        # What the run needs is in the caches now, and it began from a commit: the branch moves on.
        hub.add("models/acme/tiny", {"config.json": b"{}"})
        more = up(str(folder), "--set", "run.steps=3", "--quiet", HF_HUB_OFFLINE="1")
        assert more.returncode == 0, more
