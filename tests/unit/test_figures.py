"""Figures of the documents: rendered from results, results made from rows, nothing beside them."""

import importlib
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
from fakes.benchmark_rows import rows_of

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
# log.md is history.
DOCUMENTS = [ROOT / "README.md", *sorted({*(ROOT / "docs").glob("*.md")} - {ROOT / "docs/log.md"})]
# Outcomes in a form of their own, with documents that other tests compare with them:
# test_mutation_tool.py and test_architectures.py.
OUTCOMES = {"mutation": "quality.md", "vllm_models": "models.md"}
RESULTS = [
    file for file in sorted((BENCHMARKS / "results").glob("*.json")) if file.stem not in OUTCOMES
]
# A number with a unit of measurement, outside of code.
MEASURED = re.compile(
    r"(?<![\w.])\d[\d.,]*\s?(?:%|times\b|us\b|ms\b|(?:samples|tokens|trajectories|[MG]B)/s|points\b)"
)
# What a script or a configuration is told, or what others have published: no measurement of ours.
SETTINGS = (
    "warms the model up to about 25 % accuracy",
    "ceiling (goal 45 %)",
    "decodes 16 sequences at once, a step of all of them in 8 ms and of one in",
    "6.1 ms; an update takes 0.4 s and 0.4 ms a token on one accelerator",
    "The time to 90 % is from",
    "of which 2 % change with each update",
    "up to 500 trajectories/s of 200 + 1,000 tokens",
    "within an hour 3 times",
    "for the trainer, 20 times for others",
    "A GPU counts as full at 95 % of its memory",
    " requires 10 %",
    "the trainer, 20 times for others",
    "is started again up to 5 times",
    "at most 3 times in a run",
    "at most 5 times a minute",
    "public pause sleeps for 20 ms",
    "256 points per curve",
    "% or more of the ",
    "(60 us each)",
    "36,000 tokens/s",
    "tail (2 % of the samples",
    "on data: 12 times",
    "which has the generator key: 1 times",
    "without keys on control: 40 times",
    "(goal: at least 80 %)",
)


pytestmark = pytest.mark.usefixtures("benchmarks_importable")


def load(name: str) -> ModuleType:
    return importlib.import_module(name)


def test_documents_and_plots_are_what_the_results_give() -> None:
    outdated = [str(path.relative_to(ROOT)) for path in load("render").outdated()]
    assert outdated == [], "run: make figures"


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_figures_follow_from_the_rows(file: Path) -> None:
    published = load("published").PUBLISHED
    assert file.stem in published, "no script is named for it"
    report = load("report").Report.read(file)
    report.restate(load(published[file.stem].script).summarise)
    content = json.loads(file.read_text(encoding="utf-8"))
    assert content["rows"]
    assert json.loads(json.dumps(report.tables)) == content["tables"]
    assert report.figures == pytest.approx(content["figures"])
    assert [(g["name"], g["met"]) for g in report.goals] == [
        (g["name"], g["met"]) for g in content["goals"]
    ]


@pytest.mark.parametrize(
    "path",
    [path for path in DOCUMENTS if path.name not in OUTCOMES.values()],
    ids=lambda path: path.name,
)
def test_no_measurement_stands_beside_the_results(path: Path) -> None:
    text = load("render").RENDERED.sub("", path.read_text(encoding="utf-8"))
    text = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    loose = [line for line in text.splitlines() if MEASURED.search(line)]
    assert [line for line in loose if not any(one in line for one in SETTINGS)] == []


def test_what_the_documents_show_has_a_script() -> None:
    render, published = load("render"), load("published").PUBLISHED
    texts = [path.read_text(encoding="utf-8") for path in DOCUMENTS]
    shown = {found["file"] for text in texts for found in render.RENDERED.finditer(text)}
    drawn = {file for _, files in render.PLOTS.values() for file in files}
    assert shown | drawn == published.keys()
    for one in published.values():
        source = (BENCHMARKS / f"{one.script}.py").read_text(encoding="utf-8")
        assert '"--json"' in source and "summarise" in source


def test_every_script_that_publishes_has_a_quick_form() -> None:
    scripts = {one.script for one in load("published").PUBLISHED.values()}
    assert scripts <= load("quick").quick_forms().keys()


