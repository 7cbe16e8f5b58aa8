"""The process of `umbra tinker`: an HTTP server, a thread that trains, a process that samples."""

from __future__ import annotations

import logging
import os
import secrets
import threading
from contextlib import closing
from functools import partial
from pathlib import Path

import torch

from umbra.proto.errors import EXIT_DONE, UsageError, service_thread
from umbra.services.config import RunConfig
from umbra.services.generator.vllm.options import require_vllm
from umbra.services.http import HttpServer, is_local, listen, url_at
from umbra.services.modeling.hub import is_hub_name
from umbra.services.modeling.model_directory import check_model_dir
from umbra.services.process.child import child_error
from umbra.services.process.command import stop_on_signals
from umbra.services.process.files import DISK, folder_lock
from umbra.services.process.loop_thread import LoopThread
from umbra.services.process.parent import tell_ready
from umbra.services.tinker.command import KEY_VARIABLE
from umbra.services.tinker.journal import FuturesJournal
from umbra.services.tinker.sampler_process import SamplerProcess
from umbra.services.tinker.server import FILES, Api
from umbra.services.tinker.training import Training
from umbra.services.tinker.wire import PROTOBUF

MAX_BODY = 256 << 20
REQUESTS = 20_000  # at once: each future that is awaited holds one
_WAIT_S = 10.0
_LOOK_S = 0.2  # between looks after the sampler

log = logging.getLogger("umbra.tinker")


def run(config: RunConfig, address: str, name: str, folder: Path) -> int:
    """Serve until a signal comes.

    Raises:
        UsageError: a model that cannot be served, an address without a key, or a folder in use.
        StartupError: the address is taken.
        ChildError: the sampler ended, again and again.
    """
    if config.generator.engine == "vllm":
        require_vllm()
    named = config.model.path
    directory = check_model_dir(named)
    key = os.environ.get(KEY_VARIABLE, "")
    with closing(listen(address, "--bind")) as bound:
        if not is_local(bound) and not key:
            raise UsageError(
                f"--bind {address} is reached from other machines: set {KEY_VARIABLE} to a key "
                "that begins with tml-, which clients have as TINKER_API_KEY, or use 127.0.0.1"
            )
        if key and not key.startswith("tml-"):
            raise UsageError(f"{KEY_VARIABLE} has to begin with tml-: the SDK sends no other keys")
        folder.mkdir(parents=True, exist_ok=True)
        fault, remedy = f"--dir {folder} is in use by", "stop that server, or name another folder"
        lock = folder_lock(folder, fault, remedy)
        with lock, closing(FuturesJournal(folder / "journal.sqlite")) as journal:
            loop = LoopThread("http")
            training = Training(config, folder.resolve(), name, journal)
            sampler = SamplerProcess(config, torch.cuda.device_count(), loop, journal.finish)
            tokenizer = str(named if is_hub_name(named) else directory.resolve())
            context, secret = config.generator.max_context, _secret(folder / "secret")
            api = Api(journal, training, sampler.submit, context, tokenizer, secret)
            journal.announce = partial(loop.call, api.wake)
            loop.call(api.resume)
            trainer = service_thread(training.run, "training")
            trainer.start()
            server = HttpServer(
                api.app(),
                bound,
                key=key,
                max_body=MAX_BODY,
                requests=REQUESTS,
                types=("application/json", PROTOBUF),
                signed=FILES,
            )
            sampler.start()
            loop.wait(server.start(), _WAIT_S)
            url = url_at(*bound.getsockname()[:2])
            log.info("serving %s at %s", name, url)
            tell_ready({"url": url})
            stopping = threading.Event()
            with stop_on_signals(stopping):
                while sampler.poll() and not stopping.wait(_LOOK_S):
                    pass
            sampler.stop()
            loop.wait(server.stop(), _WAIT_S)
            loop.close()
            training.wake(close=True)
            trainer.join()
            if (failure := sampler.supervisor.failure) is not None:
                raise child_error(failure.reason, failure.exit_code)
    return EXIT_DONE


def _secret(path: Path) -> bytes:
    """Return the key that signs URLs; it stays the same in a folder."""
    if not path.exists():
        DISK.replace(path, secrets.token_bytes(32), mode=0o600)
    return path.read_bytes()
