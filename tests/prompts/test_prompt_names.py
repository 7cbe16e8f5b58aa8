"""Prompts that are elsewhere, and columns with other names: the same rows at each reading."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.hub import Hub, ask_there, serving

from umbra import cli
from umbra.deploy.prepare.load import load_run
from umbra.deploy.prepare.preflight import check_run
from umbra.proto.errors import StartupError, UsageError
from umbra.services.buffer.prompts import first_rows, open_prompts
from umbra.services.config import DataConfig, EvalConfig, ModelConfig, RunConfig
from umbra.services.prompts.download import cache_folder, shown, without_secrets
from umbra.services.prompts.readers import is_elsewhere, pin_source, read_source

ROWS = [{"question": f"{n}+{n}", "answer": str(2 * n), "level": n} for n in range(4)]
LINES = "".join(f"{json.dumps(row)}\n" for row in ROWS).encode()
COLUMNS = {"prompt": "question"}
MAPPED = [{"prompt": r["question"], "answer": r["answer"], "level": r["level"]} for r in ROWS]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
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
        assert first_rows(data) == {"": MAPPED[0]}
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

    def test_from_a_run_file_and_a_flag(self, file: str, tmp_path: Path) -> None:
        text = f'[data]\nprompts = "{file}"\ncolumns = {{ prompt = "question" }}\n'
        (tmp_path / "run.toml").write_text(text + '[model]\npath = "/m"\n')
        config = load_run(tmp_path / "run.toml", ("eval.columns.answer=gold",))
        assert config.data.columns == COLUMNS and config.eval.columns == {"answer": "gold"}


class TestUrls:
    def test_it_is_downloaded_once_and_stays_the_same(self, hub: Hub) -> None:
        hub.files["sums.jsonl"] = LINES
        url = f"{hub.url}/sums.jsonl"
        pinned = pin_source(url)
        assert pinned.startswith(f"{url}#sha256=") and pin_source(pinned) == pinned
        hub.files["sums.jsonl"] = b'{"prompt": "other"}\n'
        assert rows(pinned, columns=COLUMNS) == MAPPED
        assert hub.requests == ["GET sums.jsonl"]

    def test_no_query_and_no_password_is_shown(
        self, hub: Hub, tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for text, public in {
            "http://ann:pw@host/a.jsonl?token=s3#sha256=0": "http://host/a.jsonl?...#sha256=0",
            '{"https://h/x?t=s3": 1.0}': '{"https://h/x?...": 1.0}',
            "https://h/x#sha256=1": "https://h/x#sha256=1",
            "what? https://h/x, who@else?": "what? https://h/x, who@else?",
        }.items():
            assert shown(text) == public
        hub.files["a.jsonl"] = b'{"prompt": "x"}\nno JSON\n'
        with pytest.raises(
            UsageError, match=r"/a\.jsonl\?\.\.\.#sha256=\w+, line 2: not a JSON"
        ) as bad:
            rows(pin_source(f"{hub.url}/a.jsonl?token=s3cret"))
        with pytest.raises(
            UsageError, match=r"none\.jsonl\?\.\.\.: the server answered 404"
        ) as none:
            pin_source(f"{hub.url}/none.jsonl?token=s3cret")
        hub.files["sums.jsonl"] = LINES
        (tmp_path / "run.toml").write_text(
            f'[model]\npath = "{tiny_model_dir}"\n'
            f'[data]\nprompts = "{hub.url}/sums.jsonl?token=s3cret"\n'
        )
        config = load_run(tmp_path / "run.toml", ())
        assert "token=s3cret" in config.data.prompts  # whoever goes on reads it from there
        assert "sums.jsonl?...#sha256=" in (said := capsys.readouterr().err)
        assert "s3cret" not in f"{said}{bad.value}{none.value}"

    def test_another_machine_reads_the_same_or_nothing(self, hub: Hub) -> None:
        hub.files["sums.jsonl"] = LINES
        pinned = pin_source(f"{hub.url}/sums.jsonl")
        (kept,) = cache_folder().iterdir()
        kept.unlink()
        assert rows(pinned, columns=COLUMNS) == MAPPED
        kept.unlink()
        hub.files["sums.jsonl"] = b'{"prompt": "other"}\n'
        with pytest.raises(UsageError, match=r"gives other bytes now .* than those that were"):
            rows(pinned)

    def test_what_is_wrong_is_said_with_the_url(self, hub: Hub) -> None:
        hub.files["a.jsonl"] = b'{"prompt": "x"}\nno JSON\n'
        with pytest.raises(UsageError, match=rf"{hub.url}/a.jsonl, line 2: not a JSON object"):
            rows(f"{hub.url}/a.jsonl")
        with pytest.raises(UsageError, match=r"none\.jsonl: the server answered 404"):
            pin_source(f"{hub.url}/none.jsonl")
        with pytest.raises(StartupError, match=r"http://127.0.0.1:9/x cannot be reached"):
            pin_source("http://127.0.0.1:9/x")

    def test_what_was_damaged_since_is_downloaded_again(self, hub: Hub) -> None:
        hub.files["sums.jsonl"] = LINES
        pinned = pin_source(f"{hub.url}/sums.jsonl?key=hidden")
        (kept,) = cache_folder().iterdir()
        kept.write_bytes(LINES.replace(b"3+3", b"3+4"))
        assert rows(pinned, columns=COLUMNS) == MAPPED
        assert kept.read_bytes() == LINES and len(hub.requests) == 2
        rows(pinned, columns=COLUMNS)
        assert len(hub.requests) == 2

    def test_a_query_and_an_account_are_told_nobody(
        self,
        hub: Hub,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        caplog.set_level("INFO")
        hub.files["sums.jsonl"] = b'{"prompt": 3}\n'
        url = f"{hub.url}/sums.jsonl?key=hidden"
        (tmp_path / "run.toml").write_text(f'[model]\npath = "/m"\n[data]\nprompts = "{url}"\n')
        pinned = str(load_run(tmp_path / "run.toml", ()).data.prompts)
        assert pinned.startswith(url)
        said = [capsys.readouterr().err, caplog.text]
        assert f"prompts: {hub.url}/sums.jsonl?...#sha256=" in said[0]
        wrong = (url, f"{hub.url}/none.parquet?key=hidden", "http://127.0.0.1:9/x?key=hidden")
        for name in (*wrong, f"http://me:hidden@127.0.0.1:x/{'y'}", f"{url} hidden"):
            with pytest.raises((UsageError, StartupError)) as caught:
                rows(name)
            said.append(str(caught.value))
        with pytest.raises(UsageError, match="gives other bytes") as other:
            rows(f"{url}#sha256={'0' * 64}")
        said.append(str(other.value))
        assert "hidden" not in "".join(said)
        tree = {"data": {"prompts": pinned, "sources": {url: 1.0}}, "names": [url, "a.jsonl"]}
        assert "hidden" not in str(without_secrets(tree)) and tree["data"]["prompts"] == pinned

    def test_a_cut_download_is_not_kept(self, hub: Hub) -> None:
        hub.files["sums.jsonl"] = LINES
        hub.cut_after = 10
        with pytest.raises(StartupError, match="cannot be downloaded"):
            pin_source(f"{hub.url}/sums.jsonl")
        assert list(cache_folder().iterdir()) == []

    def test_parquet(self, hub: Hub, tmp_path: Path) -> None:
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "p.parquet")
        hub.files["p.parquet"] = (tmp_path / "p.parquet").read_bytes()
        name = pin_source(f"{hub.url}/p.parquet?download=true")
        assert rows(name, columns=COLUMNS) == MAPPED


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

    def test_a_folder_is_not_looked_for(self, hub: Hub, tmp_path: Path) -> None:
        name = f"datasets:{tmp_path}"
        assert not is_elsewhere(name) and pin_source(name) == name and hub.requests == []

    def test_a_folder_is_named_from_anywhere(
        self, hub: Hub, tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "mine" / "rows").mkdir(parents=True)
        run_file = tmp_path / "mine" / "run.toml"
        text = f'[model]\npath = "{tiny_model_dir}"\n[data]\nprompts = "datasets:rows:train[:3]"\n'
        run_file.write_text(text)
        monkeypatch.chdir(tmp_path)
        config = load_run(run_file, ())
        assert config.data.prompts == f"datasets:{tmp_path}/mine/rows:train[:3]"
        (tmp_path / "mine" / "rows").rename(tmp_path / "rows")
        assert load_run(run_file, ()).data.prompts == f"datasets:{tmp_path}/rows:train[:3]"

    def test_without_a_network_the_library_decides(
        self, hub: Hub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        assert pin_source("datasets:acme/sums:train") == "datasets:acme/sums:train"


def test_a_run_reads_what_its_beginning_pinned(
    hub: Hub, tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.files["sums.jsonl"] = LINES
    url = f"{hub.url}/sums.jsonl"
    (tmp_path / "run.toml").write_text(
        f'[model]\npath = "{tiny_model_dir}"\n'
        f'[data]\nprompts = "{url}"\ncolumns = {{ prompt = "question" }}\n'
        f'[eval]\nprompts = "{url}"\ncolumns = {{ prompt = "question" }}\n'
    )
    config = load_run(tmp_path / "run.toml", ())
    assert config.data.prompts == config.eval.prompts == pin_source(url)
    assert capsys.readouterr().err == f"prompts: {config.data.prompts}\n"
    check_run(config)
    given = ["--prompts", config.eval.prompts, "--set", "eval.columns.prompt=question"]
    more = ["--environment", "exact", "--max-tokens", "2", "--samples", "1", "--json"]
    assert cli.main(["eval", str(tiny_model_dir), *given, *more]) == 0
    assert hub.requests == ["GET sums.jsonl", "GET sums.jsonl"]  # and once by this test
