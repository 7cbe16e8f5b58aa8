"""A GPU worker without CUDA, for tests of its owner: joins hang or work, as the uid says.

Uploads hang.
"""

import sys
import threading
from contextlib import suppress
from typing import Any

from umbra.services.process.parent import parents_end
from umbra.services.process.pipe import Pipe

owner: Pipe[dict[str, Any]] = Pipe(parents_end(), dict[str, Any])
with suppress(EOFError):
    while order := owner.receive():
        if order["op"] == "upload" or order.get("uid") == "hang":
            threading.Event().wait()  # as a blocking communicator init whose peer never comes
        if order["op"] == "join" and order["uid"] == "die":
            sys.exit(3)
        did = {"handle": ""} if order["op"] == "export" else {"did": order["op"]}
        owner.send({"error": "refused"} if order.get("uid") == "refuse" else did)
