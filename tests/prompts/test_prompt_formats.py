"""Parquet files and data sets as prompts, read by the real libraries; no network."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from umbra.proto.errors import UsageError
from umbra.services.prompts import read_source

parquet = pytest.importorskip("pyarrow.parquet")
pyarrow = pytest.importorskip("pyarrow")
datasets = pytest.importorskip("datasets")

ROWS = [
    {"prompt": f"sort {n}", "answer": str(n), "weight": n / 2, "tags": ["a", "b"][: n % 3]}
    for n in range(5)
]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def write_folder(folder: Path, **splits: list[dict[str, Any]]) -> str:
    """A folder of JSON files, one per split."""
    folder.mkdir()
    for split, rows in splits.items():
        (folder / f"{split}.json").write_text("\n".join(map(json.dumps, rows)))
    return f"datasets:{folder}"


def test_a_parquet_file(tmp_path: Path) -> None:
    found = read_source(write_parquet(tmp_path / "p.parquet", ROWS))
    assert [prompt.row for prompt in found] == ROWS
    assert [prompt.prompt_id for prompt in found] == ["1", "2", "3", "4", "5"]


def test_a_folder_of_json_files_and_its_splits(tmp_path: Path) -> None:
    name = write_folder(tmp_path / "set", train=ROWS[:3], test=ROWS[3:])
    assert [p.row for p in read_source(name)] == ROWS[:3]
    assert [p.row for p in read_source(f"{name}:test")] == ROWS[3:]


def test_what_save_to_disk_wrote(tmp_path: Path) -> None:
    one = datasets.Dataset.from_list(ROWS)
    one.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict(train=one, heldout=one.select([1])).save_to_disk(str(tmp_path / "two"))
    assert [p.row for p in read_source(f"datasets:{tmp_path}/one")] == ROWS
    assert [p.row for p in read_source(f"datasets:{tmp_path}/two")] == ROWS
    assert [p.row for p in read_source(f"datasets:{tmp_path}/two:heldout")] == ROWS[1:2]


def mistakes(folder: Path) -> dict[str, tuple[str, str]]:
    """Return faulty sources, each with its error."""
    (folder / "text.parquet").write_text("no parquet at all")
    other = [{"question": "x", "answer": "y"}]
    saved = folder / "saved"
    datasets.DatasetDict(test=datasets.Dataset.from_list(ROWS)).save_to_disk(str(saved))
    when = datetime.datetime(2026, 1, 1)
    return {
        "missing file": (str(folder / "no.parquet"), "there is no such file"),
        "no Parquet": (str(folder / "text.parquet"), "no Parquet file"),
        "no rows": (write_parquet(folder / "empty.parquet", ROWS[:1] * 0 or []), "has no rows"),
        "missing column": (write_parquet(folder / "a.parquet", other), "only question, answer"),
        "bad row": (write_parquet(folder / "b.parquet", [ROWS[0], {"prompt": None}]), "row 2"),
        "bad type": (
            write_parquet(folder / "c.parquet", [{"prompt": "x", "at": when}]),
            "datetime",
        ),
        "missing set": (f"datasets:{folder}/nothing", "cannot be loaded"),
        "unknown split": (write_folder(folder / "d", train=ROWS) + ":dev", "dev"),
        "unknown saved split": (f"datasets:{saved}", "no split train, only test"),
        "column of a set": (write_folder(folder / "e", train=other), "only question, answer"),
    }


def test_mistakes_are_told_in_one_sentence(tmp_path: Path) -> None:
    for what, (name, said) in mistakes(tmp_path).items():
        with pytest.raises(UsageError) as caught:
            read_source(name)
        text = str(caught.value)
        assert said in text and "\n" not in text, (what, text)
        assert str(tmp_path) in text, (what, text)
