"""Packages and models: pinned ranges, weights as safetensors, no code from models."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator

import pytest
from project.test_source_rules import ROOT, source_files

from umbra.services.config import RunConfig
from umbra.services.modeling.pretrained import AS_IT_IS

LOADERS = {"from_pretrained", "from_config"}
PLAIN = {"GenerationConfig"}  # data only: it has no code that it could bring along
# By model.trust_remote_code.
MAY_TRUST = "services/modeling/pretrained.pyAutoTokenizer.from_pretrained"
SHIPPED = ("deploy", "proto", "services", "src")


def shipped() -> Iterator[tuple[str, str]]:
    """Yield path and text of each source file of the package."""
    for path in source_files():
        name = path.relative_to(ROOT)
        if name.parts[0] in SHIPPED:
            yield str(name), path.read_text(encoding="utf-8")


def requirements() -> Iterator[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    yield from project["build-system"]["requires"]
    yield from project["project"]["dependencies"]
    for extra in project["project"]["optional-dependencies"].values():
        yield from extra


@pytest.mark.parametrize("requirement", sorted(set(requirements())))
def test_every_dependency_has_a_range(requirement: str) -> None:
    if requirement.startswith("umbra-rl["):
        return  # our own extras
    bounds = re.findall(r"(>=|<|==|~=)\s*[\d.]+", requirement)
    assert sorted(bounds) in (["<", ">="], ["=="]), requirement


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
