"""The Dockerfile and what it pins. It is not built here: that needs a container engine."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jsonschema
import pytest
import yaml
from fakes.clusters import PLANS, SCHEMAS, launched, parse_planned
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "deploy" / "images"
TEXT = (IMAGES / "Dockerfile").read_text(encoding="utf-8")
LINES = [line for line in re.sub(r"\\\n\s*", "", TEXT).splitlines() if line and line[0] != "#"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = {
    "broker": (),
    "trainer": ("trainer", "nccl", "lora", "tensorboard", "tasks"),
    "generator": ("generator", "vllm", "nccl", "tasks"),
    "gpu": ("trainer", "generator", "vllm", "nccl", "lora", "tasks"),
    "cpu": ("all",),
}


def stages() -> dict[str, list[str]]:
    """Instructions by stage; the first of each says what it is built from."""
    found: dict[str, list[str]] = {}
    for line in LINES:
        if match := re.fullmatch(r"FROM (\S+) AS (\S+)", line):
            found[match[2]] = [match[1]]
        elif found:
            list(found.values())[-1].append(line)
    return found


def user_of(stage: str) -> str:
    """The user that a container of `stage` has."""
    parent, *instructions = stages()[stage]
    users = [line.split()[1] for line in instructions if line.startswith("USER ")]
    return users[-1] if users else user_of(parent)


def constraints(stage: str) -> dict[str, str]:
    """Return the pins of `stage`, by name."""
    (name,) = re.findall(
        r"COPY deploy/images/(constraints\S*)", "\n".join(stages()[f"{stage}-env"])
    )
    lines = (IMAGES / name).read_text(encoding="utf-8").splitlines()[1:]
    pairs = [line.split("==") for line in lines]
    return {name.lower().replace("_", "-"): version for name, version in pairs}


def wanted(extras: tuple[str, ...]) -> list[Requirement]:
    """The packages that `umbra-rl[extras]` asks for, other than itself."""
    optional = PROJECT["optional-dependencies"]
    texts = [*PROJECT["dependencies"], *(text for extra in extras for text in optional[extra])]
    found = [Requirement(text) for text in texts]
    inner = [extra for one in found if one.name == "umbra-rl" for extra in sorted(one.extras)]
    rest = [one for one in found if one.name != "umbra-rl"]
    return [*rest, *wanted(tuple(inner))] if inner else rest


def test_every_image_that_is_planned_has_a_target() -> None:
    planned = {
        launched(plan, process).image.removeprefix("umbra-").removesuffix(":latest")
        for plan in PLANS.values()
        for process in plan.processes
    }
    assert planned <= set(EXTRAS) <= set(stages())


def test_nothing_runs_as_root() -> None:
    for target in EXTRAS:
        assert user_of(target) == "10001:10001"
        assert all(PLANS[name].cluster.user == user_of(target) for name in PLANS)


@pytest.mark.parametrize("target", EXTRAS)
def test_a_target_installs_what_it_is_for_and_all_of_it_is_pinned(target: str) -> None:
    assert " ".join(["RUN ./install_extras.sh", *EXTRAS[target]]) in stages()[f"{target}-env"]
    pinned = constraints(target)
    other = ("nccl-cuda13",) if "nccl" in EXTRAS[target] else ()  # by the CUDA of torch
    for requirement in wanted(EXTRAS[target] + other):
        name = requirement.name.lower()
        if "vllm" in EXTRAS[target] and name in ("transformers", "numpy"):
            continue  # vLLM chooses
        assert name in pinned, f"{name} is not in deploy/images/constraints*.txt"
        assert requirement.specifier.contains(pinned[name]), requirement


@pytest.mark.real
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("cupy", ["nccl", "nccl-cuda13"])  # for the CUDA of torch
@pytest.mark.parametrize("target", ["trainer", "generator"])
def test_the_pins_of_a_target_fit_together(target: str, cupy: str) -> None:
    """As pip resolves them from the index, of which it reads what each package needs."""
    (pins,) = re.findall(r"constraints\S*\.txt", "\n".join(stages()[f"{target}-env"]))[:1]
    extras = (*(one for one in EXTRAS[target] if one != "nccl"), cupy)
    options = ("--dry-run", "--ignore-installed", "--quiet", "--prefer-binary")
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "--constraint", IMAGES / pins,
         *map(str, wanted(extras))],
        capture_output=True, text=True, timeout=1100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_the_broker_has_no_torch() -> None:
    names = {requirement.name for requirement in wanted(EXTRAS["broker"])}
    assert not names & {"torch", "transformers", "vllm"}


def test_what_is_copied_is_there_and_not_ignored() -> None:
    ignore = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for line in LINES:
        if line.startswith("COPY ") and "--from" not in line:
            for source in line.split()[1:-1]:
                assert (ROOT / source).exists()
                assert f"!{source.split('/')[0]}" in ignore


COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))


def test_the_compose_file_of_one_machine_holds_to_the_specification() -> None:
    schema = json.loads((SCHEMAS / "compose-spec.json").read_text(encoding="utf-8"))
    jsonschema.Draft7Validator(schema).validate(COMPOSE)


def test_the_services_of_one_machine() -> None:
    for service in COMPOSE["services"].values():
        target = service["build"]["target"]
        assert target in EXTRAS
        assert (ROOT / service["build"]["dockerfile"]) == IMAGES / "Dockerfile"
        assert service["image"] == f"umbra-{target}:latest"
        # ${VARIABLE:-default} is what Compose fills in; the demo needs none of them.
        texts = [re.sub(r"\$\{\w+:-(.*?)\}", r"\1", text) for text in service["command"]]
        parse_planned(texts)
    environ = (ROOT / ".env").read_text(encoding="utf-8").splitlines()
    assert [line for line in environ if line[0] != "#"] == ["COMPOSE_PROFILES=demo"]
    assert {name: s["profiles"] for name, s in COMPOSE["services"].items()} == {
        "demo": ["demo"],
        "run": ["gpu"],
    }
