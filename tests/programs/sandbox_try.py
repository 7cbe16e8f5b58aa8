"""Reach of code in a real container: prints the outcomes as JSON.

    sandbox_try.py SECRET PORT

SECRET is a file of the host; PORT is open on 127.0.0.1 and 10.88.0.254. Run where `docker` has a
daemon and an image `umbra-sandbox`, which takes /usr from the host.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys

from msgspec.structs import replace

from umbra.services.environments.sandbox import Container, ContainerLimits, SandboxError

LIMITS = ContainerLimits(
    image="umbra-sandbox:latest",
    memory_mb=96,
    command_s=60.0,
    arguments=["--volume", "/usr:/usr:ro", "--pids-limit", "24"],
)
CONNECT = """
import socket, sys
for host in ("127.0.0.1", "10.88.0.254", "10.88.0.1", "172.17.0.1"):
    try:
        socket.create_connection((host, int(sys.argv[1])), timeout=2)
        print("reached", host)
    except OSError:
        pass
"""
ENVIRONS = "cat /proc/*/environ 2>/dev/null | tr '\\0' '\\n' | grep -c hidden"
FORKS = """
import os, time
made = 0
try:
    for _ in range(200):
        if not os.fork():
            time.sleep(5)
            os._exit(0)
        made += 1
except OSError:
    pass
print(made)
"""


async def try_all(secret: str, port: str) -> dict[str, object]:
    one, two = Container(LIMITS), Container(LIMITS)
    found: dict[str, object] = {}

    async def run(name: str, box: Container, *command: str, stdin: str = "") -> None:
        outcome = await box.run(command, stdin)
        found[name] = [outcome.code, outcome.output.strip()]

    await run("python", one, "python3", "-c", "print(6 * 7)")
    await run("user", one, "id", "-u")
    await run("interfaces", one, "ls", "/sys/class/net")
    await run("network", one, "python3", "-c", CONNECT, port)
    await run("environment", one, "sh", "-c", ENVIRONS)
    await run("secret", one, "cat", secret)
    await run("daemon", one, "ls", "/run/docker.sock", "/var/run/docker.sock")
    await run("kept", one, "sh", "-c", "echo mine > file; cat file")
    await run("still there", one, "cat", "/sandbox/file")
    await run("other", two, "cat", "/sandbox/file")
    await run("root", one, "sh", "-c", "echo x > /usr/x; echo x > /etc/x; echo x > /x")
    await run("disk", one, "sh", "-c", "head -c 64000000 /dev/zero > big; stat -c %s big")
    await run("clean", one, "rm", "big")
    await run("memory", one, "python3", "-c", "x = bytearray(400_000_000); print('had it')")
    await run("forks", one, "python3", "-c", FORKS)
    slow = Container(replace(LIMITS, command_s=2.0))
    try:
        await slow.run(["sleep", "600"])
    except SandboxError as error:
        found["slow"] = str(error)
    await run("alive", two, "echo", "yes")
    await one.close()
    await two.close()
    return found


def main() -> None:
    os.environ["UMBRA_AGENT_KEY"] = "hidden"
    limit = 4096 << 20  # as of the process of an environment
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    print(json.dumps(asyncio.run(try_all(*sys.argv[1:3]))))


if __name__ == "__main__":
    main()
