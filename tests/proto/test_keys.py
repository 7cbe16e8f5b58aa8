"""Keys on disk, who may send what, and where a socket may be bound without keys."""

from __future__ import annotations

import os
import re
import stat
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from zmq.utils import z85

from umbra.deploy.cluster.command import keys as command
from umbra.proto.access import KEY_ROLES, KeyRole, may_connect, may_send
from umbra.proto.errors import UsageError
from umbra.proto.messages import TYPES
from umbra.proto.net.keys import OPEN, Keys, Security, load_keys, make_keys, open_security
from umbra.proto.net.server import NAMED, OTHERS, Refusals, zap_reply


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


def test_every_role_has_a_pair_of_its_own_for_the_owner_only(folder: Path) -> None:
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes == {f"{role}.{end}": 0o600 for role in KEY_ROLES for end in ("key", "key_secret")}
    found = [load_keys(folder, role) for role in KEY_ROLES]
    assert len({keys.public for keys in found}) == len({k.secret for k in found}) == len(KEY_ROLES)
    for keys in found:
        assert keys.roles[keys.role] == keys.public
        for text in (repr(keys), repr(Security(keys)), repr(Security(keys).connecting("buffer"))):
            assert keys.secret.decode() not in text
        assert keys.public.decode() in repr(keys)


@pytest.mark.parametrize(
    ("mode", "who"), [(0o644, "every user"), (0o602, "every user"), (0o640, "its group")]
)
def test_a_secret_that_others_can_read_is_refused(folder: Path, mode: int, who: str) -> None:
    (folder / "buffer.key_secret").chmod(mode)
    said = rf"permissions of .*\({mode:o}\) open it to {who}.*: chmod 600 .*buffer\.key_secret"
    with pytest.raises(UsageError, match=said):
        load_keys(folder, "buffer")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_but_not_one_that_only_our_group_lets_us_read(folder: Path) -> None:
    """As in a pod of Kubernetes: secrets belong to root there, and to a group of the process."""
    secret = folder / "buffer.key_secret"
    secret.chmod(0o440)
    os.chown(secret, 65534, 0)
    assert load_keys(folder, "buffer").role == "buffer"


@pytest.mark.parametrize("closed", ["", "buffer.key_secret"])
def test_a_permission_that_is_missing_is_named(closed: str) -> None:
    """Not in pytest's own folder, which is closed to other users anyway."""
    with tempfile.TemporaryDirectory() as top:
        make_keys(folder := Path(top) / "keys")
        for path in (Path(top), folder, *folder.iterdir()):
            path.chmod(0o755 if path.is_dir() else 0o600)
            os.chown(path, *((65534, 65534) if os.geteuid() == 0 else (-1, -1)))
        (folder / closed).chmod(0)
        before = os.geteuid()
        try:
            if before == 0:
                os.seteuid(65534)
            with pytest.raises(UsageError, match=f"no permission to read .*{closed or 'keys'}"):
                load_keys(folder, "buffer")
        finally:
            os.seteuid(before)
            (folder / closed).chmod(0o700)


def test_a_file_that_is_missing_no_certificate_or_of_another_pair_is_named(folder: Path) -> None:
    other, own = (load_keys(folder, role).public.decode() for role in ("trainer", "buffer"))
    mixed = (folder / "buffer.key").read_text().replace(own, other)
    for name, text, said in (
        ("buffer", mixed, "buffer.key and buffer.key_secret are not of one pair"),
        ("scorer", "", r"scorer\.key"),
        ("scorer", 'curve\n    public-key = "short"\n', r"scorer\.key"),
        ("scorer", "\0\xff", r"scorer\.key"),
    ):
        (folder / f"{name}.key").write_text(text)
        with pytest.raises(UsageError, match=said):
            load_keys(folder, "buffer")
    (folder / "trainer.key_secret").unlink()
    with pytest.raises(UsageError, match=r"trainer\.key_secret is missing"):
        load_keys(folder, "trainer")


def test_where_keys_are_looked_for(folder: Path, tmp_path: Path) -> None:
    assert open_security("", ["buffer"], tmp_path / "nothing") == OPEN
    found = open_security("", ["buffer"], tmp_path)  # its folder `keys`
    named = open_security(str(folder), ["buffer"])
    assert found == named == Security(load_keys(folder, "buffer"))
    with pytest.raises(UsageError, match="is missing; `umbra keys`"):
        open_security(str(tmp_path / "nothing"), ["buffer"])
    # A process has one secret key alone, the best of those it may use.
    for path in folder.glob("*.key_secret"):
        if path.name != "operator.key_secret":
            path.unlink()
    assert open_security(str(folder), ["monitor", "operator"]).keys is not None


