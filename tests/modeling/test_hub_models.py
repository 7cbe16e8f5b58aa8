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
NAME, KEY = "acme/tiny", "model.path"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving() as found:
        ask_there(found, tmp_path / "home", monkeypatch)
        monkeypatch.chdir(tmp_path)
        yield found


@pytest.fixture
def commit(hub: Hub, tiny_model_dir: Path) -> str:
    """The model NAME on the hub; its commit."""
    return hub.add_model(NAME, tiny_model_dir)


def run_of(name: str = NAME, *settings: str) -> RunConfig:
    """Load a run file with this model, as a command does."""
    Path("prompts.jsonl").write_text('{"prompt": "21", "answer": "12"}\n')
    Path("run.toml").write_text(
        f'[model]\npath = "{name}"\n[data]\nprompts = "prompts.jsonl"\n'
        '[environment]\nkind = "exact"\n[generator]\nmax_context = 64\n[sampling]\nmax_tokens = 8\n'
    )
    return load_given(Path("run.toml").absolute(), settings)[0]


def files(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def downloads(hub: Hub) -> list[str]:
    got = [one for one in hub.requests if one.startswith("GET") and "/resolve/" in one]
    return [one.rpartition("/")[2] for one in got]


def test_a_name_is_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_hub_name("Qwen/Qwen3-0.6B") and is_hub_name("a/b@v1.0") and is_hub_name("a/b@r/1")
    for path in ("model", "/models/x", "./a/b", "../a/b", "a/b/c", "~/a", "a/b@", "", "a/.b"):
        assert not is_hub_name(path), path
    (tmp_path / "Qwen" / "Qwen3-0.6B").mkdir(parents=True)
    assert not is_hub_name("Qwen/Qwen3-0.6B") and is_hub_name("Qwen/Qwen3-0.6B@main")


def test_a_model_is_read_as_from_its_directory(
    hub: Hub, commit: str, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights come where they are read, Python code and other formats not at all."""
    for path in ("pytorch_model.bin", "onnx/model.json", "modeling_own.py", "README.md"):
        hub.repos[f"models/{NAME}"].commits[commit][path] = b"x"
    name = f"{NAME}@{commit}"
    assert str(pin(NAME, KEY)) == name
    assert load_tokenizer(name).eos_token_id is not None
    assert outline_model(name).num_parameters() > 0
    assert not any(file.endswith(".safetensors") for file in downloads(hub))
    with monkeypatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(UsageError, match=r"has not all of .*, and HF_HUB_OFFLINE is set"):
            fetch(name, KEY)
    folder = check_model_dir(name)
    assert files(folder) == files(tiny_model_dir)
    assert downloads(hub).count("model.safetensors") == 1
    assert weights_bytes(name) == weights_bytes(tiny_model_dir) > 0
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    assert pin(NAME, KEY).revision == commit and fetch(NAME, "MODEL").name == commit
    assert weights_checksum(name) == weights_checksum(tiny_model_dir)
    with pytest.raises(UsageError, match="acme/other is no directory here"):
        pin("acme/other", KEY)
    assert hub.requests == []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert "modeling_own.py" in files(fetch(NAME, KEY, code=True))


def test_a_commit_is_for_ever(hub: Hub, commit: str, tiny_model_dir: Path) -> None:
    other = shutil.copytree(tiny_model_dir, "other")
    (Path(other) / "generation_config.json").write_text('{"eos_token_id": 1}')
    second = hub.add_model(NAME, Path(other))
    assert pin(NAME, KEY).revision == pin(f"{NAME}@main", KEY).revision == second != commit
    old = directory_of(f"{NAME}@{commit}") / "generation_config.json"
    assert old.read_bytes() == (tiny_model_dir / "generation_config.json").read_bytes()


def refused(name: str, kind: type[Exception] = UsageError) -> str:
    with pytest.raises(kind) as caught:
        fetch(str(pin(name, KEY)), KEY)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_the_hub_has_not_is_refused(
    hub: Hub, commit: str, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = refused("acme/none")
    assert told.startswith("model.path: acme/none is no directory here, and ")
    assert hub.url in told and "HF_TOKEN" in told
    assert "acme/tiny has no revision 'v9'" in refused(f"{NAME}@v9")
    kept = {file.name: file.read_bytes() for file in tiny_model_dir.iterdir()}
    weights = kept.pop("model.safetensors")
    hub.add("models/acme/pickled", {**kept, "pytorch_model.bin": weights})
    assert "no safetensors weights" in refused("acme/pickled")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    told = refused(NAME, StartupError)
    assert "cannot be downloaded from http://127.0.0.1:9" in told and "name a directory" in told


def test_gated_and_private_ones_need_a_token(
    hub: Hub, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add_model(NAME, tiny_model_dir, token="hf_secret")
    told = refused(NAME)
    assert "acme/tiny is gated: accept its terms at" in told and "HF_TOKEN" in told
    hub.add_model("acme/mine", tiny_model_dir, token="hf_secret", private=True)
    assert "private" in refused("acme/mine")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert files(fetch(NAME, KEY)) == files(fetch("acme/mine", KEY))


def test_a_run_pins_its_models(
    hub: Hub, commit: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run_of(NAME, f"scorer.model={NAME}", f"critic.path={NAME}@main")
    assert config.model.path == config.scorer.model == config.critic.path == f"{NAME}@{commit}"
    config = run_of()
    assert f"model.path: {NAME}, commit {commit}" in capsys.readouterr().err
    check_run(config)
    again = config_of(json.loads(to_json(config)), "config.json")
    hub.requests.clear()
    assert located(again, tmp_path / "run.toml", pytest.fail) == config and hub.requests == []


def test_a_directory_goes_first(hub: Hub, commit: str, tiny_model_dir: Path) -> None:
    fetch(NAME, KEY)
    Path("acme").mkdir()
    here = Path(shutil.copytree(tiny_model_dir, NAME)).absolute()
    assert run_of().model.path == str(here)


def test_a_path_with_a_mistake_is_not_looked_for(
    hub: Hub, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(tiny_model_dir, Path("models", "base"))
    with pytest.raises(UsageError, match=r"models/bse is taken for a path.*@main"):
        run_of("models/bse")
    with pytest.raises(UsageError, match=r"scorer\.model: models/bse is taken for a path"):
        run_of("models/base", "scorer.model=models/bse")
    assert cli.main(["eval", "models/bse", "--prompts", "prompts.jsonl"]) == 2
    assert "MODEL: models/bse is taken for a path" in capsys.readouterr().err
    assert hub.requests == []
    commit = hub.add_model("models/bse", tiny_model_dir)
    assert run_of("models/bse@main").model.path == f"models/bse@{commit}"


def test_code_of_a_tokenizer_is_run_and_downloaded_if_one_says_so(
    hub: Hub, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(tiny_model_dir, tmp_path / "coded")
    path = folder / "tokenizer_config.json"
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own_tokens.Own"]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    (folder / "own_tokens.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n\n\n"
        "class Own(PreTrainedTokenizerFast):\n    is_own = True\n"
    )
    modules = "transformers.dynamic_module_utils.HF_MODULES_CACHE"
    monkeypatch.setattr(modules, str(tmp_path / "modules"))
    hub.add_model("acme/coded", folder)
    told = r"\(own_tokens.Own\).* model.trust_remote_code = true"
    with pytest.raises(UsageError, match=told):
        load_tokenizer("acme/coded")
    assert "own_tokens.py" not in downloads(hub)
    assert load_tokenizer("acme/coded", trust=True).is_own
    trusting = load_config(overrides=["model.trust_remote_code=true"], environ={})
    assert "trust_remote_code" in dict(cautions(trusting))
    assert "trust_remote_code" not in dict(cautions(RunConfig()))
