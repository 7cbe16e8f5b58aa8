"""The engine over vLLM servers, on servers without vLLM that fail in every way."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import AF_INET, AF_INET6, create_connection, create_server
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from fakes.slowness import limit, until
from fakes.versions import finish, go_on, in_memory, load, request, versions_of

from umbra.proto.errors import StartupError, UsageError
from umbra.services.config import (
    BufferConfig,
    GeneratorConfig,
    RunConfig,
    TrainerConfig,
    WeightHubConfig,
)
from umbra.services.generator.engines.engine import EngineError, EngineOutput
from umbra.services.generator.vllm.http_client import check_private
from umbra.services.generator.vllm.http_engine import HttpEngine
from umbra.services.modeling.models import outline_model
from umbra.services.weights.manifest import checksum
from umbra.services.weights.memory import MappedBlocks
from umbra.services.weights.verify import ChangedError, SlotGuard

TORN = "torn"  # what tokens of neither version are labelled
TOKEN_S = 0.002
SLOTS, CONTEXT, TOKENS = 16, 256, 60
UPDATE = ("pause", "start_weight_update", "update_weights", "finish_weight_update", "weight_info")


def next_token(length: int) -> int:
    """The token that follows so many, on every server."""
    return 5 + length * 7 % 90


class FakeVllm:
    """Serves at once; `port` 0 = any.

    Attributes:
        config: what /server_info tells.
        dies_at: an endpoint whose call it does not survive; "+" in front: it does what was asked.
        slow: seconds that an endpoint takes, by its name.
        refuses: endpoints that answer 500.
        lies: its checksums are others.
        stops_at: tokens of a request after which it waits, until more are allowed.
        calls: endpoints, in the order of their calls.
        torn_tokens: tokens sampled while the weights were neither version.
    """

    def __init__(self, seed: int = 1, port: int = 0, key: str = "") -> None:
        self.config: dict[str, Any] = {
            "model_config": {
                "dtype": "torch.float32", "seed": seed, "max_model_len": CONTEXT,
                "logprobs_mode": "processed_logprobs", "quantization": None,
            },
            "device_config": {"device": "cpu"}, "parallel_config": {"data_parallel_size": 1},
            "weight_transfer_config": {"backend": "umbra"}, "speculative_config": None,
        }  # fmt: skip
        self.seed, self.key, self.dies_at, self.lies = seed, key, "", False
        self.slow: dict[str, float] = {}
        self.refuses: set[str] = set()
        self.calls: list[str] = []
        self.torn_tokens, self.stops_at = 0, 1 << 30
        self.label, self.version_sums = "default", [0]
        self.is_updating = self.is_torn = self.is_paused = self.is_dead = False
        self._aborted: set[str] = set()
        self._update: dict[str, Any] = {}
        self._blocks = MappedBlocks()
        self._closing = threading.Thread(target=self._close, daemon=True)
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                size = int(self.headers.get("Content-Length", 0))
                fake._answer(self, json.loads(self.rfile.read(size) or b"{}"))

            do_POST = do_GET  # noqa: N815

            def log_message(self, format: str, *args: Any) -> None:
                pass

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
        return FakeVllm(self.seed, self.port)

    def _close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, handler: BaseHTTPRequestHandler, body: Any) -> None:
        path = urlsplit(handler.path).path
        self.calls.append(path)
        name = path.removeprefix("/")
        time.sleep(self.slow.get(name, 0.0))
        if name == self.dies_at or self.is_dead:
            self.kill()
        elif name in self.refuses:
            self._reply(handler, {"error": {"message": f"{name} is broken"}}, 500)
        elif name == "inference/v1/generate":
            if self.key and handler.headers["Authorization"] != f"Bearer {self.key}":
                self._reply(handler, {"error": "Unauthorized"}, 401)
            elif handler.command == "GET":
                self._reply(handler, {"detail": "Method Not Allowed"}, 405)
            else:
                self._generate(handler, body)
        else:
            try:
                reply = getattr(self, f"_{name.rpartition('/')[2]}", lambda _: None)(body)
            except ValueError as error:
                self._reply(handler, {"error": {"message": str(error)}}, 500)
                return
            if f"+{name}" == self.dies_at:
                self.kill()
            else:
                self._reply(handler, reply or {})

    def _reply(self, handler: BaseHTTPRequestHandler, body: Any, status: int = 200) -> None:
        data = json.dumps(body).encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    # -- its endpoints ----------------------------------------------------------------------------

    def _server_info(self, _: Any) -> dict[str, Any]:
        return {"vllm_config": self.config}

    def _pause(self, _: Any) -> None:
        self.is_paused = True

    def _resume(self, _: Any) -> None:
        self.is_paused = False

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
                waits = self.is_paused or len(labels) >= self.stops_at
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
    def row(token: int, rank: int) -> dict[str, Any]:
        return {"token_id": token, "logprob": -0.5 if rank < 3 else -9999.0, "rank": rank}

    content = [
        row(token, 1) | {"top_logprobs": [row(token + at, at + 1) for at in range(told)]}
        for token in drawn
    ]
    starts = [at for at, one in enumerate(labels) if at == 0 or one != labels[at - 1]]
    spans = zip(starts, [*starts[1:], len(labels)], strict=True)
    choice: dict[str, Any] = {
        "index": 0, "token_ids": drawn, "logprobs": {"content": content}, "finish_reason": reason,
        "weight_versions": [{"version": labels[at], "start": at, "end": end} for at, end in spans],
    }  # fmt: skip
    return b"data: " + json.dumps({"request_id": "r", "choices": [choice]}).encode() + b"\n\n"


def ready(engine: HttpEngine) -> int:
    """How many servers serve the newest version."""
    return sum(server.is_ready for server in engine.servers)


class Fleet:
    """Two servers, and an engine over them once `open` was called."""

    def __init__(self, outline: Any, stack: ExitStack) -> None:
        self.servers = [FakeVllm(1), FakeVllm(2)]
        self.tensors = {name: torch.zeros(one.shape) for name, one in outline.named_parameters()}
        self._outline, self._stack = outline, stack

    def open(
        self,
        servers: list[FakeVllm] | None = None,
        *,
        load_s: float = limit(5.0),
        away_s: float = limit(10.0),
        tell_head: int = 0,
        **options: Any,
    ) -> HttpEngine:
        urls = [server.url for server in servers or self.servers]
        config = RunConfig(
            generator=GeneratorConfig(
                engine="vllm-http", urls=urls, slots=SLOTS, max_context=CONTEXT
            ),
            weight_hub=WeightHubConfig(deadline_s=load_s),
            buffer=BufferConfig(stall_s=away_s / 9),
            trainer=TrainerConfig(score_centering=tell_head),
        )
        options = {"key": "", "start_s": 5.0, **options}
        self.engine = HttpEngine(self._outline, config, stop_ids=[3], **options)
        return self._stack.enter_context(closing(self.engine))

    def load(self, version: int) -> None:
        load(self.engine, self.tensors.items(), version)
        for server in self.servers:
            server.stops_at = 2 * TOKENS

    def start(self, requests: int = 8) -> None:
        """Have version 0 answer some tokens of so many requests, and the rest after a load."""
        self.load(0)
        number = len(self.engine.servers)
        until(lambda: ready(self.engine) == number, "all serve")  # one may have joined late
        for server in self.servers:
            server.stops_at = TOKENS // 3
        self.engine.submit([request(i, TOKENS) for i in range(requests)])
        until(lambda: all(self.engine.new_tokens().values()), "all have begun")

    @property
    def torn(self) -> int:
        return sum(server.torn_tokens for server in self.servers)


@pytest.fixture
def fleet(tiny_model_dir: Path) -> Iterator[Fleet]:
    with ExitStack() as stack:
        made = Fleet(outline_model(tiny_model_dir), stack)
        yield made
    for server in made.servers:
        server.kill()


def check_tokens(*parts: EngineOutput) -> None:
    """Assert that these, one after the other, are what any server answers."""
    start = len(request(int(parts[0].request_id[1:])).prompt_ids)
    ids = [token for part in parts for token in part.token_ids]
    assert ids == [next_token(start + at) for at in range(len(ids))]


def test_versions_change_in_flight_and_an_abort_hands_back_what_there_is(fleet: Fleet) -> None:
    engine = fleet.open()
    assert engine.dtype == "float32"
    engine.submit([request(9, TOKENS)])
    (waiting,) = engine.abort()
    assert (waiting.token_ids, waiting.spans) == ([], [])
    fleet.start()
    aborted = engine.abort(["s1", "s2"])
    assert {o.request_id for o in aborted} == {"s1", "s2"}
    fleet.load(1)
    live = list(engine.new_tokens())
    seen = {o.request_id: o for o in engine.peek([*live, "elsewhere"])}
    assert set(seen) == set(live)
    done = finish(engine)
    assert sorted(o.request_id for o in aborted + done) == [f"s{i}" for i in range(8)]
    for output in aborted + done:
        check_tokens(output)
        assert versions_of(output) == ([0] if output in aborted else [0, 1])
        assert output.finish_reason == ("abort" if output in aborted else "length")
    for output in done:
        part = seen[output.request_id]
        assert versions_of(part)[0] == 0
        assert part.spans[0].end == output.spans[0].end, "it knows where versions change"
    assert min(server.calls.count("/inference/v1/generate") for server in fleet.servers) >= 4
    assert engine.decoded_tokens >= 6 * TOKENS


@pytest.mark.parametrize("after", ["", "+"], ids=["before", "after"])
@pytest.mark.parametrize("step", [*UPDATE, "resume"])
def test_who_dies_in_a_load_never_serves_half_of_it(step: str, after: str, fleet: Fleet) -> None:
    engine, servers = fleet.open(), fleet.servers
    fleet.start()
    servers[0].dies_at = after + step
    fleet.load(1)
    answers = go_on(engine, 8, TOKENS).values()
    assert servers[0].is_dead
    assert engine.version == 1
    assert not fleet.torn
    for parts in answers:
        check_tokens(*parts)
        assert sum(len(part.token_ids) for part in parts) == TOKENS
        assert versions_of(parts[-1])[-1] == 1
    # Another in its place gets the newest weights before its first request.
    servers[0] = servers[0].restarted()
    until(lambda: ready(engine) == 2, "both serve")
    engine.submit([request(i, TOKENS) for i in range(8)])
    assert all(versions_of(output) == [1] for output in finish(engine))
    calls = servers[0].calls
    assert calls.index("/finish_weight_update") < calls.index("/resume")
    begun = [at for at, path in enumerate(calls) if path == "/inference/v1/generate"]
    assert begun[1] > calls.index("/resume"), "the first is a look"


def test_one_that_is_slow_or_refuses_is_left_behind(fleet: Fleet) -> None:
    engine, servers = fleet.open(load_s=limit(0.5)), fleet.servers
    fleet.load(0)
    servers[0].slow["update_weights"] = limit(2.0)
    began = time.monotonic()
    fleet.load(1)
    assert time.monotonic() - began < limit(1.5)
    assert ready(engine) == 1
    servers[0].slow.clear()
    until(lambda: ready(engine) == 2, "it is back")  # an update that broke off is closed
    servers[1].refuses = {"update_weights"}
    fleet.load(2)
    engine.submit([request(i, TOKENS) for i in range(4)])
    assert all(versions_of(output) == [2] for output in finish(engine))
    servers[0].refuses = {"finish_weight_update"}
    with pytest.raises(EngineError, match=r"version 3 broke off: .*finish_weight_update is broken"):
        fleet.load(3)
    assert not fleet.torn


def test_other_weights_serve_nothing(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    liar = fleet.servers[1]
    liar.lies = True
    engine = fleet.open()
    until(lambda: all(one.facts is not None for one in engine.servers), "both have joined")
    liar.slow["finish_weight_update"] = 0.2  # the first one serves
    fleet.load(0)
    assert ready(engine) == 1
    assert "1 of 1 weights are not equal" in caplog.text
    liar.lies = False
    until(lambda: ready(engine) == 2, "it is loaded again")


def test_weights_of_somebody_else_are_noticed_and_their_tokens_are_dropped(fleet: Fleet) -> None:
    engine, server = fleet.open(fleet.servers[:1]), fleet.servers[0]
    fleet.start(1)
    server.label = TORN
    (output, *_) = engine.poll(limit(5.0))
    assert (output.token_ids, output.finish_reason) == ([], "abort")
    until(lambda: ready(engine) and server.label != TORN, "it is loaded again")


def test_what_was_overwritten_is_sent_to_no_server(fleet: Fleet) -> None:
    engine = fleet.open()
    fleet.load(0)
    manifest, data = in_memory(fleet.tensors)
    sequence = memoryview(bytearray(8)).cast("Q")
    guard = SlotGuard(sequence, lambda: None)
    sequence[0] = 2
    before = [server.calls.count("/pause") for server in fleet.servers]
    with pytest.raises(ChangedError, match="was written again"):
        engine.load(manifest, data, 1, "keep", guard)
    assert [server.calls.count("/pause") for server in fleet.servers] == before


def test_supports_are_told(fleet: Fleet) -> None:
    engine = fleet.open(fleet.servers[:1], tell_head=2)
    fleet.load(0)
    engine.submit([request(0, 4), request(1, 4, top_k=3)])
    for output in finish(engine):  # of three that were allowed one has no probability
        assert output.support is not None
        assert list(output.support.sizes[::2]) == [2] * 4
        assert output.support.logprobs is not None


@pytest.mark.parametrize(
    ("part", "facts", "sentence"),
    [
        ("model", {"logprobs_mode": "raw_logprobs"}, "--logprobs-mode processed_logprobs"),
        ("model", {"max_model_len": 128}, "--max-model-len 128 is less than generator.max_context"),
        ("model", {"quantization": "fp8"}, "its quantization fp8"),
        ("model", {"seed": 2}, "--seed 2 too"),
        ("model", {"dtype": "torch.bfloat16"}, "it computes in .*, another one in"),
        ("weight_transfer", {"backend": "nccl"}, "install umbra-rl beside"),
        ("speculative", {"method": "ngram"}, "speculative_config"),
        ("parallel", {"data_parallel_size": 2}, "each data-parallel rank"),
    ],
)
def test_a_server_that_would_serve_wrong_is_refused(
    part: str, facts: Any, sentence: str, fleet: Fleet
) -> None:
    config = fleet.servers[0].config
    config[f"{part}_config"] = {**(config[f"{part}_config"] or {}), **facts}
    with pytest.raises(UsageError, match=sentence):
        engine = fleet.open()  # if the other one joined first, it is served by that one
        until(lambda: engine.refusal is not None, "the first is refused")
        raise engine.refusal or AssertionError


def test_a_server_with_a_key_gets_it(fleet: Fleet) -> None:
    locked = [FakeVllm(1, key="right")]
    with pytest.raises(UsageError, match="set VLLM_API_KEY"):
        fleet.open(locked)
    fleet.open(locked, key="right")
    locked[0].kill()
    with pytest.raises(StartupError, match=r"no server of generator\.urls answered within 0\.3 s"):
        fleet.open(locked, start_s=0.3)


def test_an_engine_whose_servers_are_all_away_ends(fleet: Fleet) -> None:
    engine = fleet.open(fleet.servers[:1], away_s=0.5)
    fleet.load(0)
    fleet.servers[0].kill()
    until(lambda: not ready(engine), "it is seen")
    engine.submit([request(0, TOKENS)])
    with pytest.raises(EngineError, match=r"no server of generator\.urls was ready for"):
        while True:
            engine.poll(0.05)


def test_a_server_that_others_reach_is_refused() -> None:
    check_private("unix:/run/vllm")
    with create_server(("127.0.0.1", 0)) as own, create_connection(own.getsockname()):
        # Its connections don't count.
        check_private(f"http://127.0.0.1:{own.getsockname()[1]}")
    for family, everyone, local in ((AF_INET, "0.0.0.0", "127.0.0.1"), (AF_INET6, "::", "[::1]")):
        with create_server((everyone, 0), family=family) as open_to_all:
            port = open_to_all.getsockname()[1]
            with pytest.raises(UsageError, match=rf"{port} listens at {everyone} too"):
                check_private(f"http://{local}:{port}")
    for urls, sentence in (
        (["http://10.0.0.5:8000"], "is not of this host"),
        (["https://127.0.0.1:8000"], "is not of this host"),
        (["http://127.0.0.1"], "is not of this host"),
        ([], "set both urls and vllm-http"),
        (["http://[::1]:8000"], ""),
    ):
        faults = list(GeneratorConfig(engine="vllm-http", urls=urls).faults())
        assert any(sentence in fault for fault in faults) if sentence else not faults
