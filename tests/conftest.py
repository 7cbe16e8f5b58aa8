"""Fixtures and settings that all tests share."""

import os
import random
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from fakes.slowness import limit

# Before anything imports a library that would look for a hub: tests never use the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Else each of many processes compiles all modules, the workers also the tests: 10 s of a core each.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import pytest
import zmq
from hypothesis import HealthCheck, settings

sys.dont_write_bytecode = False

# On a busy machine any example may take long.
settings.register_profile("umbra", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("umbra")

SEED = 0
QUIET_TIMEOUT_S = 60.0  # of a test without a mark of its own
LONG_TIMEOUT_S = 240.0  # of one that starts whole runs
LONG = ("fault", "integration", "tinker")
MOST_S = 2900.0  # below faulthandler_timeout, which ends the whole run
pytest_plugins = [
    "fakes.fixtures",
    "fakes.gpu_world",
    "fakes.keys",
    "fakes.library_worlds",
    "fakes.whole_runs",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the folders of long tests: none keeps the other workers waiting at the end."""
    items.sort(key=lambda item: item.path.parent.name not in LONG)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Stretch the timeout of a test, stated for a quiet machine, by how slow this one is now.

    And what it draws without a seed of its own is the same in every run: torch begins each process
    with another seed, and draws go on where the test before ended.
    """
    mark = item.get_closest_marker("timeout")
    usual = LONG_TIMEOUT_S if item.path.parent.name in LONG else QUIET_TIMEOUT_S
    quiet = mark.args[0] if mark is not None else usual
    item.add_marker(pytest.mark.timeout(min(limit(quiet), MOST_S)), append=False)
    random.seed(SEED)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(SEED)
        torch.set_num_threads(1)
    if (accelerate := sys.modules.get("accelerate.state")) is not None:
        accelerate.AcceleratorState._reset_state()  # a process has one precision, but here


def _model(tmp_path_factory: pytest.TempPathFactory, **sizes: int) -> Path:
    from umbra.services.trainer.make_model import make_model

    path = tmp_path_factory.mktemp("models") / "tiny"
    make_model(path, **sizes)
    return path


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model and its character tokenizer; don't change it."""
    return _model(tmp_path_factory)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of a few thousand parameters; don't change it."""
    return _model(tmp_path_factory, hidden=16, layers=1, heads=2, kv_heads=1, ff=32)


@pytest.fixture(scope="session")
def vllm_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose heads are of a size that vLLM knows; don't change it."""
    return _model(tmp_path_factory, heads=2, kv_heads=1)


@pytest.fixture
def zmq_context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    """Yield a context of the test's own and fail the test if a socket of it is left open.

    `term()` waits for ever for an open socket, so it runs in a thread that may be given up.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    thread = threading.Thread(target=context.term, name="zmq-term", daemon=True)
    thread.start()
    thread.join(limit(5.0))
    if thread.is_alive():
        pytest.fail(
            "the ZMQ context did not end: a socket is still open, or has a linger time and "
            "messages that nobody takes"
        )