def test_the_command_replaces_keys_only_by_force(tmp_path: Path) -> None:
    folder = tmp_path / "keys"

    def called(*flags: str) -> tuple[Result, list[Keys]]:
        done = CliRunner().invoke(command, [str(folder), *flags])
        return done, [load_keys(folder, role) for role in KEY_ROLES]

    made, keys = called()
    assert all(role in made.output for role in KEY_ROLES)
    assert not any(key.secret.decode() in made.output for key in keys)
    again, kept = called()
    assert isinstance(again.exception, UsageError)
    assert re.search(r"buffer\.key is there already: .* --force", str(again.exception))
    assert kept == keys
    forced, others = called("--force")
    assert forced.exception is None
    assert not {key.public for key in others} & {key.public for key in keys}


def test_what_others_can_reach_is_bound_with_keys_only(folder: Path) -> None:
    keyed = Security(load_keys(folder, "buffer"))
    for one in ("127.0.0.1:*", "127.8.0.1:1", "localhost:5555", "[::1]:5555"):
        OPEN.check_bind(f"tcp://{one}")
    OPEN.check_bind("ipc:///tmp/x")
    for one in (
        *("*:5555", "0.0.0.0:5555", "[::]:5555", "10.0.0.1:5555", "eth0:5555"),
        *("127.example.org:5555", "localhost.example.org:5555"),
    ):
        endpoint = f"tcp://{one}"
        keyed.check_bind(endpoint)
        Security(insecure=True).check_bind(endpoint)
        with pytest.raises(UsageError) as refused:
            OPEN.check_bind(endpoint)
        for part in (endpoint, "umbra keys", "--keys", "security.insecure = true"):
            assert part in str(refused.value)


READS = {"Ok", "Nack", "Ping", "StatusRequest", "HubStatusRequest"}
MEMBER = READS | {"Join", "Heartbeat", "Leave", "Event"}
RECEIVER = MEMBER | {"Subscribe", "Ready", "Committed"}
WORKER = RECEIVER | {"LeaseTasks", "SubmitResults", "RenewLeases"}


@pytest.mark.parametrize(
    ("role", "allowed", "sockets"),
    [
        ("buffer", set[str](), ""),
        ("monitor", MEMBER, "control weights events"),
        ("weight_hub", MEMBER, "control weights"),  # what it serves is fetched from it
        ("part", MEMBER | {"PartState"}, "control weights"),
        ("relay", RECEIVER, "control weights"),
        ("operator", READS | {"Drain"}, "control weights events"),
        ("trainer", MEMBER | {
            "LeaseBatch", "CommitBatch", "CheckpointSaved", "FinishRun",
            "RegisterManifest", "AcquireSlot", "Publish",
        }, "control data weights"),
        ("scorer", WORKER, "control data weights"),
        ("generator", WORKER | {"ReturnTasks"}, "control data weights"),
    ],
)  # fmt: skip
def test_what_a_key_allows(role: KeyRole, allowed: set[str], sockets: str) -> None:
    assert {kind.__name__ for kind in TYPES.values() if may_send(role, kind)} == allowed
    names = ("control", "data", "weights", "events", "", "other")
    # Ok and Nack are no reason to connect.
    assert [name for name in names if may_connect(role, name)] == sockets.split()


def test_the_answer_names_the_role_and_an_unknown_key_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    refusals, publics = Refusals(), load_keys(folder, "buffer").roles
    roles: dict[bytes, KeyRole] = {z85.decode(key): role for role, key in publics.items()}

    def answer(public: bytes, socket: str, **changed: bytes) -> list[bytes]:
        frames = {
            "version": b"1.0", "number": b"1", "domain": socket.encode(), "address": b"192.0.2.7",
            "identity": b"", "mechanism": b"CURVE", "key": z85.decode(public),
        }  # fmt: skip
        return zap_reply([*{**frames, **changed}.values()], roles, refusals)

    for role in KEY_ROLES:
        for socket in ("control", "data", "events"):
            found = answer(publics[role], socket)
            assert found[:2] == [b"1.0", b"1"]
            want = (b"200", role.encode()) if may_connect(role, socket) else (b"400", b"")
            assert (found[2], found[4]) == want
    assert refusals.counts["the operator key from 192.0.2.7 on data"] == 1
    make_keys(tmp_path / "other")
    assert answer(load_keys(tmp_path / "other", "trainer").public, "data")[2] == b"400"
    assert refusals.counts["an unknown key from 192.0.2.7 on data"] == 1
    known = publics["trainer"]
    for changed in ({"mechanism": b"NULL"}, {"version": b"2.0"}, {"key": known}):
        assert answer(known, "data", **changed)[2] == b"400"


@given(frames=st.lists(st.binary(max_size=40), max_size=9))
def test_whatever_is_asked_there_is_an_answer_and_it_is_no(frames: list[bytes]) -> None:
    assert zap_reply(frames, {bytes(32): "trainer"}, Refusals())[2] == b"400"


def test_outsiders_fill_no_memory_and_no_log(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals()
    for number in range(10 * NAMED):
        refusals.add(f"an unknown key from {number}")
    for _ in range(1000):
        refusals.add("an unknown key from 0")
    assert len(refusals.counts) == NAMED + 1
    assert refusals.counts[OTHERS] == 9 * NAMED
    assert refusals.counts.total() == 10 * NAMED + 1000
    assert len(caplog.records) < NAMED + 30
