"""`umbra plan` as a command, the keys that it hands out, and the YAML that it writes."""

from __future__ import annotations

import os
import stat
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from umbra import cli
from umbra.deploy.cluster.cluster_file import planner
from umbra.deploy.cluster.containers import to_yaml
from umbra.proto.access import KEY_ROLES
from umbra.proto.net.keys import load_keys
from umbra.services.config.loader import to_toml

CLUSTER = """\
[cluster]
groups = ["train", "generate"]
[[nodes]]
name = "a"
address = "10.0.0.1"
[[nodes]]
name = "b"
address = "10.0.0.2"
"""


def plan_command(tmp_path: Path, *flags: str) -> int:
    (tmp_path / "cluster.toml").write_text(CLUSTER, encoding="utf-8")
    (tmp_path / "run.toml").write_text('[model]\npath = "m"\n', encoding="utf-8")
    files = [str(tmp_path / "cluster.toml"), str(tmp_path / "run.toml")]
    return cli.main(["plan", *files, "--out", str(tmp_path / "out"), *flags])


def test_the_table_comes_first_and_then_the_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan_command(tmp_path) == 0
    out = capsys.readouterr().out
    assert out.startswith("node  address")
    assert f"\n6 files written to {tmp_path / 'out'}\nnext: copy " in out
    written = sorted(str(p.relative_to(tmp_path / "out")) for p in tmp_path.glob("out/[ab]/*"))
    names = ("compose.yaml", "keys", "run.toml", "umbra.env")
    assert written == [f"{node}/{name}" for node in "ab" for name in names]
    assert tomllib.loads((tmp_path / "out" / "a" / "run.toml").read_text())["run"]["name"] == "run"


def test_each_node_gets_the_keys_that_it_needs(tmp_path: Path) -> None:
    assert plan_command(tmp_path) == 0
    out = tmp_path / "out"
    secret = {n: sorted(p.stem for p in (out / n / "keys").glob("*.key_secret")) for n in "ab"}
    assert secret == {
        "a": ["buffer", "monitor", "trainer", "weight_hub"],
        "b": ["generator", "monitor", "relay"],
    }
    for path in out.glob("*/keys/*"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    load_keys(out / "b" / "keys", "generator")
    assert "UMBRA_SECURITY__KEYS=/srv/umbra/keys\n" in (out / "b" / "umbra.env").read_text()
    before = {path.name: path.read_bytes() for path in (out / "keys").iterdir()}
    assert len(before) == 2 * len(KEY_ROLES)
    assert plan_command(tmp_path) == 0  # again: the same keys
    assert {path.name: path.read_bytes() for path in (out / "keys").iterdir()} == before


def test_keys_of_somebody_else_are_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    monkeypatch.setattr(os, "getegid", lambda: 100)
    assert planner() == "1234:100"
    monkeypatch.setattr(sys.modules[__name__], "CLUSTER", CLUSTER.replace("]", "]\nuser = '7'", 1))
    assert plan_command(tmp_path) == 2
    assert "leave it out (then it is you, 1234:100), or plan as root" in capsys.readouterr().err


def test_keys_of_the_user_s_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["keys", str(tmp_path / "mine")]) == 0
    assert plan_command(tmp_path, "--set", f"security.keys={tmp_path / 'mine'}") == 0
    name = "generator.key_secret"
    assert (tmp_path / "out/b/keys" / name).read_bytes() == (tmp_path / "mine" / name).read_bytes()
    assert not (tmp_path / "out" / "keys").exists()
    assert str(tmp_path / "mine") not in (tmp_path / "out" / "a" / "run.toml").read_text()
    (tmp_path / "mine" / name).unlink()
    capsys.readouterr()
    assert plan_command(tmp_path, "--set", f"security.keys={tmp_path / 'mine'}") == 2
    assert f"No such file or directory: {tmp_path / 'mine' / name}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("project", "more", "seen"),
    [
        (".", (), "out/keys"),
        ("project", (), ""),
        (".", ("--set", "environment.kind=exact"), ""),
        (".", ("--format", "slurm"), ""),
    ],
)
def test_keys_that_the_user_s_modules_can_read_are_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    project: str,
    more: tuple[str, ...],
    seen: str,
) -> None:
    (tmp_path / project).mkdir(exist_ok=True)
    (tmp_path / "cluster.toml").write_text(CLUSTER, encoding="utf-8")
    run_file = tmp_path / project / "run.toml"
    text = '[model]\npath = "m"\n[environment]\nkind = "mine:Game"\n'
    run_file.write_text(text, encoding="utf-8")
    files = [str(tmp_path / "cluster.toml"), str(run_file), "--out", str(tmp_path / "out")]
    assert cli.main(["plan", *files, *more]) == 0
    said = capsys.readouterr().err
    assert (f"keys of other roles in {tmp_path / seen}: set another --out" in said) == bool(seen)


def test_a_run_without_keys_has_to_ask_for_it(tmp_path: Path) -> None:
    assert plan_command(tmp_path, "--set", "security.insecure=true") == 0
    assert not list(tmp_path.rglob("keys"))
    assert "secrets" not in yaml.safe_load((tmp_path / "out/a/compose.yaml").read_text())
    assert "UMBRA_SECURITY" not in (tmp_path / "out/a/umbra.env").read_text()
    assert tomllib.loads((tmp_path / "out/a/run.toml").read_text())["security"]["insecure"]


def test_kubernetes_is_told_how_to_get_the_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan_command(tmp_path, "--format", "kubernetes", "--run-id", "Run_1") == 0
    keys = tmp_path / "out" / "keys"
    line = f"kubectl create secret generic run-1-keys --from-file={keys}\n"
    assert line in capsys.readouterr().out
    documents = list(yaml.safe_load_all((tmp_path / "out/kubernetes.yaml").read_text()))
    pods = [d["spec"]["template"]["spec"] for d in documents if d["kind"] == "Job"]
    secrets = [v["secret"] for pod in pods for v in pod["volumes"] if "secret" in v]
    assert {secret["secretName"] for secret in secrets} == {"run-1-keys"}
    assert not (tmp_path / "out" / "a").exists()


def test_a_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_command(tmp_path, "--dry-run", "--run-id", "r") == 0
    assert "weight-hub" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


KEYS = st.text(max_size=50)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=20,
)
SECTIONS = st.from_regex("[a-z_]{1,8}", fullmatch=True)
TOML_VALUES = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(SECTIONS, st.dictionaries(KEYS, TOML_VALUES, max_size=5), max_size=3))
def test_toml_is_read_back(tree: dict[str, dict[str, Any]]) -> None:
    assert tomllib.loads(to_toml(tree)) == tree


@given(st.dictionaries(KEYS, VALUES, max_size=5))
def test_yaml_is_read_back(tree: dict[str, Any]) -> None:
    assert yaml.safe_load(to_yaml(tree) if tree else "{}") == tree


@pytest.mark.parametrize("text", ["1e3", "y", "N", "0o17", "1_000", "on", "~", "0x1f", "12:30"])
def test_text_that_a_reader_of_yaml_may_take_for_something_else_is_quoted(text: str) -> None:
    """PyYAML reads back what Kubernetes and compose would not: the test looks at the text."""
    assert to_yaml({text: text}) == f'"{text}": "{text}"\n'
