"""What became of the connections of one DEALER: whether its server will ever take it in."""

from __future__ import annotations

import zmq
from zmq.utils.monitor import recv_monitor_message

from umbra.proto import sockets

FAILURES = 5  # broken handshakes in a row, before the first that succeeds, that are no accident
MISMATCH = "it needs keys that we lack, has none, or has those of another run"
EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class Handshake:
    """The handshakes of `socket` of `context`, which is not connected yet."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._failures = 0
        self._succeeded = False
        self.events = sockets.handshakes(context, socket, EVENTS)
        self.problem = ""  # why it will not be connected, to follow the name of the server
        self.suspicion = ""  # why it is not, it seems; what stands between may do that as well

    def read(self) -> None:
        """Take in what has happened."""
        while self.events.poll(0):
            event = recv_monitor_message(self.events)
            if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._succeeded, self._failures, self.problem = True, 0, ""
                self.suspicion = ""
            elif event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH:  # libzmq does not try again
                self.problem = "does not know our key, or has no use for one of our role"
            elif event["event"] == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:  # the same
                self.problem = f"does not understand us: {MISMATCH}"
            else:
                self._failures += 1
                if self._failures >= FAILURES and not self._succeeded:
                    self.suspicion = f"breaks off the connection: {MISMATCH}"

    def close(self) -> None:
        """Close the socket and what watches it."""
        if not self._socket.closed:
            self._socket.disable_monitor()
        self.events.close(linger=0)
        self._socket.close()
