"""Loading a version into the engine; a load that breaks off is undone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from umbra.proto.errors import PeerLostError
from umbra.services.generator.engines.engine import Engine, EngineOutput, KvPolicy
from umbra.services.weights.manifest import Part
from umbra.services.weights.receiver import Receiver, StagedVersion


class BrokenOffError(PeerLostError):
    """A version could not be loaded; what was served before is served, whole."""


class WeightLoader:
    """Loads versions.

    Args:
        engine: is given their bytes.
        receiver: knows which version can be read again.
        moved: called with the bytes of a part that comes next, and with 0 when all are loaded.
    """

    def __init__(self, engine: Engine, receiver: Receiver, moved: Callable[[int], None]) -> None:
        self._engine = engine
        self._receiver = receiver
        self._moved = moved

    def load(self, staged: StagedVersion, kv_policy: KvPolicy) -> list[EngineOutput]:
        """Serve `staged`; returns what was aborted under policy "abort".

        Raises:
            UsageError: it does not fit the model; the old version is served whole.
            BrokenOffError: it broke off; the old version was loaded again and is served whole.
            PeerLostError: it broke off, and the old version is not there any more either: the
                engine must not be used.
        """
        try:
            return self._load(staged, staged.version, kv_policy)
        except PeerLostError as error:
            what = f"version {staged.version} broke off while it was loaded ({error})"
            raise self._restored(what) from error

    def _restored(self, what: str) -> PeerLostError:
        """Load the version before again; how that ended."""
        version, served = self._engine.version, self._receiver.served
        if version < 0:
            return BrokenOffError(f"{what}; none is in service yet")
        try:
            if served is None:
                raise PeerLostError("nothing of it was kept")
            self._load(served, version, "keep")
        except PeerLostError as error:
            return PeerLostError(
                f"{what}, and version {version} is not there any more ({error}): the weights are "
                "neither, so this generator leaves; started again it gets the newest version"
            )
        return BrokenOffError(f"{what}; version {version} was loaded again and is served")

    def _load(self, staged: StagedVersion, version: int, kv_policy: KvPolicy) -> list[EngineOutput]:
        aborted = self._engine.load(staged.manifest, self._seen(staged), version, kv_policy)
        self._moved(0)
        return aborted

    def _seen(self, staged: StagedVersion) -> Iterator[Part]:
        for part in staged.parts():
            self._moved(len(part))
            yield part
