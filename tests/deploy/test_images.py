"""The Dockerfile and what it pins. It is not built here: that needs a container engine."""

import json
import re
import sys
import tomllib
from pathlib import Path

import jsonschema
import pytest
import yaml
from fakes.clusters import PLANS, SCHEMAS, launched, parse_planned
from fakes.commands import call
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


# Instructions by stage; the first of each says what it is built from.
STAGES: dict[str, list[str]] = {}
for line in LINES:
    if match := re.fullmatch(r"FROM (\S+) AS (\S+)", line):
        STAGES[match[2]] = [match[1]]
    elif STAGES:
        list(STAGES.values())[-1].append(line)
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))


def user_of(stage: str) -> str:
    """The user that a container of `stage` has."""
    parent, *instructions = STAGES[stage]
    users = [line.split()[1] for line in instructions if line.startswith("USER ")]
    return users[-1] if users else user_of(parent)


def pins_of(stage: str) -> Path:
    text = "\n".join(STAGES[f"{stage}-env"])
    (name,) = re.findall(r"COPY deploy/images/(constraints\S*)", text)
    return IMAGES / name


def wanted(extras: tuple[str, ...]) -> list[Requirement]:
    """The packages that `umbra-rl[extras]` asks for, other than itself."""
    optional = PROJECT["optional-dependencies"]
    texts = [*PROJECT["dependencies"], *(text for extra in extras for text in optional[extra])]
    found = [Requirement(text) for text in texts]
    inner = [extra for one in found if one.name == "umbra-rl" for extra in sorted(one.extras)]
    rest = [one for one in found if one.name != "umbra-rl"]
    return [*rest, *wanted(tuple(inner))] if inner else rest


def test_every_image_that_is_planned_has_a_target_whose_user_is_not_root() -> None:
    planned = {
        launched(plan, process).image.removeprefix("umbra-").removesuffix(":latest")
        for plan in PLANS.values()
        for process in plan.processes
    }
    assert planned <= set(EXTRAS) <= set(STAGES)
    users = {user_of(target) for target in EXTRAS}
    assert users == {"10001:10001"} == {plan.cluster.user for plan in PLANS.values()}
    broker = {requirement.name for requirement in wanted(EXTRAS["broker"])}
    assert not broker & {"torch", "transformers", "vllm"}


@pytest.mark.parametrize("target", EXTRAS)
def test_a_target_installs_what_it_is_for_and_all_of_it_is_pinned(target: str) -> None:
    assert " ".join(["RUN ./install_extras.sh", *EXTRAS[target]]) in STAGES[f"{target}-env"]
    lines = pins_of(target).read_text(encoding="utf-8").splitlines()[1:]
    pairs = [line.split("==") for line in lines]
    pinned = {name.lower().replace("_", "-"): version for name, version in pairs}
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
    extras = (*(one for one in EXTRAS[target] if one != "nccl"), cupy)
    options = ("--dry-run", "--ignore-installed", "--quiet", "--prefer-binary", "--constraint")
    words = [*options, pins_of(target), *map(str, wanted(extras))]
    call([sys.executable, "-m", "pip", "install", *words], quiet_s=1100, check=True)


def test_what_is_copied_is_there_and_not_ignored() -> None:
    ignore = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for line in LINES:
        if line.startswith("COPY ") and "--from" not in line:
            for source in line.split()[1:-1]:
                assert (ROOT / source).exists()
                assert f"!{source.split('/')[0]}" in ignore


def test_the_compose_file_of_one_machine() -> None:
    schema = json.loads((SCHEMAS / "compose-spec.json").read_text(encoding="utf-8"))
    jsonschema.Draft7Validator(schema).validate(COMPOSE)
    for service in COMPOSE["services"].values():
        target = service["build"]["target"]
        assert target in EXTRAS
        assert (ROOT / service["build"]["dockerfile"]) == IMAGES / "Dockerfile"
        assert service["image"] == f"umbra-{target}:latest"
        # ${VARIABLE:-default} is what Compose fills in; the demo needs none of them.
        parse_planned([re.sub(r"\$\{\w+:-(.*?)\}", r"\1", text) for text in service["command"]])
    environ = (ROOT / ".env").read_text(encoding="utf-8").splitlines()
    assert [line for line in environ if line[0] != "#"] == ["COMPOSE_PROFILES=demo"]
    profiles = {name: service["profiles"] for name, service in COMPOSE["services"].items()}
    assert profiles == {"demo": ["demo"], "run": ["gpu"]}
