"""The configuration: who overrides whom, and what a person is told about a mistake."""

import json
import os
import runpy
import subprocess
import sys
from operator import attrgetter
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import msgspec.inspect as introspect
import pytest

from umbra.deploy.prepare.preflight import search_path
from umbra.proto.errors import UsageError
from umbra.services.config import NamedEnvironment, RunConfig
from umbra.services.config.loader import FOREIGN, as_dict, load_config, to_json
from umbra.services.config.presets import PRESETS
from umbra.services.modeling.run_file import load_service, located
from umbra.services.process.parent import SEARCH_VARIABLE

RECOMPUTES, BF16 = "trainer.activation_checkpointing", "trainer.precision=bf16"
SECTION_TYPES = get_type_hints(RunConfig) | {"environments": NamedEnvironment}
FIELDS = [
    (section, field)
    for section, cls in SECTION_TYPES.items()
    for field in introspect.type_info(cls).fields  # pyright: ignore[reportAttributeAccessIssue]
]


def load(
    *overrides: str, file: Path | None = None, environ: dict[str, str] | None = None
) -> RunConfig:
    """Load a configuration without the environment of the tests."""
    return load_config(file, overrides=overrides, environ=environ or {})


def mistake(*overrides: str, **environ: str) -> str:
    with pytest.raises(UsageError) as caught:
        load(*overrides, environ=environ)
    return str(caught.value)


def test_flags_beat_the_environment_which_beats_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[run]\nsteps = 1\nseed = 1\nname = 'file'", encoding="utf-8")
    environ = {"UMBRA_RUN__STEPS": "2", "UMBRA_RUN__SEED": "2"}
    run = load("run.steps=3", file=file, environ=environ).run
    assert (run.steps, run.seed, run.name, run.dir) == (3, 2, "file", "runs")
    # A table keeps its other keys; the encoding is marked, as by some editors.
    file.write_text("\ufeff[environment.options]\ntries = 1\nlow = 2", encoding="utf-8")
    options = load("environment.options.tries=9", file=file).environment.options
    assert options == {"tries": 9, "low": 2}


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("trainer.learning_rate=3e-4", "trainer.learning_rate", 3e-4),
        ("trainer.betas=[0.9, 0.99]", "trainer.betas", (0.9, 0.99)),
        ("data.shuffle=false", "data.shuffle", False),
        (f"{RECOMPUTES}=selective", RECOMPUTES, "selective"),
        ("run.name=a=b", "run.name", "a=b"),
        (" run.steps = 5 ", "run.steps", 5),
        ("environment.options.a.b=x", "environment.options", {"a": {"b": "x"}}),
        ("environment.options={a = 1}", "environment.options", {"a": 1}),
    ],
)
def test_overrides(override: str, key: str, value: Any) -> None:
    assert attrgetter(key)(load(override)) == value


def test_the_whole_tree_is_written_and_read_back(tmp_path: Path) -> None:
    config = load("trainer.betas=[0.5, 0.75]", "environment.options.a.b=x", "log.level=debug")
    (tmp_path / "resolved.json").write_bytes(to_json(config))
    assert load(file=tmp_path / "resolved.json") == config
    tree = as_dict(RunConfig())
    assert msgspec.convert(tree, RunConfig) == RunConfig()
    tree["environments"] = as_dict(RunConfig(environments=(NamedEnvironment(),)))["environments"][0]
    assert {(section, key) for section, values in tree.items() for key in values} == {
        (section, field.name) for section, field in FIELDS
    }


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("run.steps=0", "run.steps must be an integer >= 1, not 0"),
        ("run.name=", 'run.name must be text that is not empty, not ""'),
        ("trainer.learning_rate=nan", "trainer.learning_rate must be a number > 0, not NaN"),
        ("sampling.top_p=2", "sampling.top_p must be a number > 0 and <= 1, not 2"),
        ("trainer.betas=[0.9, 1.5]", "trainer.betas must be a list of 2 numbers, not [0.9, 1.5]"),
        (
            f"{RECOMPUTES}=every 2",
            f'{RECOMPUTES} must be one of true, false, auto, selective, not "every 2"',
        ),
        ("trainer.profile_steps=[0]", "trainer.profile_steps must be a list of integers >= 1, not"),
        ("data.shuffle=yes", 'data.shuffle must be true or false, not "yes"'),
        ("buffer.async_generation_ratio=99999", "buffer.max_staleness must be an integer >= 0 and"),
        ("scorer.count.reward=x", 'scorer.count must be a table, not {"reward": "x"}'),
        ("run.step=3", "unknown key run.step; did you mean run.steps?"),
        ("run.device=cpu", "unknown key run.device; did you mean generator.device or"),
        ("run.zzz=3", "unknown key run.zzz; known: name, dir, steps, seed, broker"),
        ("steps=3", "unknown section [steps]; did you mean run.steps?"),
        ("run=3", "run must be a table: [run] in a file, run.key=value in --set"),
        ("run.steps", "write it as section.key=value"),
    ],
)
def test_a_bad_override(override: str, told: str) -> None:
    message = mistake(override)
    assert message.startswith(f"--set {override}: {told}")
    assert "\n" not in message


