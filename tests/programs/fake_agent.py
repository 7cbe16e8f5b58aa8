"""An NCCL agent without NCCL, for tests of its owner: joins hang or work, as the uid says."""

import json
import sys
import threading

for line in sys.stdin:
    order = json.loads(line)
    if order["op"] == "join" and order["uid"] == "hang":
        threading.Event().wait()  # as a blocking communicator init whose peer never comes
    if order["op"] == "join" and order["uid"] == "die":
        sys.exit(3)
    answer = {"error": "refused"} if order.get("uid") == "refuse" else {"did": order["op"]}
    print(json.dumps(answer), flush=True)
