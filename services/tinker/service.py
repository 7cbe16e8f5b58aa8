"""The process of `umbra tinker`: an HTTP server, a thread that trains and one that samples."""

from __future__ import annotations

import logging
import os
import secrets
import threading
from pathlib import Path

from umbra.proto.errors import EXIT_DONE, UsageError, service_thread
from umbra.services.config import RunConfig
from umbra.services.http import HttpServer, is_local, listen, url_at
from umbra.services.modeling.hub import is_hub_name
from umbra.services.modeling.model_directory import check_model_dir
from umbra.services.process.files import DISK, HeldError, folder_lock
from umbra.services.process.loop_thread import LoopThread
from umbra.services.process.parent import tell_ready
from umbra.services.process.signals import stop_on_signals
from umbra.services.tinker.command import KEY_VARIABLE
from umbra.services.tinker.journal import FutureAnswer, FuturesJournal
from umbra.services.tinker.sampler import PROTOBUF, SamplingThread
from umbra.services.tinker.server import FILES, Api
from umbra.services.tinker.training import Training

MAX_BODY = 256 << 20
REQUESTS = 20_000  # at once: each future that is awaited holds one
_WAIT_S = 10.0

log = logging.getLogger("umbra.tinker")


def run(config: RunConfig, address: str, name: str, folder: Path) -> int:
    """Serve until a signal comes.

    Raises:
        UsageError: a model that cannot be served, an address without a key, or a folder in use.
        StartupError: the address is taken.
    """
    named = config.model.name
    directory = check_model_dir(named)
    key = os.environ.get(KEY_VARIABLE, "")
    bound = listen(address, "--bind")
    if not is_local(bound) and not key:
        bound.close()
        raise UsageError(
            f"--bind {address} is reached from other machines: set {KEY_VARIABLE} to a key that "
            "begins with tml-, which clients have as TINKER_API_KEY, or use 127.0.0.1"
        )
    if key and not key.startswith("tml-"):
        bound.close()
        raise UsageError(f"{KEY_VARIABLE} has to begin with tml-: the SDK sends no other keys")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with folder_lock(folder):
            journal = FuturesJournal(folder / "journal.sqlite")
            api: Api | None = None

            def told(request_id: str) -> None:
                if api is not None:
                    api.told(request_id)

            def sampled(request_id: str, answer: FutureAnswer) -> None:
                if api is not None:
                    api.sampled(request_id, answer)

            training = Training(config, folder.resolve(), name, journal, told)
            sampler = SamplingThread(config, sampled, secrets.randbits(31))
            api = Api(
                journal,
                training,
                sampler,
                base_model=name,
                max_context=config.generator.max_context,
                tokenizer=str(named if is_hub_name(named) else directory.resolve()),
                secret=_secret(folder / "secret"),
            )
            left = training.resume() + api.resume()
            threads = [service_thread(training.run, "training")]
            threads.append(service_thread(sampler.run, "sampling"))
            for thread in threads:
                thread.start()
            server = HttpServer(
                api.app(),
                bound,
                key=key,
                max_body=MAX_BODY,
                requests=REQUESTS,
                types=("application/json", PROTOBUF),
                signed=FILES,
            )
            loop = LoopThread("http")
            loop.wait(server.start(), _WAIT_S)
            url = url_at(*bound.getsockname()[:2])
            log.info("serving %s at %s, %d requests pending", name, url, left)
            tell_ready({"url": url})
            stopping = threading.Event()
            with stop_on_signals(stopping):
                stopping.wait()
            loop.wait(server.stop(), _WAIT_S)
            loop.close()
            training.lanes.close()
            sampler.stop()
            for thread in threads:
                thread.join()
            journal.close()
    except HeldError as error:
        bound.close()
        raise UsageError(
            f"--dir {folder} is in use by process {error.pid}: stop that server, or name another "
            "folder"
        ) from error
    return EXIT_DONE


def _secret(path: Path) -> bytes:
    """Return what signs URLs; it stays the same in a folder."""
    if not path.exists():
        DISK.replace(path, secrets.token_bytes(32), mode=0o600)
    return path.read_bytes()