def test_what_was_wrong_is_named_by_its_variable_or_override() -> None:
    told = mistake("environment.options.a=3", "environment.options.a.b=3")
    assert told == "--set environment.options.a.b=3: a is not a table"
    assert mistake(UMBRA_RUN__STEPS="x") == (
        'environment variable UMBRA_RUN__STEPS: run.steps must be an integer >= 1, not "x"'
    )
    assert mistake(UMBRA_RUNN__STEPS="3").startswith(
        "environment variable UMBRA_RUNN__STEPS: unknown section [runn]; did you mean run?"
    )


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        (
            "run.toml",
            b"[run]\nsteps = 2020-01-01",
            r"toml: run\.steps must be .*, not \"2020-01-01\"",
        ),
        ("run.toml", b"[run]\nsteps = = 3\n", r"run\.toml is not valid TOML: .*line 2"),
        ("run.json", b'{"run": {"a": 1, "a": 2}}', 'json is not valid JSON: "a" is given twice'),
        ("nothing.toml", None, r"nothing\.toml does not exist$"),
        ("", None, "cannot be read: .*directory"),
        ("binary.toml", b"\xff\xfe\x00", "cannot be read: .*utf-8"),
    ],
)
def test_a_bad_file(name: str, content: bytes | None, told: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=told) as caught:
        load(file=tmp_path / name)
    assert "\n" not in str(caught.value)


def test_every_field_is_described_and_has_a_default() -> None:
    assert all((section.__doc__ or "").strip() for section in SECTION_TYPES.values())
    for section, field in FIELDS:
        where = f"{section}.{field.name}"
        assert isinstance(field.type, introspect.Metadata), where
        description = (field.type.extra_json_schema or {}).get("description", "")
        assert description and not description.endswith("."), where
        assert not field.required, where
    assert not FOREIGN.keys() & {field.name for _, field in FIELDS}, "names of other systems"


def test_every_piece_of_an_objective_has_a_key_of_its_type() -> None:
    for preset, pieces in PRESETS.items():
        fixed = ("ratio_level", "clip", "kl_in")  # by the preset alone
        values = {k: v for k, v in msgspec.to_builtins(pieces).items() if k not in fixed}
        overrides = tuple(f"trainer.{name}={json.dumps(value)}" for name, value in values.items())
        loaded = load(f"trainer.objective={preset}").trainer
        assert loaded.pieces == pieces
        assert loaded.chosen == {}
        plain = tuple(one.replace('"', "") for one in overrides)
        spelled = load(f"trainer.objective={preset}", *plain).trainer
        assert spelled.pieces == pieces
        assert spelled.chosen == values


