"""What protects the sockets of a run."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from umbra.services.runtime.config.base import Section


class SecurityConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of the run's processes."""

    keys: Annotated[
        str,
        Meta(
            description="folder of the run's keys, from `umbra keys`; empty = the folder keys in "
            "the run's folder (umbra up: in run.dir) if there is one"
        ),
    ] = ""
    insecure: Annotated[
        bool, Meta(description="let sockets that other machines can reach be bound without keys")
    ] = False
