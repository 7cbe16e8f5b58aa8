"""The alerts and the dashboard in examples/monitoring ask for figures that a run really has."""

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from fakes.broker_world import world
from fakes.looks import look, status

from umbra.proto.messages import Rates
from umbra.proto.records import Role, State
from umbra.services.buffer.health import SHARES, SHOWN
from umbra.services.monitor.client import Look
from umbra.services.monitor.web import prometheus_text
from umbra.services.reporting import PHASES

FOLDER = Path(__file__).parents[2] / "examples" / "monitoring"
RULES: list[dict[str, Any]] = yaml.safe_load(
    (FOLDER / "umbra-alerts.yaml").read_text(encoding="utf-8")
)["groups"][0]["rules"]
DASHBOARD: dict[str, Any] = json.loads(
    (FOLDER / "umbra-dashboard.json").read_text(encoding="utf-8")
)
EXPRESSIONS = [rule["expr"] for rule in RULES] + [
    target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]
]
DOC = (FOLDER.parents[1] / "docs" / "operate.md").read_text(encoding="utf-8")
SERIES = re.compile(r"(?P<name>umbra_\w+)(?:\{(?P<labels>[^}]*)\})?")
SELECTOR = re.compile(r'(?P<label>\w+)=~?"(?P<value>[^"]*)"')
# By metric and label, what the label may say.
VALUES: dict[tuple[str, str], set[str]] = {
    ("umbra_warning", "name"): set(SHARES),
    ("umbra_rate", "figure"): set(Rates.__struct_fields__),
    ("umbra_curve", "name"): set(SHOWN),
    ("umbra_push_seconds", "phase"): set(PHASES),
    ("umbra_member_up", "role"): set(get_args(Role)),
    ("umbra_member_up", "state"): set(get_args(State)),
    ("umbra_staleness_steps", "figure"): set(world().broker.status(0.0).staleness),
    ("umbra_samples_ended_total", "reason"): {"stale"},
}


def samples(seen: Look, *, lost: bool = False) -> list[tuple[str, dict[str, str], float]]:
    """Name, labels and value of all that is exported of `seen`."""
    found: list[tuple[str, dict[str, str], float]] = []
    for line in prometheus_text(seen, lost=lost).decode().splitlines():
        if not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            name, _, labels = series.partition("{")
            found.append((name, dict(re.findall(r'(\w+)="([^"]*)"', labels)), float(value)))
    return found


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_figure_and_label_exists(expression: str) -> None:
    labels: dict[str, set[str]] = {}
    ended = status().ledger.__class__(issued=1, ended={"stale": 1})
    for name, own, _ in samples(look()) + samples(look(ledger=ended)):
        labels.setdefault(name, set()).update(own)
    asked = list(SERIES.finditer(expression))
    assert asked
    for series in asked:
        name = series["name"]
        assert name in labels, f"{name} is exported by no run"
        for selector in SELECTOR.finditer(series["labels"] or ""):
            label, value = selector["label"], selector["value"]
            assert label in labels[name], f"{name} has no label {label}"
            if label == "run":
                continue
            told = set(value.split("|"))
            if name == "umbra_member_stat":
                assert all(f"`{one}`" in DOC for one in told), told
            else:
                assert told <= VALUES[name, label], told
    assert expression.count("(") == expression.count(")")
