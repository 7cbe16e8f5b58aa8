"""What a pushed model says of itself, and what `umbra export` refuses before it computes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from fakes.hub import Hub, ask_there, serving

from umbra import cli
from umbra.proto.errors import StartupError, UsageError
from umbra.services.config.loader import load_config

pytest.importorskip("huggingface_hub")

from umbra.services.trainer.checkpoints.hub import make_repository, model_card, push, run_summary

SUMMARY = {
    "steps": 80,
    "accuracy_before": 0.25,
    "accuracy_after": 0.9375,
    "greedy_before": None,
    "samples": 25600,
    "staleness": {"mean": 1.0, "max": 2},
    "evals": [{"version": 90, "accuracy": 0.9}],
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving() as found:
        ask_there(found, tmp_path / "home", monkeypatch)
        monkeypatch.setenv("HF_TOKEN", "hf_x")
        yield found


def card(*overrides: str, summary: dict[str, Any] | None = None) -> tuple[dict[str, Any], str]:
    config = load_config(overrides=["run.steps=100", *overrides], environ={})
    text = model_card("acme/sums", config, 80, summary or {})
    _, head, body = text.split("---\n", 2)
    return yaml.safe_load(head), body


def test_it_names_the_base_the_data_and_what_was_measured() -> None:
    names = ("model.path=acme/tiny", "model.revision=v1")
    data = "data.prompts=datasets:acme/gsm:main:train"
    head, body = card(*names, data, "trainer.lora_rank=8", summary=SUMMARY)
    assert head["base_model"] == "acme/tiny" and head["datasets"] == ["acme/gsm"]
    assert body.startswith("\n# sums\n") and "| steps | 80 of 100 |" in body
    assert "| accuracy on held-out prompts | 0.250 before, 0.938 after |" in body
    assert "LoRA of rank 8" in body and "| accuracy at step 90 | 0.900 |" in body
    assert "greedy" not in body


def test_what_is_on_this_machine_alone_is_not_told() -> None:
    head, body = card("model.path=/home/me/model", "data.prompts=/home/me/secret.jsonl")
    assert "base_model" not in head and "datasets" not in head
    assert "/home/me" not in body and "## Results" not in body


def test_what_was_measured_at_the_end_is_not_of_an_earlier_checkpoint() -> None:
    assert "accuracy" not in card(summary=SUMMARY | {"steps": 100})[1]


def test_the_summary_is_that_of_the_run(tmp_path: Path) -> None:
    checkpoint = tmp_path / "runs" / "a" / "checkpoints" / "step-3"
    checkpoint.mkdir(parents=True)
    assert run_summary(checkpoint) == {}
    (tmp_path / "runs" / "a" / "summary.json").write_text('{"samples": 3}')
    assert run_summary(checkpoint) == {"samples": 3} == run_summary(checkpoint.parents[1])


def test_a_repository_is_made_and_filled(hub: Hub, tmp_path: Path) -> None:
    make_repository("acme/new", private=True)
    repo = hub.repos["models/acme/new"]
    assert repo.private
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    make_repository("acme/new", private=True)  # it is there
    url = push(tmp_path / "m", "acme/new", "# card\n")
    assert url.startswith(f"{hub.url}/acme/new/commit/")
    assert repo.commits[repo.branches["main"]] == {"README.md": b"# card\n", "config.json": b"{}"}


def test_mistakes(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("models/acme/public", {})
    with pytest.raises(UsageError, match="is there and public: leave out --private"):
        make_repository("acme/public", private=True)
    for name in ("new", "acme/new@main", "a/b/c"):
        with pytest.raises(UsageError, match=f"--push {name}: write it as ORG/NAME"):
            make_repository(name, private=False)
    monkeypatch.setenv("HF_TOKEN", "")
    with pytest.raises(UsageError, match="set HF_TOKEN to a token that may"):
        make_repository("acme/new", private=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match="HF_HUB_OFFLINE is set"):
        make_repository("acme/new", private=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(StartupError, match="cannot be reached"):
        make_repository("acme/new", private=False)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ([], "name a folder by --out, a repository on the hub by --push, or both"),
        (["--out", "x", "--private"], "--private is for --push"),
        (["--push", "acme/new"], "is no checkpoint"),
    ],
)
def test_flags(
    hub: Hub, tmp_path: Path, flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["export", str(tmp_path / "none"), *flags]) == 2
    assert told in capsys.readouterr().err
    assert hub.repos == {}
