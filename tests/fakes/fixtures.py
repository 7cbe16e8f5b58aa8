"""Fixtures: a project folder to run `umbra` on, a Python without packages, a hub in a thread."""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import zmq
from fakes.hub_bench import Bench
from fakes.slowness import seconds

from umbra.proto.records import Trajectory
from umbra.services.weights.arena import remove_leftovers

if TYPE_CHECKING:
    from fakes.rank_bench import Trained

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
REWARD = """
def score(prompt, completion, row):
    return float(row["word"] in completion) + 0.01 * len(set(completion))

def raises(prompt, completion, row):
    raise ValueError("no such thing")
"""
RUN = """
[run]
name = "test"
steps = 4
[model]
path = "model"
[data]
prompts = "prompts.jsonl"
[environment]
kind = "reward"
reward = "tiny_reward:score"
[sampling]
max_tokens = 12
[buffer]
group_size = 4
batch_groups = 4
lease_s = {lease_s}
dead_after_s = {lease_s}
[generator]
device = "cpu"
threads = 1
slots = 16
max_context = 64
[trainer]
device = "cpu"
threads = 1
learning_rate = 1e-3
"""


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> Any:
    from umbra.services.modeling.pretrained import load_tokenizer

    return load_tokenizer(tiny_model_dir)


@pytest.fixture
def chat(tokenizer: Any) -> Any:
    """A `Chat` of the tiny model."""
    from umbra.services.modeling.chat import Chat

    return Chat(tokenizer, {tokenizer.convert_tokens_to_ids("<|end|>")})


@pytest.fixture
def model(tiny_model_dir: Path) -> Any:
    """The tiny model on one thread, the test's own: weights may be changed in place."""
    import torch

    from umbra.services.modeling.models import load_model

    torch.set_num_threads(1)
    return load_model(tiny_model_dir, torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of `rank_bench.narrow_model`: four query heads, two key heads."""
    from fakes.rank_bench import narrow_model

    return narrow_model(tmp_path_factory)


@pytest.fixture(scope="module")
def batches(request: pytest.FixtureRequest) -> list[list[Trajectory]]:
    """A batch for each of the STEPS of the module, or three."""
    from fakes.rank_bench import make_batches

    return make_batches(getattr(request.module, "STEPS", 3))


@pytest.fixture(scope="module")
def alone(
    request: pytest.FixtureRequest, directory: Path, batches: list[list[Trajectory]]
) -> Callable[[str], Trained]:
    """A function that returns what a single rank learns in one of the module's CASES."""
    from fakes.rank_bench import train

    return cache(lambda case: train(directory, batches, **request.module.CASES[case]))


@pytest.fixture(scope="module")
def together(
    request: pytest.FixtureRequest,
    directory: Path,
    batches: list[list[Trajectory]],
    tmp_path_factory: pytest.TempPathFactory,
) -> list[dict[str, Trained]]:
    """Return what each rank of the module's RANKS learned in each of its CASES.

    RANKS is their number, and settings of all cases.
    """
    from fakes.rank_bench import learn
    from fakes.rank_processes import on_ranks

    world, settings = request.module.RANKS
    cases = {name: {**case, **settings} for name, case in request.module.CASES.items()}
    return on_ranks(tmp_path_factory.mktemp("ranks"), world, learn, directory, batches, cases)


Closes = Callable[[Any], Any]


@pytest.fixture
def closes() -> Iterator[Closes]:
    """Close its arguments after the test, the last first."""
    with ExitStack() as stack:
        yield lambda one: stack.enter_context(closing(one))


@pytest.fixture
def project(tmp_path: Path, tiny_model: Path) -> Path:
    """A user's folder: run file, model, prompts and reward."""
    (tmp_path / "model").symlink_to(tiny_model)
    rows = [{"prompt": f"say {word}", "word": word} for word in "abcdefgh"]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tiny_reward.py").write_text(REWARD)
    run = RUN.format(lease_s=seconds(2.5))  # by how slow it is now
    (tmp_path / "run.toml").write_text(run)
    return tmp_path


@pytest.fixture
def run_id() -> Iterator[str]:
    name = f"test-{uuid.uuid4().hex[:8]}"
    yield name
    assert remove_leftovers(name) == []


@pytest.fixture
def bench(
    zmq_context: zmq.Context[zmq.Socket[bytes]], run_id: str, tmp_path: Path
) -> Iterator[Bench]:
    bench = Bench(zmq_context, run_id, tmp_path)
    yield bench
    bench.close()


@pytest.fixture
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules in the folder of the test, and scripts of `benchmarks/`, are forgotten after it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        file = Path(getattr(sys.modules[name], "__file__", None) or "/")
        if file.is_relative_to(tmp_path) or file.parent == BENCHMARKS:
            del sys.modules[name]


@pytest.fixture
def benchmarks_importable(own_modules: None) -> None:
    """Scripts of `benchmarks/` are imported by their names, again in each test."""
    sys.path.insert(0, str(BENCHMARKS))
