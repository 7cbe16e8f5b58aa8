"""Several NCCL ranks on one real GPU: shows that bytes arrive and failures end, never how fast.

NCCL refuses two ranks on one GPU unless it takes them for two nodes: with another NCCL_HOSTID each,
they talk over sockets on the loopback interface. NCCL 2.30 and later can also be told to allow it.
"""

from __future__ import annotations

SHARED = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_MAX_CTAS": "4",
}


def rank_environment(name: str) -> dict[str, str]:
    """For the worker of the rank `name`."""
    return {**SHARED, "NCCL_HOSTID": name}
