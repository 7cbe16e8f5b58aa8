"""Where prompts come from: rows of each format, and the same order whatever happened in between."""

import decimal
import enum
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.hub import ask_there, serving
from msgspec.structs import replace

from umbra.deploy.prepare.preflight import check_run, load_given
from umbra.proto.bounds import ROW_KEYS
from umbra.proto.errors import UsageError
from umbra.services.buffer.prompts import PromptFeed, open_prompts, rows_by_environment
from umbra.services.config import DataConfig, EvalConfig, ModelConfig, NamedEnvironment, RunConfig
from umbra.services.prompts import ROW_BYTES, check_row, pin_source, read_source, rows_of

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
    found = [(prompt.prompt_id, prompt.row["prompt"]) for prompt in read_source(path)]
    assert found == [("1", "one"), ("3", "two")]


# -- their order ---------------------------------------------------------------------------------

MODULE = """
def seven():
    return ({"prompt": f"row {number}"} for number in range(7))

def none():
    return []

def numbered():
    return [{1: "one"}]

def others():
    return [{"prompt": "x", "environment": "c"}]
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rows.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def write(path: Path, count: int, name: str = "row") -> str:
    path.write_text("".join(json.dumps({"prompt": f"{name} {i}"}) + "\n" for i in range(count)))
    return str(path)


def draw(feed: PromptFeed, count: int) -> list[str]:
    return [next(feed).row["prompt"] for _ in range(count)]


def mixed(tmp_path: Path) -> list[NamedEnvironment]:
    a, b = write(tmp_path / "a.jsonl", 3, "a"), write(tmp_path / "b.jsonl", 50, "b")
    first = NamedEnvironment(name="a", prompts=a, weight=3.0)
    return [first, NamedEnvironment(name="b", prompts=b, weight=1.0)]


def test_every_epoch_has_all_rows_in_an_order_of_its_own_or_the_files(tmp_path: Path) -> None:
    data = DataConfig(prompts=write(tmp_path / "p.jsonl", 20))
    feed = open_prompts(data, seed=1)
    first, second = draw(feed, 20), draw(feed, 20)
    assert set(first) == set(second) and first != second
    assert draw(open_prompts(data, seed=1), 40) == first + second
    assert draw(open_prompts(data, seed=2), 20) != first
    in_order = open_prompts(replace(data, shuffle=False), seed=1)
    assert draw(in_order, 22) == [f"row {n % 20}" for n in range(22)]


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize("kind", ["one", "mixture", "function"])
def test_no_prompt_is_skipped_or_repeated_after_a_restart(kind: str, tmp_path: Path) -> None:
    prompts = {"one": write(tmp_path / "p.jsonl", 7), "function": "my_rows:seven"}.get(kind, "")
    data, environments = DataConfig(prompts=prompts), [] if prompts else mixed(tmp_path)
    whole = draw(open_prompts(data, seed=1, environments=environments), 60)
    for cut in (0, 1, 7, 20):
        feed = open_prompts(data, seed=1, environments=environments)
        draw(feed, cut)
        position: dict[str, Any] = json.loads(json.dumps(feed.position()))
        again = open_prompts(data, seed=1, environments=environments)
        again.seek(position)
        assert draw(again, 60 - cut) == whole[cut:]
    other = open_prompts(DataConfig(prompts=write(tmp_path / "q.jsonl", 4)), seed=1)
    with pytest.raises(UsageError, match="4 rows.*use the same" if prompts else "one file.*same"):
        other.seek(open_prompts(data, seed=1, environments=environments).position())


def test_sources_are_drawn_by_weight_and_their_ids_differ(tmp_path: Path) -> None:
    feed = open_prompts(DataConfig(), seed=0, environments=mixed(tmp_path))
    prompts = [next(feed) for _ in range(2000)]
    shares = Counter(prompt.row["environment"] for prompt in prompts)
    assert 1400 < shares["a"] < 1600
    assert len({p.prompt_id for p in prompts}) == len({p.row["prompt"] for p in prompts}) == 53
    assert all(p.prompt_id.startswith(f"{p.row['environment']}/") for p in prompts)
    assert {p.row["prompt"][0] for p in prompts if p.row["environment"] == "a"} == {"a"}


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("prompts", "changes", "said"),
    [
        ("", None, "data.prompts is not set"),
        ("no_such_module:f", None, "no_such_module:f gave no prompts"),
        ("my_rows:none", None, "my_rows:none has no rows"),
        ("my_rows:missing", None, "my_rows:missing gave no prompts: AttributeError"),
        ("my_rows:numbered", None, 'there is no "prompt", only 1'),
        ("shared.jsonl", {}, r"data.prompts = shared.jsonl, and .* of its own: remove it"),
        ("", {"prompts": ""}, r"environments.b.prompts is not set"),
        ("", {"prompts": "my_rows:others"}, r"\"environment\" is 'c', but the file is that of 'b'"),
    ],
)
def test_mistakes_are_named(
    prompts: str, changes: dict[str, Any] | None, said: str, tmp_path: Path
) -> None:
    a, b = mixed(tmp_path)
    environments = [] if changes is None else [a, replace(b, **changes)]
    with pytest.raises(UsageError, match=said):
        open_prompts(DataConfig(prompts=prompts), seed=0, environments=environments)


# -- columns with other names, and data sets that are elsewhere ------------------------------------

SUMS = [{"question": f"{n}+{n}", "answer": str(2 * n), "level": n} for n in range(4)]
LINES = "".join(f"{json.dumps(row)}\n" for row in SUMS).encode()
COLUMNS = {"prompt": "question"}
MAPPED = [{"prompt": r["question"], "answer": r["answer"], "level": r["level"]} for r in SUMS]


def rows(name: str, columns: dict[str, str] = COLUMNS, **how: Any) -> list[dict[str, Any]]:
    return [prompt.row for prompt in read_source(name, columns=columns, **how)]


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "p.jsonl").write_bytes(LINES)
    return str(tmp_path / "p.jsonl")


def test_columns_get_our_names_or_the_remedy_is_told(file: str) -> None:
    assert rows(file) == MAPPED
    swapped = {"prompt": "answer", "answer": "question"}
    assert rows(file, swapped)[1] == {"prompt": "2", "answer": "1+1", "level": 1}
    twice = rows(file, {"prompt": "question", "text": "question"})[1]
    assert twice == {"prompt": "1+1", "text": "1+1", "answer": "2", "level": 1}
    with pytest.raises(UsageError, match=r"only question, answer, level: .*eval\.columns = "):
        rows(file, {}, section="eval")
    with pytest.raises(UsageError, match='line 1: there is no column "problem" for prompt'):
        rows(file, {"prompt": "problem"})


def test_all_who_read_prompts_of_a_run_rename_columns(file: str, tiny_model_dir: Path) -> None:
    data = DataConfig(prompts=file, columns=COLUMNS, shuffle=False)
    assert next(open_prompts(data, seed=0)).row == MAPPED[0]
    assert rows_by_environment(data, [])[""][0].row == MAPPED[0]
    several = [NamedEnvironment(name="a", prompts=file)]
    named = next(open_prompts(DataConfig(columns=COLUMNS), seed=0, environments=several)).row
    assert named in [{**row, "environment": "a"} for row in MAPPED]
    model, evaluation = ModelConfig(path=str(tiny_model_dir)), EvalConfig(prompts=file)
    check_run(RunConfig(model=model, data=data, eval=replace(evaluation, columns=COLUMNS)))
    with pytest.raises(UsageError, match=r"eval\.prompts: .*eval\.columns = "):
        check_run(RunConfig(model=model, data=data, eval=evaluation))


def test_a_url_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[data]\nprompts = "https://host/rows.jsonl?key=hidden"\n')
    with pytest.raises(UsageError, match=r"rows\.jsonl: prompts are not read from URLs") as refused:
        load_given(tmp_path / "run.toml", ())
    assert "hidden" not in str(refused.value)


CARD = b"""---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train.jsonl}
  - {split: test, path: main/test.jsonl}
