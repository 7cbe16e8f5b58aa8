"""A push of a version that lies on two trainer hosts, within which a host is cut off.

    unshare --user --map-root-user --net --mount --uts --kill-child python cut_push.py ARGUMENTS

Arguments: FOLDER WHO PHASE.

This process has the hub, trainer rank 0 and a receiver (`near`). Of two more hosts, made of network
namespaces, one has a part hub, the other a receiver (`far`). In PHASE of the push of version 1 to
`far` the link of WHO goes down, without a word to anyone:

    WHO     part       the other trainer host
            hub        this host
            receiver   the host of `far`
    PHASE   granted    the slot is granted and written, and nothing is published
            prepared   `far` is told of the version, and has nothing of it
            staging    it has one bucket, and some are under way
            received   it has all, and has not said so
            staged     it was told to load
            loaded     it has loaded, and said so

Then the link comes back, and another version is published. Every version that a receiver loads has
to be whole, and both have to load the last one.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import xxhash
import zmq
from fakes.hub_bench import PROGRAMS, Bench, load, whole
from fakes.trainer_hosts import Trainer
from programs.network import ADDRESSES, BRIDGE, Host, make_network, sh

from umbra.proto.net.keys import Security

LINKS = {"hub": "alpha", "part": "beta", "receiver": "gamma"}


class Far:
    """The receiver on a host of its own, which halts in a phase of version 1."""

    def __init__(self, host: Host, hub: str, phase: str) -> None:
        program = [str(PROGRAMS / "halting_receiver.py"), hub, "far", "tcp", "1", phase]
        self._process = subprocess.Popen(
            [*host.enter, sys.executable, *program],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.until("subscribed")

    def until(self, word: str, versions: dict[int, bytes] | None = None) -> None:
        """Read what it says until `word`; what it has loaded is one of `versions`, whole."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said, *contents = line.split()
            if contents and versions is not None:
                assert contents == [xxhash.xxh3_64_hexdigest(versions[int(said)])], said
            if said == word:
                return
        raise AssertionError(f"`far` ended before {word}")

    def go_on(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def connect(who: str, *, connected: bool) -> None:
    sh(f"ip link set to-{LINKS[who]} {'up' if connected else 'down'}")


def make_hosts() -> tuple[Host, Host]:
    """Make a network with us as `alpha`; return the hosts `beta` and `gamma`."""
    sh("mount -t tmpfs tmpfs /dev/shm")
    make_network()
    sh(
        f"ip link add to-alpha type veth peer name eth0; ip link set to-alpha master {BRIDGE} up;"
        f"ip addr add {ADDRESSES['alpha']}/24 dev eth0; ip link set eth0 up"
    )
    return Host("beta"), Host("gamma")


def cut(bench: Bench, folder: Path, who: str, phase: str) -> None:
    beta, gamma = make_hosts()
    bench.endpoint = f"tcp://{ADDRESSES['alpha']}:*"
    bench.security = Security(insecure=True)
    trainer = Trainer(bench, folder, 2, machines={1: beta})
    versions, protocol = trainer.versions, bench.hub.protocol
    near = bench.receiver("near", ["tcp"])
    far = Far(gamma, bench.endpoint, "nowhere" if phase == "granted" else phase)
    bench.closers.append(far.close)
    trainer.publish(0)
    load(near, 0, versions)
    far.until("0", versions)
    sums = trainer.write(1, fresh=True)
    publishing = threading.Thread(target=trainer.publisher.publish, args=(1, 0.0, sums))
    if phase != "granted":
        publishing.start()
        far.until(phase)
    connect(who, connected=False)
    if who == "receiver":
        far.go_on()
        for version in (2, 3):  # nobody waits for it
            trainer.publish(version)
            load(near, version, versions)
        assert protocol.serving.get("far", -1) <= 1, "it was not cut off"
    else:
        trainer.until_held_back()
        far.go_on()
        if phase == "granted":
            publishing.start()
        if who == "part" and phase in ("received", "staged"):
            far.until("1", versions)  # it needs the other host no more
        if (staged := near.poll()) is not None:
            assert whole(staged) == versions[staged.version]
            near.committed(staged, 0.0)
    published = protocol.counters["published"]
    assert published == (1 if phase == "granted" else 4 if who == "receiver" else 2)
    connect(who, connected=True)
    publishing.join()
    trainer.publish(4)
    load(near, 4, versions)
    far.until("4", versions)


if __name__ == "__main__":
    place, who, phase = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    with zmq.Context[zmq.Socket[bytes]]() as context:
        bench = Bench(context, "cut", place)
        with closing(bench):
            cut(bench, place, who, phase)
