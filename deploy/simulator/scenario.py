"""What is simulated: a cluster, a run, and how long everything takes; read from one TOML file.

Sections that a run file has too (`[run]`, `[buffer]`, `[generator]`, ...) are read and checked as
there; the others are in `tables.py`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from umbra.deploy.cluster.cluster_file import nearest, read_tree
from umbra.deploy.simulator.lengths import quantiles
from umbra.deploy.simulator.tables import DecodeSpeed, Tables
from umbra.proto.errors import UsageError
from umbra.services.config import RunConfig
from umbra.services.config.feasibility import check_feasible
from umbra.services.config.loader import SECTIONS, config_of
from umbra.services.generator.replay_model import ReplayModel, read_replay_model

OWN = [field.name for field in msgspec.structs.fields(Tables)]


@dataclass(frozen=True, slots=True)
class Scenario:
    """All that a simulation needs to know."""

    config: RunConfig
    tables: Tables
    engine: ReplayModel  # speed of one engine, lengths of answers

    @property
    def colocated(self) -> bool:
        """Whether trainer and generators take turns on the same GPUs."""
        return self.tables.cluster.trainer_gpus == 0

    @property
    def trainer_gpus(self) -> int:
        """GPUs that a training step runs on."""
        cluster = self.tables.cluster
        return cluster.trainer_gpus or cluster.gpus - cluster.scorer_gpus

    @property
    def first_generator_gpu(self) -> int:
        """Those before it have other work."""
        return self.tables.cluster.trainer_gpus + self.tables.cluster.scorer_gpus

    @property
    def generators(self) -> int:
        cluster = self.tables.cluster
        return (cluster.gpus - self.first_generator_gpu) // cluster.generator_gpus

    def changed(self, **changes: Any) -> Scenario:
        """The same with other values in some tables, as `cluster={"trainer_gpus": 8}`.

        Raises:
            UsageError: they do not go together.
        """
        tables = msgspec.structs.replace(
            self.tables,
            **{
                name: msgspec.structs.replace(getattr(self.tables, name), **values)
                for name, values in changes.items()
                if name in OWN
            },
        )
        config = msgspec.structs.replace(
            self.config,
            **{
                name: msgspec.structs.replace(getattr(self.config, name), **values)
                for name, values in changes.items()
                if name not in OWN
            },
        )
        scenario = Scenario(config, tables, self.engine)
        _check(scenario, "simulation")
        return scenario

    def without_failures(self) -> Scenario:
        """The same, but nothing dies."""
        return Scenario(self.config, msgspec.structs.replace(self.tables, failures={}), self.engine)


def load_scenario(path: Path, overrides: tuple[str, ...] = ()) -> Scenario:
    """Read and check the file at `path`, changed by `overrides` as "section.key=value".

    Raises:
        UsageError: it cannot be read, a key is unknown (with the nearest name) or bad, or the
            numbers do not go together.
    """
    tree = read_tree(path)
    for override in overrides:
        assign(tree, override)
    return scenario_of(tree, str(path), path.parent)


def scenario_of(tree: Mapping[str, Any], where: str, folder: Path) -> Scenario:
    """The scenario in `tree`; files that it names are relative to `folder`.

    Raises:
        UsageError: as `load_scenario`.
    """
    for section in tree:
        if section not in OWN and section not in SECTIONS:
            near = nearest(section, [*OWN, *SECTIONS])
            raise UsageError(f"{where}: unknown section [{section}]{near}")
    config = config_of({k: v for k, v in tree.items() if k in SECTIONS}, where)
    try:
        tables = msgspec.convert({k: v for k, v in tree.items() if k in OWN}, Tables)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$")
        key = place.strip("`.")
        raise UsageError(f"{where}: {key or 'the file'}: {what[0].lower()}{what[1:]}") from error
    engine = _engine(tables, where, folder)
    scenario = Scenario(config, tables, engine)
    _check(scenario, where)
    return scenario


def _engine(tables: Tables, where: str, folder: Path) -> ReplayModel:
    decode, lengths = tables.speed.decode, tables.samples.lengths
    if decode.replay:
        if decode != DecodeSpeed(replay=decode.replay):
            raise UsageError(f"{where}: speed.decode.replay replaces the other numbers: remove one")
        model = read_replay_model(folder / decode.replay)
        if lengths is None:
            return model
        return msgspec.structs.replace(model, lengths=quantiles(lengths, folder))
    if not decode.step_s:
        raise UsageError(f"{where}: speed.decode needs step_s above 0, or replay = FILE")
    if lengths is None:
        raise UsageError(f"{where}: [samples.lengths] is missing: say how long answers are")
    return ReplayModel(
        step_s=decode.step_s,
        token_s=decode.token_s,
        prompt_token_s=decode.prompt_token_s,
        pause_s=decode.pause_s,
        lengths=quantiles(lengths, folder),
    )


def _check(scenario: Scenario, where: str) -> None:
    faults = list(_faults(scenario))
    if faults:
        raise UsageError(f"{where}: {'; '.join(faults)}")
    check_feasible(scenario.config)


def _faults(scenario: Scenario) -> Iterator[str]:
    config, tables = scenario.config, scenario.tables
    cluster, buffer = tables.cluster, config.buffer
    if scenario.generators < 1:
        yield (
            f"cluster.gpus = {cluster.gpus} leaves no engine of generator_gpus = "
            f"{cluster.generator_gpus} beside trainer_gpus = {cluster.trainer_gpus} and "
            f"scorer_gpus = {cluster.scorer_gpus}"
        )
    if scenario.colocated and buffer.run_ahead:
        yield (
            "cluster.trainer_gpus = 0 (colocated) makes generation and training take turns: set "
            "buffer.run_ahead = 0, or give the trainer GPUs of its own"
        )
    if buffer.batch_tokens:
        yield "buffer.batch_tokens is not simulated: set it to 0"
    if config.eval.every:
        yield "evaluations are not simulated: set eval.every to 0"
    for stage in buffer.stages:
        if stage != "reward" and not cluster.scorer_gpus:
            yield f"buffer.stages has {stage}: set cluster.scorer_gpus"
    if cluster.scorer_gpus and not [s for s in buffer.stages if s != "reward"]:
        yield "cluster.scorer_gpus serve ref_logp and logp, of which buffer.stages has none"
    for stage in tables.speed.scoring:
        if stage not in buffer.stages:
            yield f"speed.scoring.{stage} is no stage in buffer.stages"
    if tables.samples.level_share >= 1 and buffer.dynamic_sampling:
        yield "samples.level_share = 1 leaves dynamic sampling nothing to train on: lower it"


def assign(tree: dict[str, Any], override: str) -> None:
    """Set in `tree` what `override` says, as "section.key=value".

    Raises:
        UsageError: it is not written so, or what it calls a section is none.
    """
    path, separator, text = override.partition("=")
    if not separator or "." not in path:
        raise UsageError(f"--set {override}: write it as section.key=value")
    *sections, key = path.strip().split(".")
    table = tree
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise UsageError(f"--set {override}: {section} is not a table")
    try:
        table[key] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        table[key] = text.strip()