- config_name: other
  data_files:
  - {split: train, path: other/train.jsonl}
---
"""


@pytest.fixture
def sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The commit of a data set on a hub, with two configurations."""
    last = json.dumps(SUMS[3]).encode()
    files = {"main/train.jsonl": LINES, "main/test.jsonl": last, "other/train.jsonl": last}
    with serving() as hub:
        ask_there(hub, tmp_path / "home", monkeypatch)
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.url)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
        yield hub.add("datasets/acme/sums", {"README.md": CARD, **files})


def test_configuration_split_and_commit_of_a_data_set(sums: str) -> None:
    name = pin_source("datasets:acme/sums:main:test")
    assert name == f"datasets:acme/sums@{sums}:main:test" and pin_source(name) == name
    assert rows(name) == MAPPED[3:]
    assert rows(pin_source("datasets:acme/sums:other:train")) == MAPPED[3:]
    assert rows("datasets:acme/sums:main:train[:2]") == MAPPED[:2]
    with pytest.raises(UsageError, match="the hub shows no data set of that name"):
        pin_source("datasets:acme/none")
    with pytest.raises(UsageError, match="write it as datasets:NAME, :NAME:SPLIT or"):
        pin_source("datasets:acme/sums:a:b:c")
    with pytest.raises(UsageError, match="acme/sums:main:dev cannot be loaded"):
        rows("datasets:acme/sums:main:dev")
