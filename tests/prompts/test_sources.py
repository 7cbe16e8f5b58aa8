"""Where prompts come from: the same rows in the same order, whatever happened in between."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.hub import Hub, ask_there, serving
from msgspec.structs import replace

from umbra.deploy.prepare.preflight import check_run, load_given
from umbra.proto.errors import UsageError
from umbra.services.buffer.prompts import PromptFeed, open_prompts, rows_by_environment
from umbra.services.config import DataConfig, EvalConfig, ModelConfig, NamedEnvironment, RunConfig
from umbra.services.prompts import pin_source, read_source

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


def test_every_epoch_has_all_rows_in_an_order_of_its_own_by_the_seed(tmp_path: Path) -> None:
    data = DataConfig(prompts=write(tmp_path / "p.jsonl", 20))
    feed = open_prompts(data, seed=1)
    first, second = draw(feed, 20), draw(feed, 20)
    assert set(first) == set(second) and first != second
    assert draw(open_prompts(data, seed=1), 40) == first + second
    assert draw(open_prompts(data, seed=2), 20) != first


def test_without_shuffle_the_order_is_that_of_the_file(tmp_path: Path) -> None:
    data = DataConfig(prompts=write(tmp_path / "p.jsonl", 10), shuffle=False)
    assert draw(open_prompts(data, seed=0), 12) == [f"row {n % 10}" for n in range(12)]


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


def test_a_position_in_other_prompts_is_refused(tmp_path: Path) -> None:
    feed = open_prompts(DataConfig(prompts=write(tmp_path / "p.jsonl", 3)), seed=0)
    other = open_prompts(DataConfig(prompts=write(tmp_path / "q.jsonl", 4)), seed=0)
    with pytest.raises(UsageError, match="use the same files"):
        other.seek(feed.position())


# -- columns with other names, and data sets that are elsewhere ------------------------------------

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
        assert rows_by_environment(data, [])[""][0].row == MAPPED[0]
        several = [NamedEnvironment(name="a", prompts=file)]
        named = next(open_prompts(DataConfig(columns=COLUMNS), seed=0, environments=several)).row
        assert named in [{**row, "environment": "a"} for row in MAPPED]
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
