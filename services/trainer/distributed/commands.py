"""What rank 0 has the other ranks do. Each does exactly what rank 0 does at that moment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from umbra.proto.records import Trajectory
from umbra.services.trainer.batch import make_batch
from umbra.services.trainer.checkpoints.saver import Saver
from umbra.services.trainer.critic import LearnedCritic
from umbra.services.trainer.distributed.ranks import Ranks
from umbra.services.trainer.distributed.shards import Snapshots
from umbra.services.trainer.learner import Learner
from umbra.services.trainer.phases import Profile
from umbra.services.trainer.update import Update


class Train(msgspec.Struct, frozen=True, tag=True):
    """Update the policy, which is at `version`, on this batch."""

    version: int
    trajectories: list[Trajectory]


class Snapshot(msgspec.Struct, frozen=True, tag=True):
    """Write the own rows of the current weights into the slot that rank 0 names."""


class Save(msgspec.Struct, frozen=True, tag=True):
    """Call a method of the saver; `step` is -1 if there is nothing to save."""

    method: Literal["after", "wanted", "settled", "last"]
    step: int = 0


class Gather(msgspec.Struct, frozen=True, tag=True):
    """Help rank 0 to the whole weights."""


class Export(msgspec.Struct, frozen=True, tag=True):
    """Help rank 0 to write the critic to directory `out`."""

    out: str


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Leave."""

    reason: str


Command = Train | Snapshot | Save | Gather | Export | Stop


def send_command(ranks: Ranks, order: Command) -> None:
    """Rank 0: have the others do `order`, if there are others."""
    if ranks.world > 1:
        ranks.broadcast(msgspec.msgpack.encode(order))


def follow_commands(
    ranks: Ranks,
    learner: Learner,
    update: Update,
    snapshots: Snapshots,
    critic: LearnedCritic | None,
    saver: Saver,
    profile: Profile,
    say: Callable[[str], None],
) -> None:
    """All other ranks: do what rank 0 orders until it says to stop."""
    decoder, phases = msgspec.msgpack.Decoder(Command), learner.phases
    while True:
        match decoder.decode(ranks.broadcast()):
            case Train(version, trajectories):
                phases.take()  # rank 0 reports its own
                profile.begin(version + 1)
                with phases("train_step"):
                    vocabulary = learner.model.config.vocab_size
                    batch = make_batch(trajectories, vocabulary, routers=learner.replayed)
                    update(batch, version, lambda: True)
            case Snapshot():
                with phases("snapshot"):
                    snapshots.write()
                profile.end()
            case Save(method, step):
                with phases("checkpoint"):
                    if method == "settled":
                        saver.settled()
                    else:
                        getattr(saver, method)(step, {} if step >= 0 else None)
            case Gather():
                learner.weights()
            case Export(out):
                if critic is not None:
                    critic.export(Path(out))
            case Stop(reason):
                profile.end()
                say(reason)
                return
