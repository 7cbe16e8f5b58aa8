"""How ranks of several hosts meet, also after a death, and the names of the missing."""

import logging
import queue
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from fakes.slowness import limit, reserved_port, seconds

from umbra.proto.errors import DeadlineError, PeerLostError, StartupError, UsageError
from umbra.services.config import RunConfig, TrainerConfig
from umbra.services.trainer.command import launch
from umbra.services.trainer.distributed.heartbeat import RankHeartbeat
from umbra.services.trainer.distributed.rendezvous import RankPlace, meet

WAIT_S = limit(20.0)
KEY = "trainer.rendezvous_timeout_s"


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """One where rank 0 is looked for."""
    with reserved_port() as reserved:
        number: int = reserved.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(number))
        yield number


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as executor:
        yield executor


def come(
    threads: ThreadPoolExecutor, rank: int, timeout_s: float = WAIT_S, asked: Any = None
) -> Future[tuple[Any, RankPlace]]:
    stopping = asked or threading.Event()
    return threads.submit(meet, RankPlace(rank, 2, 1), timeout_s, KEY, stopping=stopping.is_set)


def test_whoever_is_first_waits(port: int, threads: ThreadPoolExecutor) -> None:
    late = come(threads, 1)
    first = come(threads, 0)
    for one in (late, first):
        _, place = one.result()
        assert place.hosts == (socket.gethostname(),) * 2
        assert place.describe(1) == f"trainer rank 1 on node 1 ({socket.gethostname()})"
    assert RankPlace(0, 4, 4).describe(3) == "trainer rank 3", "one host is not named"


def test_a_host_that_does_not_come_is_named(port: int, threads: ThreadPoolExecutor) -> None:
    with pytest.raises(DeadlineError, match=rf"0.2 s \({KEY}\).*node 1 \(ranks 1\) has not joined"):
        come(threads, 0, 0.2).result()
    with pytest.raises(DeadlineError, match=rf"no rank 0 at 127.0.0.1:{port}, where"):
        come(threads, 1, 0.2).result()


def test_a_rank_asked_to_stop_waits_no_longer(port: int, threads: ThreadPoolExecutor) -> None:
    asked = threading.Event()
    waiting = come(threads, 1, asked=asked)
    asked.set()
    with pytest.raises(SystemExit) as ended:
        waiting.result()
    assert ended.value.code == 0


def test_who_comes_back_waits_for_the_next_life(port: int, threads: ThreadPoolExecutor) -> None:
    """1. Two ranks meet. 2. Rank 1 comes again, while rank 0 knows nothing. 3. Rank 0 starts again.

    Result: the one that came back is in with the new rank 0, and is told why it is not before.
    """
    other = come(threads, 1)
    store, _ = come(threads, 0).result()
    other.result()
    with pytest.raises(DeadlineError, match="rank 0 knows another process as rank 1"):
        come(threads, 1, 1.0).result()
    again = come(threads, 1)
    del store, other  # what keeps the store ends with it
    first = come(threads, 0)
    _, place = again.result()
    assert place.rank == 1
    first.result()


class Ends(queue.Queue[tuple[int, str]]):
    """Exit codes and reasons that a heartbeat ended its process with."""

    def __call__(self, code: int, reason: str) -> None:
        self.put((code, reason))


def test_who_is_lost_is_told_by_their_heartbeat() -> None:
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    places = [RankPlace(rank, 4, 2, ("alpha", "beta")) for rank in (0, 1)]
    living = [RankHeartbeat(store, place, seconds(4.0), Ends()) for place in places]
    try:
        lost = "trainer rank 2 on node 1 (beta), trainer rank 3 on node 1 (beta)"
        assert living[0].lost() == lost
        living[0].close()
        assert living[1].lost() == lost, "who ends after the first says the same"
    finally:
        for one in living:
            one.close()


def test_a_silent_rank_ends_the_others_and_one_that_left_does_not() -> None:
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    ends = Ends()
    timeout_s = seconds(0.5)
    places = [RankPlace(rank, 3, 3) for rank in range(3)]
    first, second, third = (RankHeartbeat(store, place, timeout_s, ends) for place in places)
    third.leave()
    with pytest.raises(queue.Empty):
        ends.get(timeout=3 * timeout_s)
    second.close()  # as one that is stopped
    code, reason = ends.get(timeout=limit(20.0))
    first.close()
    assert code == PeerLostError.exit_code
    assert "trainer rank 0 lost another rank: trainer rank 1 was silent for" in reason


def test_the_other_hosts_leave_when_rank_0_has_ended_for_good() -> None:
    """Their supervisors would start them again if they took it for lost."""
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    ends = Ends()
    places = [RankPlace(rank, 2, 2) for rank in range(2)]
    first, second = (RankHeartbeat(store, place, seconds(8.0), ends) for place in places)
    first.end_all("model.path: no such model")
    first.leave()
    ended = ends.get(timeout=limit(20.0))
    second.close()
    assert ended == (0, "rank 0 has ended the trainer: model.path: no such model")


def context(tmp_path: Path, node: int | None, **trainer: Any) -> Any:
    return SimpleNamespace(
        config=RunConfig(trainer=TrainerConfig(**trainer)),
        options={"node_rank": node},
        run_dir=tmp_path,
        name="trainer",
        log=logging.getLogger("test"),
    )


@pytest.mark.parametrize(
    ("node", "keys", "told"),
    [
        (None, {}, r"--node-rank is missing .* its number, 0 to 1"),
        (2, {}, r"--node-rank 2 is no host .* trainer.nodes = 2"),
        (0, {"rendezvous": ""}, r"trainer.rendezvous = ''.* has to be HOST:PORT"),
        (1, {"rendezvous": "10.0.0.1"}, r"trainer.rendezvous = '10.0.0.1'.* HOST:PORT"),
        (1, {"nodes": 1, "rendezvous": ""}, r"--node-rank 1 .* but trainer.nodes = 1"),
    ],
)
def test_hosts_that_are_not_said_are_asked_for(
    node: int | None, keys: dict[str, Any], told: str, tmp_path: Path
) -> None:
    keys = {"ranks": 2, "nodes": 2, "rendezvous": "127.0.0.1:29500", **keys}
    with pytest.raises(UsageError, match=told), launch(context(tmp_path, node, **keys)):
        pass


def test_rank_0_listens_at_the_rendezvous_alone(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")  # undone at the end
        monkeypatch.delenv(name)
    keys = {"ranks": 2, "nodes": 2, "rendezvous": f"127.0.0.1:{port}"}
    with launch(context(tmp_path, 0, **keys)) as listener:
        assert listener is not None
        assert listener.getsockname() == ("127.0.0.1", port)
        assert RankPlace.of_environment() == RankPlace(0, 2, 1)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name)
    elsewhere = {**keys, "rendezvous": "192.0.2.1:29500"}  # none of ours
    with (
        pytest.raises(StartupError, match=r"trainer.rendezvous 192.0.2.1:29500: cannot listen"),
        launch(context(tmp_path, 0, **elsewhere)),
    ):
        pass
    with launch(context(tmp_path, 1, **keys)) as listener:
        assert listener is None
        assert RankPlace.of_environment() == RankPlace(1, 2, 1)
