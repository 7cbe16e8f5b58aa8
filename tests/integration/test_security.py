"""Sockets and commands with keys: who gets in, what each key allows, and who else is told what.

And where a run's secrets never show.
"""

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from fakes.commands import UMBRA, call
from fakes.crash_run import CONFIG, BufferProcess
from fakes.hub_bench import Bench, Relay
from fakes.keys import of
from fakes.serving import ServerThread
from fakes.slowness import limit, seconds, until

from umbra.proto import messages as m
from umbra.proto import sockets
from umbra.proto.access import MEMBERS, SOCKETS, KeyRole
from umbra.proto.codec import Encoder, decode
from umbra.proto.errors import RejectedError
from umbra.proto.net.io_thread import Channel, IoThread
from umbra.proto.net.keys import OPEN, Security, load_keys, make_keys
from umbra.proto.net.server import Server
from umbra.proto.records import BucketsAt
from umbra.proto.sockets import Context

ANY_PORT = "tcp://127.0.0.1:*"
WAIT_S = limit(20.0)
BROKEN_S = seconds(1.5)  # for a handshake to break five times, an answer only at the deadline


class Served(ServerThread):
    """A server of role buffer with keys, in a thread; it answers whatever reaches it with Ok."""

    def __init__(self, context: Context, keys: Path) -> None:
        server = Server(context, "buffer", "b1", of(keys, "buffer"))
        self.control = server.bind("control", ANY_PORT, SOCKETS["control"])
        self.data = server.bind("data", ANY_PORT, (*SOCKETS["data"], m.Ping))
        self.events = server.bind_events(ANY_PORT)
        self._links: list[IoThread] = []
        pong = m.Pong(role="buffer", state="ready")
        super().__init__(server, lambda asked: pong if isinstance(asked.body, m.Ping) else m.Ok())

    @property
    def reached(self) -> list[tuple[str, KeyRole | None]]:
        return [(type(request.body).__name__, request.role) for request in self.seen]

    def channel(self, endpoint: str, security: Security, name: str = "peer") -> Channel:
        link = IoThread(name, f"{name}-1", security=security)
        self._links.append(link)
        return link.channel(endpoint, "buffer")

    def close(self) -> None:
        for link in self._links:
            link.close()
        super().close()


@pytest.fixture
def served(zmq_context: Context, keys: Path) -> Iterator[Served]:
    with closing(Served(zmq_context, keys)) as made:
        yield made


def test_holders_of_a_key_are_let_in(served: Served, keys: Path) -> None:
    for role in MEMBERS:
        channel = served.channel(served.control, of(keys, role))
        assert channel.call(m.Ping(), m.Pong, timeout_s=WAIT_S).role == "buffer"
    assert served.reached == [("Ping", role) for role in MEMBERS]
    assert not served.server.refusals.counts


@pytest.mark.parametrize(
    ("who", "told", "counted"),
    [
        ("one without keys", r": one side has no keys.*--keys", r".* on control"),
        (
            "one of another run",
            "or keys of another run",
            "a connection with keys of another run on",
        ),
        ("a forger", "refuses the key of this process", "an unknown key from 127.0.0.1 on control"),
    ],
)
def test_outsiders_are_told_and_counted(
    served: Served, keys: Path, tmp_path: Path, who: str, told: str, counted: str
) -> None:
    """The forger has the public keys of the run, which are no secret, and still no key of it."""
    make_keys(tmp_path / "keys")
    theirs, ours = load_keys(tmp_path / "keys", "trainer"), load_keys(keys, "trainer")
    own = {
        "one without keys": OPEN,
        "one of another run": Security(theirs),
        "a forger": Security(type(ours)("trainer", theirs.public, theirs.secret, ours.roles)),
    }
    channel = served.channel(served.control, own[who])
    with pytest.raises(RejectedError, match=told):
        channel.call(m.Ping(), m.Pong, timeout_s=WAIT_S if who == "a forger" else BROKEN_S)
    counts = served.server.refusals.counts
    until(lambda: counts.total() > 0, "a refusal is counted")
    assert all(re.match(counted, what) for what in counts), counts
    assert who != "a forger" or counts.total() == 1
    assert served.reached == []


