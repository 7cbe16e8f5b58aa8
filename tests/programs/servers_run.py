"""A run whose vLLM servers are on another host, made of network namespaces, with keys.

    unshare --user --map-root-user --net --mount --uts --kill-child python servers_run.py FOLDER N

FOLDER has `run.toml` and `runs/keys`. Host alpha has `umbra up` of N steps without a generator,
beta two `vllm serve`, a weight daemon and a generator: a server, the daemon and the generator are
killed one after the other, and started again. Prints the exit codes at the end, as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from fakes.slowness import limit
from fakes.vllm_serve import VllmServe, serving
from programs.network import ADDRESSES, Host, Service, World, make_network

PORT = 8001
BROKER, HUB = (f"tcp://{ADDRESSES['alpha']}:{port}" for port in (5555, 5560))


def services(folder: Path, alpha: Host, beta: Host, urls: list[str], steps: int) -> list[Service]:
    settings = [
        "generator.engine=vllm-http", f"generator.urls={json.dumps(urls)}",
        "generator.max_context=256", "sampling.max_tokens=24", "sampling.top_k=8",
        "sampling.top_p=0.9", f"run.steps={steps}", f"run.dir={folder}/runs",
        f"model.path={folder}/model",
    ]  # fmt: skip
    up = ["generator.count=0", f"run.broker={BROKER}", f"weight_hub.listen={HUB}"]
    own = ["--config", f"{folder}/run.toml", "--broker", BROKER, "--keys", f"{folder}/runs/keys"]
    listen = f"weight_hub.listen=tcp://{ADDRESSES['beta']}:5560"
    wanted = (
        ("up", alpha, ["up", f"{folder}/run.toml"], [*settings, *up]),
        ("relay", beta, ["weight-hub", *own, "--upstream", HUB], [*settings, listen]),
        ("generator", beta, ["generator", *own], settings),
    )
    return [
        Service(
            name,
            [*host.enter, sys.executable, "-m", "umbra", *words, *(f"--set={one}" for one in sets)],
            folder / f"{name}.log",
        )
        for name, host, words, sets in wanted
    ]


def run(folder: Path, steps: int) -> dict[str, list[int]]:
    make_network()
    alpha, beta = Host("alpha"), Host("beta")
    servers = [
        VllmServe(folder / "model", folder / f"server-{n}.log", seed=n, port=port, context=256,
                  enter=beta.enter)
        for n, port in enumerate((PORT, 0), 1)
    ]  # fmt: skip
    every = services(folder, alpha, beta, [server.url for server in servers], steps)
    world = World(every, folder, "runs/*/metrics.jsonl", limit(800.0))
    with serving(*servers), world:
        for victim in (servers[0], *every[1:]):
            world.until_steps(2, "two more steps")
            victim.kill()
            victim.start()
        return world.finish()


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]), int(sys.argv[2]))))
