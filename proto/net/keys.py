"""The CURVE keys of a run: a folder with a certificate per role, and what a process uses of it.

A certificate is a file in ZeroMQ's own format: `<role>.key` with the public half, which everyone
may know, and `<role>.key_secret` with both halves, which only the processes of that role need. So
a folder with all public files and one secret file is what a node of that role gets.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

from zmq.auth import (
    create_certificates,  # pyright: ignore[reportUnknownVariableType]
    load_certificate,  # pyright: ignore[reportUnknownVariableType]
)

from umbra.proto.access import KEY_ROLES, KeyRole
from umbra.proto.errors import UsageError
from umbra.proto.messages import Role
from umbra.proto.sockets import Curve

PUBLIC, SECRET = ".key", ".key_secret"
FOLDER = "keys"  # inside of a run's folder, or beside the folders of runs
KEY_CHARACTERS = 40  # 32 bytes in Z85


@dataclass(frozen=True, slots=True)
class Keys:
    role: KeyRole
    public: bytes
    secret: bytes = field(repr=False)
    roles: Mapping[KeyRole, bytes]


@dataclass(frozen=True, slots=True)
class Security:
    """Protection of a process's sockets; by default none."""

    keys: Keys | None = None  # without them nothing is encrypted and nobody is asked for a key
    insecure: bool = False  # bind where other machines can connect nevertheless

    def connecting(self, server: Role) -> Curve | None:
        own = self.keys
        return own and Curve(own.public, own.secret, server=own.roles[server])

    def binding(self, socket: str) -> Curve | None:
        own = self.keys
        return own and Curve(own.public, own.secret, domain=socket)

    def check_bind(self, endpoint: str) -> None:
        """Raise UsageError if other machines could connect to `endpoint`, and there are no keys."""
        if self.keys is None and not self.insecure and not is_local(endpoint):
            raise UsageError(
                f"{endpoint} can be reached from other machines, and this run has no keys: make "
                "them with `umbra keys FOLDER` and give every process --keys FOLDER (or set "
                "security.insecure = true, for a network in which everyone is trusted)"
            )


OPEN = Security()


def is_local(endpoint: str) -> bool:
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    return not endpoint.startswith("tcp://") or is_loopback(host)


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def make_keys(folder: Path, *, force: bool = False) -> None:
    """Make a pair for each role; the folder is for its owner only.

    UsageError if there are keys already and `force` is not set, or it cannot be written to.
    """
    files = [folder / f"{role}{suffix}" for role in KEY_ROLES for suffix in (PUBLIC, SECRET)]
    present = next((file for file in files if file.exists()), None)
    if present is not None and not force:
        raise UsageError(
            f"{present} is there already: name another folder, or replace the keys with "
            "--force, after which every process of the run needs the new ones"
        )
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        for role in KEY_ROLES:
            for file in create_certificates(folder, role):
                Path(file).chmod(0o600)
    except OSError as error:
        raise UsageError(f"cannot write keys to {folder}: {error.strerror}") from error


def load_keys(folder: Path, role: KeyRole) -> Keys:
    """Return the keys in `folder` for a process of `role`.

    UsageError if a file is missing, is no certificate, can't be read by us, or can by others.
    """
    public, secret = _read(folder / f"{role}{SECRET}", secret=True)
    roles: dict[KeyRole, bytes] = {role: _read(folder / f"{role}{PUBLIC}")[0] for role in KEY_ROLES}
    if roles[role] != public:
        raise UsageError(
            f"{folder}: {role}{PUBLIC} and {role}{SECRET} are not of one pair: copy both from the "
            f"folder that `umbra keys` made"
        )
    return Keys(role, public, secret, roles)


def open_security(
    folder: str, roles: Sequence[KeyRole], run_dir: Path | None = None, *, insecure: bool = False
) -> Security:
    """Return the protection of a process that may have the key of any of `roles`, best first.

    Its keys are in `folder`; if that is empty, in the folder `keys` in `run_dir` if it is there.
    Errors as of `load_keys`.
    """
    if not folder and run_dir is not None and (run_dir / FOLDER).is_dir():
        folder = str(run_dir / FOLDER)
    if not folder:
        return Security(insecure=insecure)
    held: list[KeyRole] = [role for role in roles if (Path(folder) / f"{role}{SECRET}").exists()]
    return Security(load_keys(Path(folder), (held or roles)[0]), insecure)


def _check_private(path: Path) -> None:
    """Raise UsageError unless a secret is its owner's alone.

    One that belongs to another user may be open to a group of ours, since that is the one way in
    which we can read it (a mounted secret of Kubernetes); so OpenSSH treats its keys.
    """
    status = path.stat()
    mode = stat.S_IMODE(status.st_mode)
    if mode & (0o077 if status.st_uid == os.geteuid() else 0o007):
        who = "every user of this machine" if mode & 0o007 else "its group"
        reason = f"the permissions of {path} ({mode:03o}) open it to {who}: chmod 600 {path}"
        raise UsageError(reason)


def _read(path: Path, *, secret: bool = False) -> tuple[bytes, bytes]:
    """Return the public key of a certificate, and the secret one ("" unless asked for)."""
    try:
        if secret:
            _check_private(path)
        public, private = load_certificate(path)
    except PermissionError as error:
        raise UsageError(
            f"security.keys: no permission to read {path}: give it to the user of this process, "
            "with `chown` and `chmod 600` (700 for the folder)"
        ) from error
    except (OSError, ValueError) as error:
        reason = "cannot be read" if path.exists() else "is missing"
        remedy = "`umbra keys` makes a run's keys"
        raise UsageError(f"security.keys: {path} {reason}; {remedy}") from error
    if len(public) != KEY_CHARACTERS or (secret and len(private or b"") != KEY_CHARACTERS):
        raise UsageError(f"security.keys: {path} holds no CURVE key of {KEY_CHARACTERS} characters")
    return public, private or b"" if secret else b""
