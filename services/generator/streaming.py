"""Loading without a copy beside the engine's own; a load that breaks off is undone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from umbra.proto.errors import PeerLostError
from umbra.services.generator.engine import EngineOutput, KvPolicy, StreamingEngine
from umbra.services.runtime.weights.receiver import StagedVersion
from umbra.services.runtime.weights.stream import WeightStream


class BrokenOffError(PeerLostError):
    """A version could not be loaded; what was served before is served, whole."""


class Streaming:
    """Loads versions bucket by bucket.

    Args:
        engine: is given the buckets.
        weights: knows where versions lie.
        moved: called when a bucket came.
    """

    def __init__(
        self, engine: StreamingEngine, weights: WeightStream, moved: Callable[[], None]
    ) -> None:
        self._engine = engine
        self._weights = weights
        self._moved = moved

    def load(self, staged: StagedVersion, kv_policy: KvPolicy) -> list[EngineOutput]:
        """Serve `staged`; returns what was aborted under policy "abort".

        Raises:
            UsageError: its tensors do not fit the model; the old version is served whole.
            BrokenOffError: it broke off; the old version was loaded again and is served whole.
            PeerLostError: it broke off, and the old version is not there any more either: the
                engine must not be used.
        """
        try:
            lying = self._weights.version(staged)
            aborted = self._engine.load_buckets(
                lying.manifest, self._seen(lying.buckets()), staged.version, kv_policy
            )
        except PeerLostError as error:
            what = f"version {staged.version} broke off while it was loaded ({error})"
            raise self._restored(what) from error
        self._weights.loaded(lying)
        return aborted

    def _restored(self, what: str) -> PeerLostError:
        """Load the version before again; how that ended."""
        version, served = self._engine.version, self._weights.served
        if served is None or version < 0:
            return BrokenOffError(f"{what}; none is in service yet")
        buckets = self._seen(served.buckets())
        try:
            self._engine.load_buckets(served.manifest, buckets, version, "keep")
        except PeerLostError as error:
            return PeerLostError(
                f"{what}, and version {version} is not there any more ({error}): the weights are "
                "neither, so this generator leaves; started again it gets the newest version"
            )
        return BrokenOffError(f"{what}; version {version} was loaded again and is served")

    def _seen(self, buckets: Iterable[tuple[int, memoryview]]) -> Iterator[tuple[int, memoryview]]:
        for bucket in buckets:
            self._moved()
            yield bucket