def test_every_template_can_be_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those whose measurement is outstanding: their scripts state what they name."""
    monkeypatch.setitem(sys.modules, "trainer_peers", MagicMock())  # it imports TRL
    render, published = load("render"), load("published").PUBLISHED
    made: dict[str, Any] = {}
    for name, one in published.items():
        if (file := BENCHMARKS / "results" / f"{name}.json").exists():
            made[name] = json.loads(file.read_text(encoding="utf-8"))
            continue
        rows, facts = rows_of(name, load)
        report = load("report").Report(name, rows=rows, facts=facts)
        report.restate(load(one.script).summarise)
        how = {"date": "today", "command": "python", "hardware": "a machine", "load": [0, 1]}
        made[name] = vars(report) | how
    for path in DOCUMENTS:
        filled = render.render(path.read_text(encoding="utf-8"), made.__getitem__)
        assert "Not measured" not in filled, path.name
    for picture, files in render.PLOTS.values():
        assert picture([row for file in files for row in made[file]["rows"]]).startswith("<svg")


def given(name: str) -> dict[str, Any]:
    """The results of a benchmark called "one"; there are no others."""
    if name != "one":
        raise load("render").NotMeasuredError(name)
    goals = [{"name": "fast", "value": 0.5, "op": ">=", "goal": 1.0, "met": False}]
    tables = {"t": {"columns": ["a", "b"], "rows": [["x", "1.5"]]}}
    return {"figures": {"ratio": 4.5678, "share": 0.58}, "tables": tables, "goals": goals}


def test_a_template_gives_its_text() -> None:
    render = load("render").render
    inline = "it is <!-- = one: {ratio} times -->9 times<!-- / -->, {ratio}"
    assert render(inline, given) == inline.replace("9 times", "4.57 times")
    block = "<!-- = one\n{table:t}\n\n{share:.0%}\n\n{goals}\n-->\nold\n<!-- / -->\n"
    made = render(block, given)
    assert "| a | b |\n|---|---|\n| x | 1.5 |\n\n58%\n" in made
    assert "| fast | >= 1 | 0.5 | **missed** |" in made
    assert "old" not in made
    assert render(made, given) == made


def test_what_was_not_measured_says_so() -> None:
    made = load("render").render("<!-- = two: {ratio} times -->3 times<!-- / -->", given)
    assert "3 times" not in made and "published.py two" in made


def test_a_figure_that_no_script_states_is_an_error() -> None:
    with pytest.raises(LookupError, match=r"results/one\.json has no 'speed'"):
        load("render").render("<!-- = one: {speed} --><!-- / -->", given)


def test_a_table_of_numbers_is_text() -> None:
    report = load("report").Report("b")
    report.table("t", ["a", "b", "c"], [[1234567, 0.123456, None]])
    assert report.tables["t"]["rows"] == [["1,234,567", "0.123", "-"]]


def test_results_that_are_only_looked_at_keep_their_date(tmp_path: Path) -> None:
    report = load("report").Report("b")
    report.add(x=1)
    file = tmp_path / "b.json"
    report.write(file)
    file.write_text(re.sub(r'"date": "[^"]*"', '"date": "2001-01-01"', file.read_text()))
    again = load("report").Report.read(file)
    again.write(file)
    assert json.loads(file.read_text())["date"] == "2001-01-01"
    again.add(x=2)
    again.write(file)
    assert json.loads(file.read_text())["date"] != "2001-01-01"


def test_staleness_costs_an_objective_what_it_loses_against_its_own_runs() -> None:
    report = load("report").Report("staleness")
    for objective, level, accuracy in (("naive", 0, 0.7), ("tis_opsm", 0, 0.9),
                                       ("naive", 1, 0.6), ("tis_opsm", 1, 0.7)):  # fmt: skip
        report.add(
            task="sort", minibatches=1, objective=objective, staleness=level, seed=0,
            accuracy=accuracy, before=0.2, measured=level + 0.0,
        )  # fmt: skip
    report.restate(load("staleness_tables").summarise)
    assert report.figures["tis_opsm_loss"] == pytest.approx(20.0)
    assert report.tables["losses"]["rows"][0] == [
        "`tis_opsm`",
        "20.0 (20.0)",
        "0.0 (0.0)",
        "0 of 1",
    ]
    assert [goal["met"] for goal in report.goals] == [False, True]


def test_what_was_won_is_a_share_of_what_there_was_to_win() -> None:
    """A step of 10 s could become one of 6 s and became one of 8 s: half."""

    def row(mode: str, step_s: float, generation_s: float) -> dict[str, Any]:
        return {
            "form": "real", "mode": mode, "mix": "sort", "to_accuracy_s": 10 * step_s,
            "to_accuracy_steps": 10, "samples_per_s": 1 / step_s, "tokens_per_s": 1.0,
            "step_s": step_s, "final_reward": 1.0, "generation_s": generation_s,
            "training_s": 1.0, "steps": 10, "cpu_s": {"all": 100.0},
        }  # fmt: skip

    report = load("report").Report("end_to_end")
    for one in (row("sync, fixed split", 10.0, 6.0), row("async", 8.0, 6.0)):
        report.add(**one)
    report.restate(load("end_to_end_tables").summarise)
    assert report.figures["sort_won_of_step"] == pytest.approx(0.5)
    assert report.figures["sort_over_the_better_synchronous"] == pytest.approx(1.25)