def test_a_client_with_keys_talks_to_no_server_without(zmq_context: Context, keys: Path) -> None:
    server = Server(zmq_context, "buffer", "b1")
    link = IoThread("peer", "i1", security=of(keys, "trainer"))
    channel = link.channel(server.bind("control", ANY_PORT, SOCKETS["control"]), "buffer")
    with pytest.raises(RejectedError, match="one side has no keys"):
        channel.call(m.Ping(), m.Pong, timeout_s=BROKEN_S)
    link.close()
    server.close()


def test_telemetry_is_for_members_to_send_and_for_monitors_to_see(
    served: Served, zmq_context: Context, keys: Path
) -> None:
    curves = [of(keys, role).connecting("buffer") for role in ("monitor", "generator")]
    watcher, spy = (sockets.subscriber(zmq_context, served.events, curve) for curve in curves)
    member, outsider = IoThread("g", "g1", security=of(keys, "generator")), IoThread("s", "s1")
    tick = threading.Event()
    for link in (member, outsider):
        channel = link.channel(served.control, "buffer")
        link.every(0.02, lambda to=channel, name=link.name: to.send(m.Event(kind=name)))
    for _ in range(20):
        assert watcher.poll(round(1000 * WAIT_S))
        assert decode(watcher.recv_multipart()).body == m.Event(kind="g")
        tick.wait(0.01)
    assert not spy.poll(0)
    for link in (member, outsider):
        link.close()
    for socket in (watcher, spy):
        socket.close(linger=0)
    assert not served.reached, "it is no request"
    counts = served.server.refusals.counts
    until(lambda: counts["the generator key from 127.0.0.1 on events"] == 1, "the spy is told")
    until(lambda: any(what.endswith(" on control") for what in list(counts)), "it is counted")


def test_the_connection_decides_and_not_what_a_message_says(served: Served, keys: Path) -> None:
    """The header's sender is the trainer's name; the key is not the trainer's."""
    cases: list[tuple[KeyRole, str, m.Message]] = [
        ("generator", served.data, m.CommitBatch(step=1)),
        ("scorer", served.data, m.ReturnTasks(samples=[])),
        ("trainer", served.data, m.LeaseTasks(capacity=1, version=0, wait_s=0)),
        ("monitor", served.control, m.Drain()),
    ]
    for role, endpoint, body in cases:
        channel = served.channel(endpoint, of(keys, role), "trainer")
        with pytest.raises(RejectedError, match=f"not allowed with the {role} key") as refused:
            channel.call(body, m.Ok, timeout_s=WAIT_S)
        assert refused.value.code == "not_allowed"
        what = f"{type(body).__name__} of 'trainer', which has the {role} key"
        assert served.server.refusals.counts[what] == 1
    assert served.reached == []
    assert served.server.counters["not_allowed"] == len(cases)
    operator = served.channel(served.control, of(keys, "operator"), "o")
    assert operator.call(m.Drain(), m.Ok, timeout_s=WAIT_S) == m.Ok()


def test_an_identity_taken_over_does_not_bring_its_role(
    served: Served, zmq_context: Context, keys: Path
) -> None:
    """Two keys, one identity: each message has the role of the connection that it came over."""
    encoder = Encoder("trainer", "t1")
    answers: list[m.Message] = []
    with ExitStack() as opened:
        for role in ("trainer", "generator"):
            curve = of(keys, role).connecting("buffer")
            dealer = sockets.dealer(zmq_context, served.data, b"same", curve)
            opened.callback(dealer.close, linger=0)
            dealer.send_multipart(encoder.encode(m.CommitBatch(step=1))[1])
            assert dealer.poll(round(1000 * WAIT_S))
            answers.append(decode(dealer.recv_multipart()).body)
    done, refused = answers
    assert done == m.Ok()
    assert isinstance(refused, m.Nack) and refused.code == "not_allowed"
    assert served.reached == [("CommitBatch", "trainer")]


