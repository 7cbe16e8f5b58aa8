"""Models by their names on a hub: downloads, the names that processes get, refusals."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.hub import Hub, ask_there, serving

from umbra import cli
from umbra.deploy.prepare.preflight import check_run, load_given
from umbra.proto.errors import StartupError, UsageError
from umbra.services.config import RunConfig
from umbra.services.config.loader import config_of, load_config, to_json
from umbra.services.config.rules import cautions
from umbra.services.modeling.hub import fetch, is_hub_name, pin
from umbra.services.modeling.model_directory import (
    check_model_dir,
    directory_of,
    weights_bytes,
    weights_checksum,
)
from umbra.services.modeling.models import outline_model
from umbra.services.modeling.pretrained import load_tokenizer
from umbra.services.modeling.run_file import located

constants: Any = pytest.importorskip("huggingface_hub.constants")
NAME = "acme/tiny"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving() as found:
        ask_there(found, tmp_path / "home", monkeypatch)
        monkeypatch.chdir(tmp_path)
        yield found


def run_of(tmp_path: Path, name: str = NAME) -> Path:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "21", "answer": "12"}\n')
    (tmp_path / "run.toml").write_text(
        f'[model]\npath = "{name}"\n[data]\nprompts = "prompts.jsonl"\n'
        '[environment]\nkind = "exact"\n[generator]\nmax_context = 64\n[sampling]\nmax_tokens = 8\n'
    )
    return tmp_path / "run.toml"


def files(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def downloads(hub: Hub) -> list[str]:
    got = [one for one in hub.requests if one.startswith("GET") and "/resolve/" in one]
    return [one.rpartition("/")[2] for one in got]


class TestOneModel:
    def test_a_name_is_no_path(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        assert is_hub_name("Qwen/Qwen3-0.6B") and is_hub_name("a/b@v1.0") and is_hub_name("a/b@r/1")
        for path in ("model", "/models/x", "./a/b", "../a/b", "a/b/c", "~/a", "a/b@", "", "a/.b"):
            assert not is_hub_name(path), path
        (tmp_path / "Qwen" / "Qwen3-0.6B").mkdir(parents=True)
        assert not is_hub_name("Qwen/Qwen3-0.6B") and is_hub_name("Qwen/Qwen3-0.6B@main")

    def test_it_is_read_as_from_its_directory(self, hub: Hub, tiny_model_dir: Path) -> None:
        commit = hub.add_model(NAME, tiny_model_dir)
        pinned_name = pin(NAME, "model.path")
        assert (pinned_name.repo, pinned_name.revision) == (NAME, commit)
        folder = check_model_dir(str(pinned_name))
        assert files(folder) == files(tiny_model_dir)
        assert weights_checksum(str(pinned_name)) == weights_checksum(tiny_model_dir)
        assert weights_bytes(str(pinned_name)) == weights_bytes(tiny_model_dir) > 0

    def test_weights_come_only_where_they_are_read(self, hub: Hub, tiny_model_dir: Path) -> None:
        hub.add_model(NAME, tiny_model_dir)
        name = str(pin(NAME, "model.path"))
        assert load_tokenizer(name).eos_token_id is not None
        assert outline_model(name).num_parameters() > 0
        assert not any(file.endswith(".safetensors") for file in downloads(hub))
        fetch(name, "model.path")
        assert downloads(hub).count("model.safetensors") == 1

    def test_a_commit_is_for_ever(self, hub: Hub, tiny_model_dir: Path, tmp_path: Path) -> None:
        first = hub.add_model(NAME, tiny_model_dir)
        other = shutil.copytree(tiny_model_dir, tmp_path / "other")
        (other / "generation_config.json").write_text('{"eos_token_id": 1}')
        second = hub.add_model(NAME, other)
        assert pin(NAME, "model.path").revision == second
        assert pin(f"{NAME}@main", "model.path").revision == second
        old = directory_of(f"{NAME}@{first}")
        expected = (tiny_model_dir / "generation_config.json").read_bytes()
        assert (old / "generation_config.json").read_bytes() == expected

    def test_only_safetensors_at_the_top_and_no_code(self, hub: Hub, tiny_model_dir: Path) -> None:
        hub.add_model(NAME, tiny_model_dir)
        for path in ("pytorch_model.bin", "onnx/model.json", "modeling_own.py", "README.md"):
            hub.repos[f"models/{NAME}"].commits[pin_of(hub)][path] = b"x"
        assert files(fetch(NAME, "model.path")) == files(tiny_model_dir)
        assert "modeling_own.py" in files(fetch(NAME, "model.path", code=True))


def pin_of(hub: Hub) -> str:
    return hub.repos[f"models/{NAME}"].branches["main"]


class TestTheCache:
    def test_it_serves_without_a_network(
        self, hub: Hub, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        commit = hub.add_model(NAME, tiny_model_dir)
        fetch(NAME, "model.path")
        hub.requests.clear()
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert pin(NAME, "model.path").revision == commit
        assert fetch(NAME, "MODEL").name == commit
        assert weights_checksum(f"{NAME}@{commit}") == weights_checksum(tiny_model_dir)
        assert hub.requests == []

    def test_it_has_to_have_all(
        self, hub: Hub, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub.add_model(NAME, tiny_model_dir)
        name = str(pin(NAME, "model.path"))  # without weights
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        load_tokenizer(name)
        with pytest.raises(UsageError, match=r"has not all of .*, and HF_HUB_OFFLINE is set"):
            fetch(name, "model.path")
        with pytest.raises(UsageError, match="acme/other is no directory here"):
            pin("acme/other", "model.path")


class TestRefusals:
    def refused(self, name: str, kind: type[Exception] = UsageError) -> str:
        with pytest.raises(kind) as caught:
            fetch(str(pin(name, "model.path")), "model.path")
        assert "\n" not in str(caught.value)
        return str(caught.value)

    def test_what_the_hub_has_not(self, hub: Hub, tiny_model_dir: Path) -> None:
        told = self.refused("acme/none")
        assert told.startswith("model.path: acme/none is no directory here, and ")
        assert hub.url in told and "HF_TOKEN" in told
        hub.add_model(NAME, tiny_model_dir)
        assert "acme/tiny has no revision 'v9'" in self.refused(f"{NAME}@v9")
        kept = {file.name: file.read_bytes() for file in tiny_model_dir.iterdir()}
        weights = kept.pop("model.safetensors")
        hub.add("models/acme/pickled", {**kept, "pytorch_model.bin": weights})
        assert "no safetensors weights" in self.refused("acme/pickled")

    def test_gated_and_private_without_a_token(
        self, hub: Hub, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub.add_model(NAME, tiny_model_dir, token="hf_secret")
        told = self.refused(NAME)
        assert "acme/tiny is gated: accept its terms at" in told and "HF_TOKEN" in told
        hub.add_model("acme/mine", tiny_model_dir, token="hf_secret", private=True)
        assert "private" in self.refused("acme/mine")
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        assert files(fetch(NAME, "model.path")) == files(fetch("acme/mine", "model.path"))

    def test_no_network(self, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        told = self.refused(NAME, StartupError)
        assert "cannot be downloaded from http://127.0.0.1:9" in told and "name a directory" in told


class TestARun:
    def test_it_is_pinned_where_it_begins(
        self, hub: Hub, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        commit = hub.add_model(NAME, tiny_model_dir)
        config = load_given(run_of(tmp_path), ())[0]
        assert config.model.path == f"{NAME}@{commit}"
        assert f"model.path: {NAME}, commit {commit}" in capsys.readouterr().err
        check_run(config)
        again = config_of(json.loads(to_json(config)), "config.json")
        hub.requests.clear()
        assert located(again, tmp_path / "run.toml", pytest.fail) == config and hub.requests == []

    def test_a_directory_goes_first(self, hub: Hub, tiny_model_dir: Path, tmp_path: Path) -> None:
        hub.add_model(NAME, tiny_model_dir)
        fetch(NAME, "model.path")
        (tmp_path / "acme").mkdir()
        here = shutil.copytree(tiny_model_dir, tmp_path / NAME)
        config = load_given(run_of(tmp_path), ())[0]
        assert config.model.path == str(here)

    def test_a_path_with_a_mistake_is_not_looked_for(
        self, hub: Hub, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        shutil.copytree(tiny_model_dir, tmp_path / "models" / "base")
        with pytest.raises(UsageError, match=r"models/bse is taken for a path.*@main"):
            load_given(run_of(tmp_path, "models/bse"), ())
        with pytest.raises(UsageError, match=r"scorer\.model: models/bse is taken for a path"):
            load_given(run_of(tmp_path, "models/base"), ("scorer.model=models/bse",))
        assert cli.main(["eval", "models/bse", "--prompts", "prompts.jsonl"]) == 2
        assert "MODEL: models/bse is taken for a path" in capsys.readouterr().err
        assert hub.requests == []
        commit = hub.add_model("models/bse", tiny_model_dir)
        config = load_given(run_of(tmp_path, "models/bse@main"), ())[0]
        assert config.model.path == f"models/bse@{commit}"

    def test_reference_and_critic_too(self, hub: Hub, tiny_model_dir: Path, tmp_path: Path) -> None:
        commit = hub.add_model(NAME, tiny_model_dir)
        settings = (f"scorer.model={NAME}", f"critic.path={NAME}@main")
        config = load_given(run_of(tmp_path, str(tiny_model_dir)), settings)[0]
        assert config.model.path == str(tiny_model_dir)
        assert config.scorer.model == config.critic.path == f"{NAME}@{commit}"


class TestCodeOfAModel:
    """A tokenizer may be Python code; it is run if one says so, and downloaded only then."""

    @pytest.fixture
    def model(
        self, hub: Hub, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> str:
        folder = shutil.copytree(tiny_model_dir, tmp_path / "coded")
        path = folder / "tokenizer_config.json"
        own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own_tokens.Own"]}}
        path.write_text(json.dumps(json.loads(path.read_text()) | own))
        (folder / "own_tokens.py").write_text(
            "from transformers import PreTrainedTokenizerFast\n\n\n"
            "class Own(PreTrainedTokenizerFast):\n    is_own = True\n"
        )
        monkeypatch.setattr(
            "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
        )
        hub.add_model("acme/coded", folder)
        return "acme/coded"

    def test_it_is_refused_unless_it_is_trusted(self, hub: Hub, model: str) -> None:
        told = r"\(own_tokens.Own\).* model.trust_remote_code = true"
        with pytest.raises(UsageError, match=told):
            load_tokenizer(model)
        assert "own_tokens.py" not in downloads(hub)
        assert load_tokenizer(model, trust=True).is_own

    def test_trust_is_warned_of(self) -> None:
        trusting = load_config(overrides=["model.trust_remote_code=true"], environ={})
        assert "trust_remote_code" in dict(cautions(trusting))
        assert "trust_remote_code" not in dict(cautions(RunConfig()))
