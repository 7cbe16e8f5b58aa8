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

import os
import subprocess
import sys
import threading
from pathlib import Path

import xxhash
import zmq
from fakes.hub_bench import PROGRAMS, Bench, take, whole
from fakes.trainer_hosts import Place, Trainer
from programs.network import ADDRESSES, BRIDGE, Host, make_network, sh

from umbra.proto.net.keys import Security
from umbra.services.weights.receiver import StagedVersion

LINKS = {"hub": "alpha", "part": "beta", "receiver": "gamma"}
INSECURE = Security(insecure=True)


class Far:
    """The receiver on a host of its own, which halts in a phase of version 1."""

    def __init__(self, host: Host, hub: str, phase: str) -> None:
        program = [str(PROGRAMS / "halting_receiver.py"), hub, "far", "tcp", "1", phase]
        self._process = subprocess.Popen(
            [*host.enter, sys.executable, *program],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
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


class World:
    def __init__(self, folder: Path, phase: str) -> None:
        sh("mount -t tmpfs tmpfs /dev/shm")
        make_network()
        link = f"to-{LINKS['hub']}"
        sh(
            f"ip link add {link} type veth peer name eth0; ip link set {link} master {BRIDGE} up;"
            f"ip addr add {ADDRESSES['alpha']}/24 dev eth0; ip link set eth0 up"
        )
        beta, gamma = Host("beta"), Host("gamma")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.bench = Bench(self._context, "cut", folder)
        self.bench.endpoint = f"tcp://{ADDRESSES['alpha']}:*"
        self.bench.security = INSECURE
        places = {1: Place(beta.enter, ADDRESSES["beta"])}
        self.trainer = Trainer(self.bench, folder, 2, places=places)
        self.near = self.bench.receiver("near", ["tcp"])
        self.far = Far(gamma, self.bench.endpoint, phase)
        self.bench.closers.append(self.far.close)

    def connect(self, who: str, *, connected: bool) -> None:
        sh(f"ip link set to-{LINKS[who]} {'up' if connected else 'down'}")

    def load(self, version: int) -> None:
        """Load versions in `near` as they come until `version`."""
        loaded = -1
        while loaded != version:
            loaded = self._load(take(self.near))

    def load_what_came(self) -> None:
        """Load in `near` what it has, if it has something."""
        staged = self.near.poll()
        if staged is not None:
            self._load(staged)

    def _load(self, staged: StagedVersion) -> int:
        assert whole(staged) == self.trainer.versions[staged.version]
        self.near.committed(staged, 0.0)
        return staged.version

    def close(self) -> None:
        self.bench.close()
        self._context.term()


def cut(world: World, who: str, phase: str) -> None:
    trainer, far, protocol = world.trainer, world.far, world.bench.hub.protocol
    trainer.publish(0)
    world.load(0)
    far.until("0", trainer.versions)
    sums = trainer.write(1, fresh=True)
    publishing = threading.Thread(target=trainer.publisher.publish, args=(1, 0.0, sums))
    if phase != "granted":
        publishing.start()
        far.until(phase)
    world.connect(who, connected=False)
    if who == "receiver":
        far.go_on()
        for version in (2, 3):  # nobody waits for it
            trainer.publish(version)
            world.load(version)
        assert protocol.serving.get("far", -1) <= 1, "it was not cut off"
    else:
        trainer.until_held_back()
        far.go_on()
        if phase == "granted":
            publishing.start()
        if who == "part" and phase in ("received", "staged"):
            far.until("1", trainer.versions)  # it needs the other host no more
        world.load_what_came()
    published = protocol.counters["published"]
    assert published == (1 if phase == "granted" else 4 if who == "receiver" else 2)
    world.connect(who, connected=True)
    publishing.join()
    trainer.publish(4)
    world.load(4)
    far.until("4", trainer.versions)


def main(folder: Path, who: str, phase: str) -> None:
    world = World(folder, "nowhere" if phase == "granted" else phase)
    try:
        cut(world, who, phase)
    finally:
        world.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
