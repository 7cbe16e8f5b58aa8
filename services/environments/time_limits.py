"""How long what an environment does may take, by the keys of its configuration."""

from __future__ import annotations

from dataclasses import dataclass

from umbra.services.config import EnvironmentConfig
from umbra.services.config.generation import JUDGED_AT_ONCE
from umbra.services.environments.loading import name_of


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """Seconds, and the key of a run file that says so; sentences begin with `what`."""

    what: str
    seconds: float
    key: str

    def overdue(self) -> str:
        return f"{self.what} took longer than {self.key} = {self.seconds:g} s"

    def silent(self) -> str:
        return f"{self.what} asked for nothing for {self.key} = {self.seconds:g} s"


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Of a sample's conversation with its environment, or with the program that leads it."""

    opening: TimeLimit  # `reset`; of a program, until it asks for its first turn
    step: TimeLimit  # a step, or `close`; of a program, from a turn to its next request
    scoring: TimeLimit  # of a program that has said that it judges

    @classmethod
    def of(cls, config: EnvironmentConfig) -> TimeLimits:
        """Return the limits of `config`: `timeout_s` for each."""
        name = name_of(config).strip()  # an agent from outside has none

        def limit(what: str) -> TimeLimit:
            title = f"{name}: {what}" if what else name
            return TimeLimit(title, config.timeout_s, f"{config.where}.timeout_s")

        scoring = limit("its reward")
        if config.asks:  # it is silent, whatever it does
            return cls(limit(""), limit(""), scoring)
        step = scoring if config.kind in JUDGED_AT_ONCE else limit("a step")
        return cls(limit("the opening (reset)"), step, scoring)
