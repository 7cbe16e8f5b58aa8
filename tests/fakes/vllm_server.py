"""A vLLM server without vLLM: its HTTP endpoints, as vLLM 0.32 answers them, and its faults."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from umbra.services.weights.manifest import checksum
from umbra.services.weights.memory import MappedBlocks

TORN = "torn"  # what tokens of neither version are labelled
TOKEN_S = 0.002


def next_token(length: int) -> int:
    """The token that follows so many, on every server."""
    return 5 + length * 7 % 90


class FakeVllm:
    """Serves at once; `port` 0 = any. `facts` are in its /server_info.

    Attributes:
        dies_at: an endpoint whose call it does not survive; "+" in front: it does what was asked.
        slow: seconds that an endpoint takes, by its name.
        refuses: endpoints that answer 500.
        lies: its checksums are others.
        stops_at: tokens of a request after which it waits, until more are allowed.
        calls: endpoints, in the order of their calls.
        torn_tokens: tokens sampled while the weights were neither version.
    """

    def __init__(self, seed: int = 1, port: int = 0, key: str = "", **facts: Any) -> None:
        self.facts = {
            "dtype": "torch.float32", "seed": seed, "max_model_len": 256,
            "logprobs_mode": "processed_logprobs", "quantization": None,
        } | facts  # fmt: skip
        self.more_facts: dict[str, Any] = {
            "weight_transfer_config": {"backend": "umbra"},
            "speculative_config": None,
        }
        self.key, self.dies_at, self.lies = key, "", False
        self.slow: dict[str, float] = {}
        self.refuses: set[str] = set()
        self.calls: list[str] = []
        self.torn_tokens, self.stops_at = 0, 1 << 30
        self.label, self.version_sums = "default", [0]
        self.is_updating = self.is_torn = self.is_dead = False
        self._aborted: set[str] = set()
        self._running = threading.Event()
        self._running.set()
        self._update: dict[str, Any] = {}
        self._blocks = MappedBlocks()
        self._closing = threading.Thread(target=self._close, daemon=True)
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                fake._answer(self, {})

            def do_POST(self) -> None:
                size = int(self.headers.get("Content-Length", 0))
                fake._answer(self, json.loads(self.rfile.read(size) or b"{}"))

            def log_message(self, format: str, *args: Any) -> None:
                del format, args

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def kill(self) -> None:
        """Be gone at once, with all connections."""
        if not self.is_dead:
            self.is_dead = True
            self._closing.start()

    def restarted(self) -> "FakeVllm":
        """Return another in its place."""
        self.kill()
        self._closing.join()
        return FakeVllm(self.facts["seed"], self.port)

    def _close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, handler: BaseHTTPRequestHandler, body: Any) -> None:
        path = urlsplit(handler.path).path
        self.calls.append(path)
        guarded = path.startswith("/inference")
        if guarded and self.key and handler.headers["Authorization"] != f"Bearer {self.key}":
            self._reply(handler, {"error": "Unauthorized"}, 401)
            return
        name = path.removeprefix("/")
        time.sleep(self.slow.get(name, 0.0))
        if name == self.dies_at or self.is_dead:
            self.kill()
            return
        if name in self.refuses:
            self._reply(handler, {"error": {"message": f"{name} is broken"}}, 500)
            return
        if name == "inference/v1/generate":
            if handler.command == "GET":
                self._reply(handler, {"detail": "Method Not Allowed"}, 405)
            else:
                self._generate(handler, body)
            return
        try:
            reply = getattr(self, f"_{name.rpartition('/')[2]}", lambda _: None)(body)
        except ValueError as error:
            self._reply(handler, {"error": {"message": str(error)}}, 500)
            return
        if f"+{name}" == self.dies_at:
            self.kill()
            return
        self._reply(handler, {} if reply is None else reply)

    def _reply(self, handler: BaseHTTPRequestHandler, body: Any, status: int = 200) -> None:
        data = json.dumps(body).encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    # -- its endpoints ----------------------------------------------------------------------------

    def _server_info(self, _: Any) -> dict[str, Any]:
        config = {
            "model_config": self.facts, "device_config": {"device": "cpu"},
            "parallel_config": {"data_parallel_size": 1}, **self.more_facts,
        }  # fmt: skip
        return {"vllm_config": config}

    def _pause(self, _: Any) -> None:
        self._running.clear()

    def _resume(self, _: Any) -> None:
        self._running.set()

    def _start_weight_update(self, _: Any) -> None:
        if self.is_updating:
            raise ValueError("start_weight_update called while a weight update is already active")
        self.is_updating = self.is_torn = True

    def _update_weights(self, body: Any) -> None:
        self._update = body["update_info"]
        if "path" not in self._update:
            self.is_updating = False
            raise ValueError("no update")

    def _finish_weight_update(self, body: Any) -> None:
        memory = self._blocks.view(self._update["path"])
        buckets = self._update["buckets"]
        self.version_sums = [checksum(memory[start:end]) for start, end, _ in buckets]
        if self.version_sums != [wanted for _, _, wanted in buckets]:
            raise ValueError("bytes changed while they were loaded")
        self.is_updating = self.is_torn = False
        self.label = body["weight_version"]

    def _weight_info(self, _: Any) -> dict[str, str]:
        return {"weight_version": self.label}

    def _weight_checker(self, _: Any) -> dict[str, Any]:
        return {"checksums": {"tp0:w": f"{self.version_sums}{self.lies}"}}

    def _abort_requests(self, body: Any) -> None:
        self._aborted.update(body["request_ids"])

    def _generate(self, handler: BaseHTTPRequestHandler, body: Any) -> None:
        handler.send_response(200)
        handler.end_headers()
        sampling, name = body["sampling_params"], f"generate-tokens-{body['request_id']}"
        length, labels = len(body["token_ids"]), list[str]()
        reason = None
        try:
            while reason is None:
                waits = not self._running.is_set() or len(labels) >= self.stops_at
                if waits and name not in self._aborted and not self.is_dead:
                    time.sleep(TOKEN_S)
                    continue
                if self.is_dead:
                    return
                drawn = []
                if name in self._aborted:
                    reason = "abort"
                else:
                    labels.append(TORN if self.is_torn else self.label)
                    self.torn_tokens += self.is_torn
                    drawn = [next_token(length)]
                    length += 1
                    reason = "length" if len(labels) == sampling["max_tokens"] else None
                handler.wfile.write(_event(drawn, sampling["logprobs"], reason, labels))
                time.sleep(TOKEN_S)
            handler.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            return  # nobody reads it


def _event(drawn: list[int], told: int, reason: str | None, labels: list[str]) -> bytes:
    content = [
        {
            "token_id": token, "logprob": -0.5, "rank": 1,
            "top_logprobs": [
                {"token_id": token + at, "logprob": -0.5 if at < 2 else -9999.0, "rank": at + 1}
                for at in range(told)
            ],
        }
        for token in drawn
    ]  # fmt: skip
    starts = [at for at, one in enumerate(labels) if at == 0 or one != labels[at - 1]]
    spans = zip(starts, [*starts[1:], len(labels)], strict=True)
    choice: dict[str, Any] = {
        "index": 0, "token_ids": drawn, "logprobs": {"content": content}, "finish_reason": reason,
        "weight_versions": [{"version": labels[at], "start": at, "end": end} for at, end in spans],
    }  # fmt: skip
    return b"data: " + json.dumps({"request_id": "r", "choices": [choice]}).encode() + b"\n\n"
