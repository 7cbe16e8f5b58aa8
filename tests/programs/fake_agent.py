"""A GPU agent without CUDA, for tests of its owner: joins hang or work, as the uid says."""

import json
import socket
import sys
import threading

owner = socket.socket(fileno=0)
while packet := socket.recv_fds(owner, 1 << 16, 1)[0]:
    order = json.loads(packet)
    if order["op"] == "join" and order["uid"] == "hang":
        threading.Event().wait()  # as a blocking communicator init whose peer never comes
    if order["op"] == "join" and order["uid"] == "die":
        sys.exit(3)
    answer = {"error": "refused"} if order.get("uid") == "refuse" else {"did": order["op"]}
    owner.send(json.dumps(answer).encode())
