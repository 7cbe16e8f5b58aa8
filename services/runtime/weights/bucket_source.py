"""The receiver's end of a buckets socket: one connection to whoever hands buckets out."""

from __future__ import annotations

import uuid

import zmq
from zmq.utils.monitor import recv_monitor_message

from umbra.proto import sockets
from umbra.proto.codec import Encoder
from umbra.proto.errors import UsageError
from umbra.proto.messages import Message, Role
from umbra.services.runtime.net.keys import OPEN, Security
from umbra.services.runtime.weights.malloc_tuning import keep_freed_memory

CONNECTIONS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class BucketSource:
    """Connects to one source after another, and knows whether it is there. One thread at a time.

    Args:
        name: of the receiver.
        security: keys of this process.
    """

    def __init__(self, name: str, security: Security = OPEN) -> None:
        keep_freed_memory()
        self.connected = False
        self._identity = sockets.unguessable(name)
        self._security = security
        self._encoder = Encoder(name, uuid.uuid4().hex[:12])
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._endpoint = ""
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._number = 0

    def connect(self, endpoint: str, server: Role = "weight_hub") -> None:
        """Begin to connect to `endpoint`, which must have the key of role `server`.

        Nothing happens if that was begun before.

        Raises:
            UsageError: it is no address.
        """
        if endpoint == self._endpoint:
            return
        self._disconnect()
        socket = self._socket = sockets.dealer(
            self._context, "", self._identity, self._security.connecting(server)
        )
        # The monitor comes before the connection.
        self._monitor = sockets.handshakes(self._context, socket, CONNECTIONS)
        try:
            sockets.connect(socket, endpoint)
        except UsageError:
            self._socket = None  # closed already
            self._disconnect()
            raise
        self._endpoint = endpoint

    def send(self, body: Message) -> None:
        """Send one message."""
        assert self._socket is not None
        self._socket.send_multipart(self._encoder.encode(body)[1], zmq.NOBLOCK)

    def next_number(self) -> int:
        """A number for an order."""
        self._number += 1
        return self._number

    def poll(self, timeout_s: float) -> tuple[list[zmq.Frame] | None, bool]:
        """What arrives within `timeout_s`: a message, and whether a connection came about."""
        assert self._socket is not None and self._monitor is not None
        made = False
        if self._socket.poll(0) == 0:
            zmq.select([self._socket, self._monitor], [], [], timeout_s)
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.connected = made = True
            elif event == zmq.EVENT_DISCONNECTED:
                self.connected = made = False
        if self._socket.poll(0):
            return self._socket.recv_multipart(zmq.NOBLOCK, copy=False), made
        return None, made

    def close(self) -> None:
        """Close the sockets."""
        self._disconnect()
        self._context.destroy(linger=0)

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.disable_monitor()
            self._socket.close(linger=0)
        if self._monitor is not None:
            self._monitor.close(linger=0)
        self._socket = self._monitor = None
        self._endpoint, self.connected = "", False
