"""NCCL of the double: rank 0 sends to each other rank over a socket in `FAKE_CUDA_DIR`."""

from __future__ import annotations

import ctypes
import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

from fakes.cuda_double import machine

available = True
NCCL_UINT8 = 1
LOOK_S = 0.005
PIECE_BYTES = 4096


# As CuPy, which has no texts for states of later versions of NCCL.
NCCL_ERR_STR = {6: "NCCL_ERROR_REMOTE_ERROR"}


class NcclError(RuntimeError):
    def __init__(self, status: int, text: str = "") -> None:
        self.status = status
        super().__init__(f"{NCCL_ERR_STR[status]}: {text}")


def get_version() -> int:
    return machine.setting("FAKE_NCCL_VERSION", 22809)


def get_unique_id() -> bytes:
    return os.urandom(128)


class NcclCommunicator:
    """See NCCL. The constructor blocks until `ndev` ranks have come with the same id."""

    def __init__(self, ndev: int, commId: bytes, rank: int) -> None:  # noqa: N803 - CuPy's name
        self._aborted = threading.Event()
        self._error = ""
        self._peers: list[socket.socket] = []
        self._rank = rank
        _hang("hang-init")
        if (machine.folder() / f"stay-hang-init-{machine.name()}").exists():
            threading.Event().wait()
        self._meet(machine.folder() / f"comm-{commId.hex()[:16]}", ndev, rank)
        machine.note("communicators", f"{commId.hex()[:16]} {rank}")

    def bcast(self, buf: int, count: int, datatype: int, root: int, stream: int) -> None:
        assert datatype == NCCL_UINT8 and root == 0
        machine.enqueue(stream, lambda: self._bcast(buf, count))

    def check_async_error(self) -> None:
        if self._error:
            raise NcclError(6, self._error)
        if status := machine.setting("FAKE_NCCL_STATE", 0):
            raise NcclError(status)

    def abort(self) -> None:
        self._aborted.set()
        for peer in self._peers:
            with suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)  # wakes whoever waits for it; `close` does not

    def __del__(self) -> None:
        if not self._aborted.is_set():
            os._exit(99)  # CuPy would destroy: the owner forgot to abort
        for peer in self._peers:
            peer.close()

    def _meet(self, path: Path, ndev: int, rank: int) -> None:
        if rank == 0:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(path))
                listener.listen(ndev)
                self._peers = [listener.accept()[0] for _ in range(ndev - 1)]
            for peer in self._peers:
                peer.sendall(b"!")
            return
        peer = socket.socket(socket.AF_UNIX)
        while True:
            try:
                peer.connect(str(path))
                break
            except OSError:
                time.sleep(LOOK_S)
        self._peers = [peer]
        if peer.recv(1) != b"!":
            threading.Event().wait()  # the root has gone: a real init would hang as well

    def _bcast(self, buf: int, count: int) -> None:
        if count > 1:
            _hang("hang-bcast")
            if machine.strikes("error-bcast"):
                self._error = "so the test wants it"
                self._aborted.wait()
                return
        view = memoryview((ctypes.c_char * count).from_address(buf)).cast("B")
        try:
            for start in range(0, count, PIECE_BYTES):
                piece = view[start : start + PIECE_BYTES]
                for peer in self._peers:
                    if self._rank == 0:
                        peer.sendall(piece)
                    elif peer.recv_into(piece, len(piece), socket.MSG_WAITALL) < len(piece):
                        raise ConnectionError("connection closed")
            if self._rank and count > 1 and machine.strikes("spoil-bcast"):
                view[0] ^= 1
        except OSError as error:
            self._lost(str(error))

    def _lost(self, reason: str) -> None:
        """A kernel whose peer is gone spins until it is aborted."""
        if "FAKE_NCCL_NOTICES" in os.environ and not self._aborted.is_set():
            self._error = reason
        self._aborted.wait()


def _hang(what: str) -> None:
    """For ever, if there is such a file for this process."""
    if machine.strikes(what):
        threading.Event().wait()
