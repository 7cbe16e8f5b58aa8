"""Rows of each format, and odd values in them: read as meant, or refused by their place."""

import decimal
import enum
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from umbra.proto.bounds import ROW_KEYS
from umbra.proto.errors import UsageError
from umbra.services.prompts import ROW_BYTES, check_row, read_source, rows_of

pandas = pytest.importorskip("pandas")
pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
datasets = pytest.importorskip("datasets")

ROWS: list[dict[str, Any]] = [
    {"prompt": f"sort {n}", "answer": str(n), "weight": n / 2, "tags": ["a", "b"][: n % 3]}
    for n in range(5)
]
PADDED: list[dict[str, Any]] = [  # by Arrow, which has every key in every row
    {"prompt": [{"role": "user", "content": "a"}], "call": {"x": 1}},
    {
        "prompt": [
            {"role": "assistant", "content": "b", "reasoning_content": "c"},
            {"role": "user", "content": "d", "name": "e"},
        ],
        "call": {"y": "f"},
    },
]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def in_parquet(path: Path, **splits: list[dict[str, Any]]) -> str:
    (rows,) = splits.values()
    parquet.write_table(pyarrow.Table.from_pylist(rows), f"{path}.parquet")
    return f"{path}.parquet"


def in_json(path: Path, **splits: list[dict[str, Any]]) -> str:
    path.mkdir()
    for split, rows in splits.items():
        (path / f"{split}.json").write_text("\n".join(map(json.dumps, rows)))
    return f"datasets:{path}"


def saved(path: Path, **splits: list[dict[str, Any]]) -> str:
    made = {split: datasets.Dataset.from_list(rows) for split, rows in splits.items()}
    datasets.DatasetDict(made).save_to_disk(str(path))
    return f"datasets:{path}"


def saved_alone(path: Path, **splits: list[dict[str, Any]]) -> str:
    (rows,) = splits.values()
    datasets.Dataset.from_list(rows).save_to_disk(str(path))
    return f"datasets:{path}"


@pytest.mark.parametrize("rows", [ROWS, PADDED], ids=["plain", "padded"])
@pytest.mark.parametrize("write", [in_parquet, in_json, saved, saved_alone])
def test_every_format_gives_the_rows_that_were_written(
    tmp_path: Path, write: Callable[..., str], rows: list[dict[str, Any]]
) -> None:
    found = read_source(write(tmp_path / "rows", train=rows))
    assert [prompt.row for prompt in found] == rows
    assert [prompt.prompt_id for prompt in found] == [str(n + 1) for n in range(len(rows))]


@pytest.mark.parametrize("write", [in_json, saved])
def test_a_split_is_named_behind_its_set(tmp_path: Path, write: Callable[..., str]) -> None:
    name = write(tmp_path / "set", train=ROWS[:3], test=ROWS[3:])
    assert [prompt.row for prompt in read_source(name)] == ROWS[:3]
    assert [prompt.row for prompt in read_source(f"{name}:test")] == ROWS[3:]


OTHER = [{"question": "x", "answer": "y"}]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (lambda path: f"{path}.parquet", "there is no such file"),
        (lambda path: in_parquet(path, train=[]), "has no rows"),
        (lambda path: in_parquet(path, train=OTHER), "only question, answer"),
        (lambda path: in_parquet(path, train=[ROWS[0], {"prompt": None}]), "row 2"),
        (lambda path: f"datasets:{path}", "cannot be loaded"),
        (lambda path: in_json(path, train=ROWS) + ":dev", "dev"),
        (lambda path: saved(path, test=ROWS), "no split train, only test"),
    ],
)
def test_a_bad_source_is_told_in_one_sentence(
    tmp_path: Path, source: Callable[[Path], str], words: str
) -> None:
    with pytest.raises(UsageError) as caught:
        read_source(source(tmp_path / "rows"))
    text = str(caught.value)
    assert words in text and "\n" not in text
    assert str(tmp_path) in text


