"""Prompts that are elsewhere, and columns with other names: the same rows at each reading."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.hub import Hub, ask_there, serving

from umbra.deploy.prepare.preflight import check_run, load_given
from umbra.proto.errors import UsageError
from umbra.services.buffer.prompts import open_prompts, rows_to_try
from umbra.services.config import DataConfig, EvalConfig, ModelConfig, RunConfig
from umbra.services.prompts import pin_source, read_source

ROWS = [{"question": f"{n}+{n}", "answer": str(2 * n), "level": n} for n in range(4)]
LINES = "".join(f"{json.dumps(row)}\n" for row in ROWS).encode()
COLUMNS = {"prompt": "question"}
MAPPED = [{"prompt": r["question"], "answer": r["answer"], "level": r["level"]} for r in ROWS]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving() as found:
        ask_there(found, tmp_path / "home", monkeypatch)
        yield found


def rows(name: str, **how: Any) -> list[dict[str, Any]]:
    return [prompt.row for prompt in read_source(name, **how)]


class TestColumns:
    @pytest.fixture
    def file(self, tmp_path: Path) -> str:
        (tmp_path / "p.jsonl").write_bytes(LINES)
        return str(tmp_path / "p.jsonl")

    def test_they_get_our_names(self, file: str) -> None:
        assert rows(file, columns=COLUMNS) == MAPPED
        swapped = {"prompt": "answer", "answer": "question"}
        assert rows(file, columns=swapped)[1] == {"prompt": "2", "answer": "1+1", "level": 1}
        twice = {"prompt": "question", "text": "question"}
        assert rows(file, columns=twice)[1] == {
            "prompt": "1+1", "text": "1+1", "answer": "2", "level": 1
        }  # fmt: skip

    def test_the_remedy_is_told(self, file: str) -> None:
        with pytest.raises(UsageError, match=r"only question, answer, level: .*data\.columns = "):
            rows(file)
        with pytest.raises(UsageError, match=r"eval\.columns = "):
            rows(file, section="eval")
        with pytest.raises(UsageError, match='line 1: there is no column "problem" for prompt'):
            rows(file, columns={"prompt": "problem"})

    def test_all_who_read_a_run_prompts_apply_them(
        self, file: str, tmp_path: Path, tiny_model_dir: Path
    ) -> None:
        data = DataConfig(prompts=file, columns=COLUMNS, shuffle=False)
        assert next(open_prompts(data, seed=0)).row == MAPPED[0]
        assert rows_to_try(data)[""][0].row == MAPPED[0]
        several = DataConfig(prompts={file: 1.0}, columns=COLUMNS)
        assert next(open_prompts(several, seed=0)).row in MAPPED
        config = RunConfig(
            model=ModelConfig(path=str(tiny_model_dir)),
            data=data,
            eval=EvalConfig(prompts=file, columns=COLUMNS),
        )
        check_run(config)
        with pytest.raises(UsageError, match=r"eval\.prompts: .*eval\.columns = "):
            check_run(RunConfig(model=config.model, data=data, eval=EvalConfig(prompts=file)))


def test_a_url_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[data]\nprompts = "https://host/rows.jsonl?key=hidden"\n')
    with pytest.raises(UsageError, match=r"rows\.jsonl: prompts are not read from URLs") as refused:
        load_given(tmp_path / "run.toml", ())
    assert "hidden" not in str(refused.value)


class TestDataSets:
    @pytest.fixture
    def sums(self, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        """A data set on the hub with two configurations; its commit."""
        datasets: Any = pytest.importorskip("datasets")
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "sets")
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.url)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
        card = (
            "---\nconfigs:\n- config_name: main\n  data_files:\n"
            "  - {split: train, path: main/train.jsonl}\n  - {split: test, path: main/test.jsonl}\n"
            "- config_name: other\n  data_files:\n  - {split: train, path: other/train.jsonl}\n"
            "---\n"
        )
        last = json.dumps(ROWS[3]).encode()
        return hub.add(
            "datasets/acme/sums",
            {
                "README.md": card.encode(),
                "main/train.jsonl": LINES,
                "main/test.jsonl": last,
                "other/train.jsonl": last,
            },
        )

    def test_configuration_split_and_commit(self, hub: Hub, sums: str) -> None:
        name = pin_source("datasets:acme/sums:main:test")
        assert name == f"datasets:acme/sums@{sums}:main:test" and pin_source(name) == name
        assert rows(name, columns=COLUMNS) == MAPPED[3:]
        assert rows(pin_source("datasets:acme/sums:other:train"), columns=COLUMNS) == MAPPED[3:]
        assert rows("datasets:acme/sums:main:train[:2]", columns=COLUMNS) == MAPPED[:2]

    def test_mistakes(self, hub: Hub, sums: str) -> None:
        with pytest.raises(UsageError, match="the hub shows no data set of that name"):
            pin_source("datasets:acme/none")
        with pytest.raises(UsageError, match="write it as datasets:NAME, :NAME:SPLIT or"):
            pin_source("datasets:acme/sums:a:b:c")
        with pytest.raises(UsageError, match="acme/sums:main:dev cannot be loaded"):
            rows("datasets:acme/sums:main:dev")
