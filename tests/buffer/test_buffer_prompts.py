"""Prompts: order, identity, and mistakes that a person can mend from the message alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from umbra.proto.errors import UsageError
from umbra.services.buffer.prompts import open_prompts
from umbra.services.config import DataConfig
from umbra.services.prompts import read_source

TEN = "".join(f'{{"prompt": "p{number}", "answer": {number}}}\n' for number in range(1, 11))


def take(path: Path, count: int, *, shuffle: bool = True, seed: int = 0) -> list[str]:
    feed = open_prompts(DataConfig(prompts=str(path), shuffle=shuffle), seed=seed)
    return [next(feed).prompt_id for _ in range(count)]


@pytest.fixture
def ten(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(TEN)
    return path


def test_every_epoch_has_every_row_in_an_order_of_its_own(ten: Path) -> None:
    ids = take(ten, 30)
    epochs = [ids[:10], ids[10:20], ids[20:]]
    assert all(sorted(epoch, key=int) == [str(n) for n in range(1, 11)] for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_seed_decides_the_order(ten: Path) -> None:
    assert take(ten, 30, seed=1) == take(ten, 30, seed=1)
    assert take(ten, 30, seed=1) != take(ten, 30, seed=2)


def test_without_shuffle_the_order_is_the_file_s(ten: Path) -> None:
    assert take(ten, 12, shuffle=False) == [*map(str, range(1, 11)), "1", "2"]


def test_ids_are_line_numbers_whatever_the_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('\n{"prompt": "x"}\r\n\n  \n{"prompt": [{"role": "user", "content": "y"}]}')
    assert [(p.prompt_id, p.row["prompt"]) for p in read_source(path)] == [
        ("2", "x"),
        ("5", [{"role": "user", "content": "y"}]),
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not a JSON object"),
        ("[1]", "not a JSON object"),
        ('{"text": "x"}', 'no "prompt"'),
        ('{"prompt": null}', "got None"),
        ('{"prompt": 3}', "got 3"),
        ('{"prompt": true}', "got True"),
        ('{"prompt": ""}', "got ''"),
        ('{"prompt": {}}', "got {}"),
        ('{"prompt": []}', "got []"),
        ('{"prompt": ["x"]}', "got ['x']"),
        ('{"prompt": [{"role": "user"}]}', "got [{'role': 'user'}]"),
        ('{"prompt": "x", "n": 99999999999999999999999}', "more than 64 bits"),
        ('{"prompt": "x", "prompt": "y"}', '"prompt" is given twice'),
        ('{"prompt": "x", "n": [{"a": 1, "a": 1}]}', '"a" is given twice'),
        ('{"prompt": "x", "n": ' + "[" * 99_999 + "]" * 99_999 + "}", "not a JSON object"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n\n{line}\n')
    with pytest.raises(UsageError, match=r"prompts\.jsonl, line 3") as caught:
        read_source(path)
    assert words in str(caught.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"data\.prompts is not set"):
        read_source("")
    with pytest.raises(UsageError, match=r"missing\.jsonl cannot be read"):
        read_source(tmp_path / "missing.jsonl")
    with pytest.raises(UsageError, match="cannot be read"):
        read_source(tmp_path)
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(UsageError, match=r"empty\.jsonl is empty"):
        read_source(tmp_path / "empty.jsonl")
