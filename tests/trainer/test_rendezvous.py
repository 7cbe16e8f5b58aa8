"""How ranks of several hosts meet, also after a death, and the names of the missing."""

import logging
import os
import queue
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

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
def come(port: int) -> Iterator[Any]:
    """A function that has a rank of two meet the other in a thread."""
    with ThreadPoolExecutor() as executor:

        def meets(rank: int, timeout_s: float = WAIT_S) -> Future[tuple[Any, RankPlace]]:
            return executor.submit(meet, RankPlace(rank, 2, 1), timeout_s, KEY)

        yield meets


def test_whoever_is_first_waits(come: Any) -> None:
    late = come(1)
    first = come(0)
    for one in (late, first):
        _, place = one.result()
        assert place.hosts == (socket.gethostname(),) * 2
        assert place.describe(1) == f"trainer rank 1 on node 1 ({socket.gethostname()})"
    assert RankPlace(0, 4, 4).describe(3) == "trainer rank 3", "one host is not named"


def test_a_host_that_does_not_come_is_named(port: int, come: Any) -> None:
    with pytest.raises(DeadlineError, match=rf"0.2 s \({KEY}\).*node 1 \(ranks 1\) has not joined"):
        come(0, 0.2).result()
    with pytest.raises(DeadlineError, match=rf"no rank 0 at 127.0.0.1:{port}, where"):
        come(1, 0.2).result()


def test_a_rank_asked_to_stop_waits_no_longer(port: int) -> None:
    with pytest.raises(SystemExit) as ended:
        meet(RankPlace(1, 2, 1), WAIT_S, KEY, stopping=lambda: True)
    assert ended.value.code == 0


def test_who_comes_back_waits_for_the_next_life(come: Any) -> None:
    """1. Two ranks meet. 2. Rank 1 comes again, while rank 0 knows nothing. 3. Rank 0 starts again.

    Result: the one that came back is in with the new rank 0, and is told why it is not before.
    """
    other = come(1)
    store, _ = come(0).result()
    other.result()
    with pytest.raises(DeadlineError, match="rank 0 knows another process as rank 1"):
        come(1, 1.0).result()
    again = come(1)
    del store, other  # what keeps the store ends with it
    first = come(0)
    _, place = again.result()
    assert place.rank == 1
    first.result()


def heartbeat(place: RankPlace, store: Any, timeout_s: float, ends: Any = None) -> RankHeartbeat:
    """One that puts an exit code and a reason into `ends` where it would end its process."""
    return RankHeartbeat(store, place, timeout_s, lambda *ended: ends.put(ended))


@pytest.fixture
def store() -> Any:
    return dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]


def test_who_is_lost_is_told_by_their_heartbeat(store: Any) -> None:
    places = [RankPlace(rank, 4, 2, ("alpha", "beta")) for rank in (0, 1)]
    first, second = (heartbeat(place, store, seconds(4.0)) for place in places)
    with closing(second):
        with closing(first):
            lost = "trainer rank 2 on node 1 (beta), trainer rank 3 on node 1 (beta)"
            assert first.lost() == lost
        assert second.lost() == lost, "who ends after the first says the same"


def test_a_silent_rank_ends_the_others_and_one_that_left_does_not(store: Any) -> None:
    ends, timeout_s = queue.Queue[tuple[int, str]](), seconds(0.5)
    first, second, third = (
        heartbeat(RankPlace(rank, 3, 3), store, timeout_s, ends) for rank in range(3)
    )
    third.leave()
    with pytest.raises(queue.Empty):
        ends.get(timeout=3 * timeout_s)
    second.close()  # as one that is stopped
    code, reason = ends.get(timeout=limit(20.0))
    first.close()
    assert code == PeerLostError.exit_code
    assert "trainer rank 0 lost another rank: trainer rank 1 was silent for" in reason


def test_the_other_hosts_leave_when_rank_0_has_ended_for_good(store: Any) -> None:
    """Their supervisors would start them again if they took it for lost."""
    ends = queue.Queue[tuple[int, str]]()
    first, second = (
        heartbeat(RankPlace(rank, 2, 2), store, seconds(8.0), ends) for rank in range(2)
    )
    first.end_all("model.path: no such model")
    first.leave()
    ended = ends.get(timeout=limit(20.0))
    second.close()
    assert ended == (0, "rank 0 has ended the trainer: model.path: no such model")


@contextmanager
def launched(tmp_path: Path, node: int | None, **trainer: Any) -> Iterator[socket.socket | None]:
    """Ranks of this host, in an environment of their own."""
    context: Any = SimpleNamespace(
        config=RunConfig(trainer=TrainerConfig(**trainer)),
        options={"node_rank": node},
        run_dir=tmp_path,
        name="trainer",
        log=logging.getLogger("test"),
    )
    with patch.dict(os.environ), launch(context) as listener:
        yield listener


@pytest.mark.parametrize(
    ("node", "keys", "told"),
    [
        (None, {}, r"--node-rank is missing .* its number, 0 to 1"),
        (2, {}, r"--node-rank 2 is no host .* trainer.nodes = 2"),
        (1, {"rendezvous": "10.0.0.1"}, r"trainer.rendezvous = '10.0.0.1'.* HOST:PORT"),
        (1, {"nodes": 1, "rendezvous": ""}, r"--node-rank 1 .* but trainer.nodes = 1"),
    ],
)
def test_hosts_that_are_not_said_are_asked_for(
    node: int | None, keys: dict[str, Any], told: str, tmp_path: Path
) -> None:
    keys = {"ranks": 2, "nodes": 2, "rendezvous": "127.0.0.1:29500", **keys}
    with pytest.raises(UsageError, match=told), launched(tmp_path, node, **keys):
        pass


def test_rank_0_listens_at_the_rendezvous_alone(port: int, tmp_path: Path) -> None:
    keys = {"ranks": 2, "nodes": 2, "rendezvous": f"127.0.0.1:{port}"}
    with launched(tmp_path, 0, **keys) as listener:
        assert listener is not None
        assert listener.getsockname() == ("127.0.0.1", port)
        assert RankPlace.of_environment() == RankPlace(0, 2, 1)
    keys["rendezvous"] = "192.0.2.1:29500"  # none of ours
    with pytest.raises(StartupError, match=r"trainer.rendezvous 192.0.2.1:29500: cannot listen"):
        with launched(tmp_path, 0, **keys):
            pass
    with launched(tmp_path, 1, **keys) as listener:
        assert listener is None
        assert RankPlace.of_environment() == RankPlace(1, 2, 1)
