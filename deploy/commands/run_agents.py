"""`umbra run-agents`: the command of `services/environments/runner.py`."""

from __future__ import annotations

import asyncio
import os
import signal

import click
import msgspec

from umbra.proto.errors import UsageError
from umbra.services.environments.runner import Generators, run_agents
from umbra.services.http import KEY_VARIABLE
from umbra.services.modeling.run_file import load_service
from umbra.services.process.command import setup_logging


@click.command("run-agents")
@click.option("--config", required=True, metavar="FILE", help="Run file (TOML).")
@click.option(
    "--generator", "urls", required=True, multiple=True, metavar="URL",
    help="Endpoint for agents, as a generator logs it; can be repeated.",
)  # fmt: skip
@click.option(
    "--workers", default=4, show_default=True, help="Processes for agents, per environment."
)
def command(config: str, urls: tuple[str, ...], workers: int) -> None:
    """Run a run's agents on this machine, for the sessions of its generators.

    It plays the environments with workers = 0, whose modules are looked for beside the run file,
    then here. The key of the endpoints is in UMBRA_AGENT_KEY.
    """
    run = load_service(config, overrides=())
    setup_logging(run.log, "run-agents")
    outside = [e for e in run.all_environments if e.asks and not e.workers]
    if not outside:
        raise UsageError(
            f"{config} leaves no agent to runners: set workers = 0 in its [environment]"
        )
    if workers < 1:
        raise UsageError(f"--workers {workers}: use 1 or more")
    if wrong := [url for url in urls if not url.startswith(("http://", "https://"))]:
        raise UsageError(f"--generator {wrong[0]}: write it as http://HOST:PORT")
    playable = [msgspec.structs.replace(e, workers=workers) for e in outside]
    generators = Generators(urls, os.environ.get(KEY_VARIABLE, ""))

    async def main() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
                asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await run_agents(playable, generators, stop)

    asyncio.run(main())
