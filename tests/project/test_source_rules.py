"""Rules about source text, packages and images that no linter option expresses."""

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path

import pytest
from fakes.commands import call

from umbra.services.config import RunConfig
from umbra.services.modeling.pretrained import AS_IT_IS

ROOT = Path(__file__).resolve().parents[2]
PICKLED = re.compile(
    r"^\s*(?:import|from) (?:_pickle|c?[pP]ickle|cloudpickle|dill|marshal|shelve)\b"
    r"|\b(?:recv_pyobj|send_pyobj|recv_serialized_pyobj|allow_pickle=True)\b|\btorch\.load\("
    r"|^\s*from torch import .*\bload\b",
    re.MULTILINE,
)


@cache
def sources() -> dict[str, str]:
    """Return the Python files outside tests that git tracks or could track, by path."""
    names = call(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", "*.py"],
        cwd=ROOT,
    )
    if names.returncode != 0:
        pytest.skip("needs a git checkout")
    paths = [ROOT / name for name in names.stdout.split("\0") if name]
    return {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for path in paths
        if path.is_file() and path.relative_to(ROOT).parts[0] != "tests"
    }


def shipped(*folders: str) -> Iterator[tuple[str, str]]:
    """Yield path and text of each file in these folders of the package, or in all of it."""
    for path, text in sources().items():
        if path.split("/")[0] in (folders or ("deploy", "proto", "services", "src")):
            yield path, text


def test_no_source_file_uses_pickle() -> None:
    assert "src/umbra/cli.py" in sources()
    found = {path: PICKLED.findall(text) for path, text in sources().items()}
    assert {path: uses for path, uses in found.items() if uses} == {}
    for use in ("import pickle", "    from marshal import loads", "x = torch.load(f)"):
        assert PICKLED.search(use)


# Threads that see to their own failures; all others end their process by `service_thread`.
BARE_THREADS = {
    "proto/errors.py", "services/modeling/chat_template.py", "services/process/parent.py",
    "services/trainer/distributed/heartbeat.py", "services/weights/gpu/cuda.py",
    "services/weights/planes/bucket_fetch.py", "services/weights/receiver.py",
}  # fmt: skip


def test_a_thread_that_fails_ends_its_process() -> None:
    found = {path for path, text in shipped("proto", "services") if re.search(r"\bThread\(", text)}
    assert found == BARE_THREADS


# -- vLLM -----------------------------------------------------------------------------------------

# What users of vLLM's engine are given, and its interface for engines that transfer weights.
PUBLIC = {
    "vllm.distributed.weight_transfer.base", "vllm.distributed.weight_transfer.factory",
    "vllm.engine.arg_utils", "vllm.inputs", "vllm.lora.request",
    "vllm.model_executor.model_loader.reload", "vllm.outputs", "vllm.platforms",
    "vllm.sampling_params", "vllm.v1.engine.async_llm", "vllm.v1.engine.exceptions",
}  # fmt: skip
# Loaded by each of vLLM's processes, which need not import the engine as `private` does.
OF_THE_PLUGIN = {"vllm.v1.engine.output_processor"}


def test_private_names_of_vllm_stand_in_one_file() -> None:
    texts = {Path(path).stem: text for path, text in shipped() if "/generator/vllm/" in path}
    del texts["private"]
    for stem, text in texts.items():
        found = set(re.findall(r"^\s*from (vllm\b[\w.]*) import", text, re.M))
        assert found <= PUBLIC | (OF_THE_PLUGIN if stem == "plugin" else set()), stem


# -- packages, models and secrets -----------------------------------------------------------------

LOADERS = {"from_pretrained", "from_config"}
PLAIN = {"GenerationConfig"}  # data only: it has no code that it could bring along
# By model.trust_remote_code.
MAY_TRUST = "services/modeling/pretrained.pyAutoTokenizer.from_pretrained"


def test_every_dependency_has_a_range() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"].values()
    own = (project["build-system"]["requires"], project["project"]["dependencies"])
    for requirement in chain(*own, *extras):
        bounds = sorted(re.findall(r"(>=|<|==|~=)\s*[\d.]+", requirement))
        ours = requirement.startswith("umbra-rl[")
        assert ours or bounds in (["<", ">="], ["=="]), requirement


def loads(tree: ast.AST) -> Iterator[tuple[int, str, dict[str, object]]]:
    """Yield line, loader and constant keywords of all calls that may bring in somebody's model."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=owner, attr=attr), keywords=words) if (
                attr in LOADERS and ast.unparse(owner) not in PLAIN
            ):
                given = {w.arg: w.value.value for w in words if isinstance(w.value, ast.Constant)}
                if any(w.arg is None and ast.unparse(w.value) == "AS_IT_IS" for w in words):
                    given |= AS_IT_IS
                yield node.lineno, f"{ast.unparse(owner)}.{attr}", given  # type: ignore[misc]
            case _:
                pass


def test_models_bring_no_code_and_no_pickled_weights() -> None:
    found = 0
    for path, text in shipped():
        for line, what, given in loads(ast.parse(text)):
            found += 1
            where = f"{path}:{line}: {what}"
            if path + what != MAY_TRUST:
                assert given.get("trust_remote_code") is False, where
            if what.endswith("from_pretrained"):
                assert given.get("local_files_only") is True, where
                if "Tokenizer" not in what and "Config" not in what:
                    assert given.get("use_safetensors") is True, where
    assert found >= 4, "the rule looks in the wrong place"
    assert AS_IT_IS == {"local_files_only": True, "trust_remote_code": False}


def test_one_key_turns_it_on_for_tokenizers_alone() -> None:
    """No other line passes anything but False, and what may be trusted comes from that key."""
    assert RunConfig().model.trust_remote_code is False
    text = "\n".join(text for _, text in shipped())
    passed = re.findall(r"trust_remote_code\"?(?:=|: )([\w.]+)", text)
    assert {*passed} == {"False", "trust", "bool"}  # the key, and the argument it is passed as
    sources = re.findall(r"\btrust=([\w.]+)", text)
    assert {*sources} == {"trust", "config.model.trust_remote_code"}


def test_secrets_get_into_no_image_and_no_repository() -> None:
    image = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    last_taken = max(index for index, line in enumerate(image) if line.startswith("!"))
    assert "**/*.key_secret" in image[last_taken:], "the last rule that matches decides"
    assert "*.key_secret" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