class Color(str, enum.Enum):  # noqa: UP042 - whose `str` is "Color.RED"
    RED = "red"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.array([1.0, np.nan]), r"\[1\]: nan is no number"),
        (memoryview(b"raw"), "a memoryview is no JSON value"),
        (np.array(["2026-01-01"], dtype="datetime64[ns]"), "a ndarray is no JSON value"),
        (np.zeros(1, [("x", int)]), "a ndarray is no JSON value"),
        (decimal.Decimal("1.5"), "a Decimal is no JSON value"),
        (10**30, "more than 64 bits"),
        ("a\ud800b", "a lone surrogate"),
        ({"deep": [{"er": b""}]}, r'"odd".deep\[0\].er: a bytes'),
        ({1: 2}, "the key 1 is a int"),
    ],
)
def test_what_json_cannot_say_is_refused_with_row_and_column(value: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words) as refused:
        check_row({"prompt": "x", "odd": value}, "here, row 7")
    assert str(refused.value).startswith('here, row 7, "odd"')


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.int64(3), 3),
        (np.str_("x"), "x"),
        (Color.RED, "red"),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (np.array([{"a": None, "b": np.int8(1)}], dtype=object), [{"b": 1}]),
        ({"a": 1, "b": None, "c": {"d": None}}, {"a": 1, "c": {}}),
        ([1, None], [1, None]),
        (2**63, 2**63),
    ],
)
def test_what_has_a_json_value_becomes_it(value: Any, expected: Any) -> None:
    found = check_row({"prompt": "x", "odd": value}, "here")["odd"]
    assert found == expected
    assert type(found) is type(expected)


def test_a_row_that_no_generator_would_receive_is_refused() -> None:
    row: dict[str, Any] = {"prompt": "x"}
    with pytest.raises(UsageError, match=f"{ROW_KEYS + 1} keys; {ROW_KEYS} are the most"):
        check_row(row | {str(n): 0 for n in range(ROW_KEYS)}, "here")
    with pytest.raises(UsageError, match=f"bytes; {ROW_BYTES} are the most"):
        check_row(row | {"long": "x" * ROW_BYTES}, "here")
    deep: Any = 1
    for _ in range(600):
        deep = [deep]
    with pytest.raises(UsageError, match="cannot be sent to a generator"):
        check_row(row | {"deep": deep}, "here")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not a JSON object"),
        ("[1]", "not a JSON object"),
        ('{"prompt": "x", "n": ' + "[" * 99_999 + "]" * 99_999 + "}", "not a JSON object"),
        ('{"text": "x"}', 'no "prompt"'),
        *(
            (f'{{"prompt": {said}}}', "got ")
            for said in ("3", "null", '""', "{}", "[]", '["x"]', '[{"role": "user"}]')
        ),
        ('{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}', "got [{'role': 'user'"),
        ('{"prompt": "x", "n": 99999999999999999999999}', "more than 64 bits"),
        ('{"prompt": "x", "n": [{"a": 1, "a": 1}]}', '"a" is given twice'),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n\n{line}\n')
    with pytest.raises(UsageError, match=r"prompts\.jsonl, line 3") as caught:
        read_source(path)
    assert words in str(caught.value)


@pytest.mark.timeout(30)
def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "text.parquet").write_text("no parquet at all")
    os.mkfifo(tmp_path / "pipe.jsonl")
    for name, words in [
        ("text.parquet", r"text\.parquet.*no Parquet file"),
        ("missing.jsonl", r"missing\.jsonl cannot be read"),
        (".", "cannot be read"),
        ("empty.jsonl", r"empty\.jsonl is empty"),
        ("pipe.jsonl", r"pipe\.jsonl cannot be read: no regular file"),
    ]:
        with pytest.raises(UsageError, match=words):
            read_source(tmp_path / name)


@pytest.mark.parametrize(
    "table, words",
    [
        (datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)), "holds splits: give one"),
        ({"prompt": ["one"]}, "not a dict"),
        (pandas.DataFrame(ROWS), r"not a DataFrame; .* frame.to_dict\(.records.\)"),
        (["one", 2], "row 2 is a int"),
    ],
)
def test_what_has_no_rows_is_refused_by_its_type(table: Any, words: str) -> None:
    with pytest.raises(UsageError, match=f"^prompts.*{words}"):
        rows_of(table, "prompts")


def test_a_file_of_windows_is_read(tmp_path: Path) -> None:
    """With a byte order mark, and lines that end as there; ids are numbers of lines."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "one"}\r\n\r\n{"prompt": "two"}\r\n')
    found = [(prompt.prompt_id, prompt.row["prompt"]) for prompt in read_source(str(path))]
    assert found == [("1", "one"), ("3", "two")]
