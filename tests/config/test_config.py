"""The configuration: who overrides whom, and what a person is told about a mistake."""

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import msgspec.inspect as introspect
import pytest

from umbra.proto.errors import UsageError
from umbra.services.config import NamedEnvironment, RunConfig
from umbra.services.config.loader import FOREIGN, as_dict, load_config, to_json
from umbra.services.config.presets import PRESETS

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


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        (tmp_path / "run.toml").write_text(text, encoding="utf-8")
        return tmp_path / "run.toml"

    return write


def mistake(*overrides: str, **environ: str) -> str:
    with pytest.raises(UsageError) as caught:
        load(*overrides, environ=environ)
    return str(caught.value)


def test_flags_beat_the_environment_which_beats_the_file(written: Callable[[str], Path]) -> None:
    file = written("[run]\nsteps = 1\nseed = 1\nname = 'file'")
    environ = {"UMBRA_RUN__STEPS": "2", "UMBRA_RUN__SEED": "2"}
    run = load("run.steps=3", file=file, environ=environ).run
    assert (run.steps, run.seed, run.name, run.dir) == (3, 2, "file", "runs")
    marked = written("\ufeff[run]\nsteps = 3")  # by an editor that marks its encoding
    assert load(file=marked).run.steps == 3


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("trainer.learning_rate=3e-4", "trainer.learning_rate", 3e-4),
        ("trainer.betas=[0.9, 0.99]", "trainer.betas", (0.9, 0.99)),
        ("data.shuffle=false", "data.shuffle", False),
        (f"{RECOMPUTES}=true", RECOMPUTES, True),
        (f"{RECOMPUTES}=selective", RECOMPUTES, "selective"),
        ("trainer.profile_steps=[2, 5]", "trainer.profile_steps", [2, 5]),
        ("run.name=a=b", "run.name", "a=b"),
        (" run.steps = 5 ", "run.steps", 5),
        ("environment.options.tries=3", "environment.options", {"tries": 3}),
        ("environment.options.a.b=x", "environment.options", {"a": {"b": "x"}}),
        ("environment.options={a = 1}", "environment.options", {"a": 1}),
    ],
)
def test_overrides(override: str, key: str, value: Any) -> None:
    assert attrgetter(key)(load(override)) == value


def test_an_override_keeps_the_rest_of_a_table(written: Callable[[str], Path]) -> None:
    file = written("[environment.options]\ntries = 1\nlow = 2")
    config = load("environment.options.tries=9", file=file)
    assert config.environment.options == {"tries": 9, "low": 2}


def test_json_is_read_back(tmp_path: Path) -> None:
    config = load("trainer.betas=[0.5, 0.75]", "environment.options.a.b=x", "log.level=debug")
    (tmp_path / "resolved.json").write_bytes(to_json(config))
    assert load(file=tmp_path / "resolved.json") == config


def test_as_dict_is_the_whole_tree() -> None:
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
        ("trainer.learning_rate=0", "trainer.learning_rate must be a number > 0, not 0"),
        ("trainer.learning_rate=nan", "trainer.learning_rate must be a number > 0, not NaN"),
        ("sampling.top_p=2", "sampling.top_p must be a number > 0 and <= 1, not 2"),
        ("trainer.betas=[0.9]", "trainer.betas must be a list of 2 numbers, not [0.9]"),
        (
            f"{RECOMPUTES}=every 2",
            f'{RECOMPUTES} must be one of true, false, auto, selective, not "every 2"',
        ),
        ("trainer.profile_steps=[0]", "trainer.profile_steps must be a list of integers >= 1, not"),
        ("data.shuffle=yes", 'data.shuffle must be true or false, not "yes"'),
        ("log.format=xml", 'log.format must be one of console, json, not "xml"'),
        ("environment.options=3", "environment.options must be a table, not 3"),
        ("buffer.max_staleness=65536", "buffer.max_staleness must be an integer >= 0 and <= 65535"),
        ("buffer.async_generation_ratio=99999", "buffer.max_staleness must be an integer >= 0 and"),
        ("run.steps.x=3", 'run.steps must be an integer >= 1, not {"x": 3}'),
        ("scorer.count.reward=x", 'scorer.count must be a table, not {"reward": "x"}'),
        ("run.step=3", "unknown key run.step; did you mean run.steps?"),
        ("model.steps=3", "unknown key model.steps; did you mean run.steps?"),
        ("run.device=cpu", "unknown key run.device; did you mean generator.device or"),
        ("run.zzz=3", "unknown key run.zzz; known: name, dir, steps, seed, broker"),
        ("steps=3", "unknown section [steps]; did you mean run.steps?"),
        ("trainr.threads=3", "unknown section [trainr]; did you mean trainer?"),
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
    ("text", "told"),
    [
        ("[run]\nsteps = 0", "run.steps must be an integer >= 1, not 0"),
        ("[data]\nprompts = 3", "data.prompts must be text, not 3"),
        ("[run]\nsteps = 2020-01-01", 'run.steps must be an integer >= 1, not "2020-01-01"'),
        ("[run]\nstpes = 3", "unknown key run.stpes; did you mean run.steps?"),
    ],
)
def test_a_bad_file(text: str, told: str, written: Callable[[str], Path]) -> None:
    file = written(text)
    with pytest.raises(UsageError, match=f"^{re.escape(f'{file}: {told}')}"):
        load(file=file)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("run.toml", b"[run]\nsteps = = 3\n", r"run\.toml is not valid TOML: .*line 2"),
        ("run.json", b'{"run": {"a": 1, "a": 2}}', 'json is not valid JSON: "a" is given twice'),
        ("nothing.toml", None, r"nothing\.toml does not exist$"),
        ("", None, "cannot be read: .*directory"),
        ("binary.toml", b"\xff\xfe\x00", "cannot be read: .*utf-8"),
    ],
)
def test_an_unreadable_file(name: str, content: bytes | None, told: str, tmp_path: Path) -> None:
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
READERS, described = page["READERS"], page["described"]


def test_the_page_is_what_the_script_prints_and_has_170_keys_at_most() -> None:
    made = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=True)
    assert PAGE.read_text(encoding="utf-8") == made.stdout, (
        "write it again: python .ci/config_page.py > docs/config.md"
    )
    assert len(list(described())) <= 170