@pytest.mark.parametrize(
    ("overrides", "on_cpu", "on_gpu"),
    [
        ("", "no False float32", "bf16 True bfloat16"),
        (f"{BF16} weight_hub.dtype=float16", "bf16 False float16", "bf16 True float16"),
        (f"trainer.precision=no {RECOMPUTES}=true", "no True float32", "no True bfloat16"),
        (f"{RECOMPUTES}=false weight_hub.dtype=float32", "no False float32", "bf16 False float32"),
    ],
)
def test_auto_is_fast_on_gpus_and_exact_on_cpus(overrides: str, on_cpu: str, on_gpu: str) -> None:
    """In precision, in layers that are computed again, and in the dtype that is served."""
    run = load(*overrides.split())
    for kind, expected in (("cpu", on_cpu), ("cuda", on_gpu)):
        precision, recomputes = run.trainer.precision_on(kind), run.trainer.recomputes_on(kind)
        assert f"{precision} {recomputes} {run.weight_hub.dtype_on(kind)}" == expected


SCRIPT = Path(__file__).resolve().parents[2] / ".ci" / "config_page.py"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "config.md"
page = runpy.run_path(str(SCRIPT))
described = page["described"]


def test_the_page_is_what_the_script_prints_and_has_170_keys_at_most() -> None:
    made = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=True)
    assert PAGE.read_text(encoding="utf-8") == made.stdout, (
        "write it again: python .ci/config_page.py > docs/config.md"
    )
    assert len(list(described())) <= 170


# -- paths in a run file ---------------------------------------------------------------------------


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Return the current directory, and another one that has a run file."""
    here, beside = tmp_path / "here", tmp_path / "beside"
    (here / "rows").mkdir(parents=True)
    (beside / "more").mkdir(parents=True)
    monkeypatch.chdir(here)
    return here, beside


def test_what_a_run_file_names_is_beside_it_or_here(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, beside = folders
    for path in ("here/both.jsonl", "beside/both.jsonl", "beside/only.jsonl", "here/t.jinja"):
        (here.parent / path).touch()
    settings = ("data.prompts=both.jsonl", "eval.prompts=only.jsonl", "model.path=none")
    config, told = load(*settings, "model.chat_template=t.jinja"), list[str]()
    resolved = located(config, beside / "run.toml", told.append)
    assert resolved.data.prompts == str(beside / "both.jsonl")
    assert resolved.eval.prompts == str(beside / "only.jsonl")
    assert resolved.model.chat_template == str(here / "t.jinja")
    assert resolved.model.path == str(here / "none")
    (line,) = told
    assert line.startswith("both.jsonl is taken from the run file's folder")
    assert search_path(beside / "run.toml") == [beside, here]
    told.clear()
    assert located(config, here / "run.toml", told.append).data.prompts == str(here / "both.jsonl")
    assert told == []
    (beside / "run.toml").write_text('model.path = "only.jsonl"\ncritic.path = "acme/critic"\n')
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setenv(SEARCH_VARIABLE, "")  # so that it is as before afterwards
    monkeypatch.delenv(SEARCH_VARIABLE)
    service = load_service(str(beside / "run.toml"), overrides=["run.steps=3"])
    assert (service.model.path, service.run.steps) == (str(beside / "only.jsonl"), 3)
    assert service.critic.path == "acme/critic"  # nothing is asked of a hub
    assert os.environ[SEARCH_VARIABLE].split(os.pathsep) == [str(beside), str(here)]
    assert sys.path[-2:] == [str(beside), str(here)]


def test_a_folder_of_a_data_set_stays_where_it_is(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buffer has another current directory."""
    here, beside = folders

    def resolved(name: str) -> str:
        return str(located(load(f"data.prompts={name}"), beside / "run.toml").data.prompts)

    assert resolved("datasets:rows") == f"datasets:{here}/rows"
    assert resolved("datasets:more:train[:10]") == f"datasets:{beside}/more:train[:10]"
    for elsewhere in ("datasets:acme/sums:main:test", f"datasets:acme/sums@{'1' * 40}:test"):
        assert resolved(elsewhere) == elsewhere
    (beside / "a:b" / "rows").mkdir(parents=True)
    monkeypatch.chdir(beside / "a:b")
    with pytest.raises(UsageError, match="which has a colon"):
        resolved("datasets:rows")
