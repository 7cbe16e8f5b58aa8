"""A TCP proxy that spoils what the server sends, once: flips a byte, or cuts the connection.

Usage: spoiling_proxy.py HOST:PORT flip|cut AT

AT is the position in the server's stream, in bytes. Prints the port that it listens on.
"""

import socket
import sys
import threading

target, mode, position = sys.argv[1], sys.argv[2], int(sys.argv[3])
host, _, port = target.rpartition(":")
spoiled = threading.Event()


def forward(source: socket.socket, sink: socket.socket, spoils: bool) -> None:
    done = 0
    try:
        while data := source.recv(1 << 16):
            if spoils and not spoiled.is_set() and done + len(data) > position:
                spoiled.set()
                if mode == "cut":
                    break
                at = max(0, position - done)
                data = data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :]
            sink.sendall(data)
            done += len(data)
    except OSError:
        pass  # the other side is gone
    for end in (source, sink):
        try:
            end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # closed already


with socket.create_server(("127.0.0.1", 0)) as listener:
    print(listener.getsockname()[1], flush=True)
    while True:
        client, _ = listener.accept()
        server = socket.create_connection((host, int(port)))
        for ends in ((client, server, False), (server, client, True)):
            threading.Thread(target=forward, args=ends, daemon=True).start()