def test_only_a_relay_may_serve_and_only_the_trainer_publish(bench: Bench, keys: Path) -> None:
    """Others would fetch their weights from whoever may say that it hands them on."""
    bench.security = of(keys, "weight_hub")
    bench.start(plane="tcp", delta="off")
    at = "tcp://127.0.0.1:9"
    serves = m.Subscribe(host="h", planes=["tcp"], serves=at)
    hands_on = m.Subscribe(host="h", planes=["tcp"], buckets=BucketsAt(endpoint=at, key=b"k"))
    for role in ("generator", "scorer"):
        for ask in (serves, hands_on):
            with pytest.raises(RejectedError, match=f"only relays serve others, not the {role}"):
                bench.channel(f"evil-{role}", of(keys, role)).call(
                    ask, m.Subscribed, timeout_s=WAIT_S
                )
    forbidden: tuple[tuple[KeyRole, m.Message], ...] = (
        ("generator", m.Publish(version=9, slot=0, checksums=[], snapshot_s=0)),
        ("monitor", m.AcquireSlot(version=9)),
    )
    for role, body in forbidden:
        with pytest.raises(RejectedError, match=f"not allowed with the {role} key"):
            bench.channel("trainer", of(keys, role)).call(body, m.Ok, timeout_s=WAIT_S)
    assert bench.hub.stats()["refused"] == 6
    assert bench.hub.planes.open_tcp().chain == {}
    assert bench.hub.planes.open_tcp().relay_at("h") == ""


def test_nobody_publishes_at_a_relay(bench: Bench, keys: Path) -> None:
    bench.security = of(keys, "weight_hub")
    bench.start()
    bench.publisher(channel=bench.channel("trainer", of(keys, "trainer")))
    relay = Relay(bench, "relay-1", security=of(keys, "relay"))
    bench.endpoint = relay.daemon.endpoint
    channel = bench.channel("trainer-2", of(keys, "trainer"), server="relay")
    with pytest.raises(RejectedError, match="versions come from tcp://"):
        channel.call(m.AcquireSlot(version=1), m.SlotGranted, timeout_s=WAIT_S)


# -- commands -------------------------------------------------------------------------------------


def umbra(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return call([*UMBRA, *arguments], cwd=cwd)


def test_what_others_can_reach_is_not_bound_without_keys(tmp_path: Path) -> None:
    listen = ("--set", "weight_hub.listen=tcp://*:*")
    done = umbra("weight-hub", "--upstream", "tcp://h:9", *listen, cwd=tmp_path)
    assert done.returncode == 2, done
    assert "`umbra keys FOLDER` and give every process --keys FOLDER" in done.stderr


@pytest.fixture
def buffer(tmp_path: Path) -> Iterator[str]:
    """The control socket of a buffer process with keys, which keeps its secrets."""
    keys = tmp_path / "run" / "keys"
    make_keys(keys)
    secrets = [load_keys(keys, role).secret for role in ("buffer", "monitor", "operator")]
    with closing(BufferProcess(tmp_path, f'{CONFIG}[log]\nlevel = "debug"\n')) as process:
        for name in ("cmdline", "environ"):
            assert secrets[0] not in Path(f"/proc/{process.pid}/{name}").read_bytes()
        yield process.broker
    files = (path for path in tmp_path.rglob("*") if path.is_file() and path.parent.name != "keys")
    written = b"".join(path.read_bytes() for path in files if path.parent.name != "m")
    assert b"refused" in written, "the log is not there"
    assert not any(secret in written for secret in secrets)


def test_the_monitor_commands_use_keys(buffer: str, tmp_path: Path) -> None:
    """Its fixture looks for secrets in the process list, the log and the run's folder."""
    keys, some = tmp_path / "run" / "keys", tmp_path / "m"
    some.mkdir()
    for path in (*keys.glob("*.key"), keys / "monitor.key_secret"):
        shutil.copy(path, some)

    def asked(*words: str, having: Path | None = keys) -> subprocess.CompletedProcess[str]:
        own = () if having is None else ("--keys", str(having))
        return umbra(*words, "--broker", buffer, *own, cwd=tmp_path)

    outsider = asked("status", having=None)
    assert outsider.returncode == 4
    assert len(outsider.stderr.splitlines()) == 1 and "--keys" in outsider.stderr
    refused = json.loads(asked("status", "--json").stdout)["refused"]
    assert any(what.endswith(" on control") for what in refused)
    assert f"refused: {next(iter(refused))}" in asked("status").stdout
    assert asked("status", "--ping", having=some).returncode == 0
    changes = asked("drain", having=some)
    assert changes.returncode == 4 and "not allowed with the monitor key" in changes.stderr
    assert asked("drain").returncode == 0
