"""Whether a generator agrees with the trainer on equal weights: the bound, the figure, the verdict.

The figure of a generator is the mean over its tokens of min(k3, 1), without the worst token, where
k3 = r - log r - 1 and r = pi / mu. One outlier alone never decides (the update leaves it out), and
a fault that hits few tokens counts in full, which it would not in a median.

Nothing here reads a tensor: `agreement.py` finds the tokens and compares them.
"""

from __future__ import annotations

from dataclasses import dataclass

from umbra.services.config import RunConfig

CAP = 1.0  # of a token's k3; a log-probability that is not finite counts as much
MIN_TOKENS = 64  # of a generator, until it is judged

# Bounds by the coarsest format on the way. Rounding alone gives up to 1e-7 in float32 (more where a
# kernel computes in TF32) and about 1e-3 in bfloat16, where 0.03 at the first step was a fault
# (PrimeIntellect-ai/prime-rl, issue 2671).
BOUNDS = {"float32": 1e-4, "float16": 2e-3, "bfloat16": 0.02, "fp8": 0.1}
_PRECISIONS = {"no": "float32", "fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class Compared:
    """What was found of one generator's tokens."""

    tokens: int = 0
    total: float = 0.0  # of min(k3, CAP)
    worst: float = 0.0  # the largest k3
    where: str = ""  # the worst token, in words

    def __add__(self, other: Compared) -> Compared:
        worse = max(self, other, key=lambda one: one.worst)
        tokens, total = self.tokens + other.tokens, self.total + other.total
        return Compared(tokens, total, worse.worst, worse.where)

    @property
    def mismatch(self) -> float:
        """Mean of min(k3, CAP) over all tokens but the worst."""
        if self.tokens < 2:
            return 0.0
        return max(0.0, self.total - min(self.worst, CAP)) / (self.tokens - 1)


class Verdicts:
    """What is known of every generator, and when it has to be looked at.

    Args:
        bound: on a generator's figure.
        every: steps until one that was judged is due again; 0 = none ever is.
    """

    def __init__(self, bound: float, every: int) -> None:
        self._bound = bound
        self._every = every
        self._open: dict[str, Compared] = {}  # too few tokens so far
        self._since: dict[str, int] = {}  # when it was judged, or seen for the first time
        self._judged: set[str] = set()
        self._told: set[str] = set()

    def due(self, generator: str, step: int) -> bool:
        """Whether tokens of `generator`, which is in the batch of `step`, have to be found."""
        since = self._since.setdefault(generator, step)
        if not self._every:
            return False
        return generator not in self._judged or step - since >= self._every

    def add(
        self, compared: dict[str, Compared], step: int
    ) -> tuple[float | None, dict[str, Compared]]:
        """The largest figure of those that can be judged now, and who is above the bound."""
        largest: float | None = None
        above: dict[str, Compared] = {}
        for name, found in compared.items():
            known = self._open.pop(name, Compared()) + found
            if known.tokens < MIN_TOKENS:
                self._open[name] = known
                continue
            self._since[name] = step
            self._judged.add(name)
            self._told.discard(name)
            largest = max(largest or 0.0, known.mismatch)
            if known.mismatch > self._bound:
                above[name] = known
        return largest, above

    def unknown(self, generators: list[str], step: int) -> list[str]:
        """Those that could not be judged for three times `every`; each is told once."""
        limit = 3 * max(self._every, 1)
        found = [
            name
            for name in generators
            if name not in self._told and step - self._since.get(name, step) >= limit
        ]
        self._told.update(found)
        return found


def bound_of(config: RunConfig, kind: str) -> tuple[float, str]:
    """`trainer.max_mismatch`, or the one of the coarsest format of trainer and generator, named.

    `kind` is that of the trainer's device. A generator computes in what the trainer serves, or
    refuses to (`check_served_dtype`).
    """
    arguments = config.generator.engine_args
    formats = {config.weight_hub.dtype_on(kind), _PRECISIONS[config.trainer.precision_on(kind)]}
    if arguments.get("quantization") or "fp8" in str(arguments.get("kv_cache_dtype", "")):
        formats.add("fp8")
    coarsest = max(formats, key=lambda name: BOUNDS[name])
    return config.trainer.max_mismatch or BOUNDS[coarsest], coarsest
