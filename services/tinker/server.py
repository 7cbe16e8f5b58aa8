"""The routes of the Tinker API, as SDK 0.38 calls them.

A request that trains or samples is written into the journal and answered with a future, which the
client polls. What cannot be done fails its future, so that a model's later requests go on; a route
that is not here, and an SDK that speaks otherwise, are refused.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import inspect
import logging
import re
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

from msgspec.structs import replace
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from umbra.proto.errors import UmbraError
from umbra.proto.records import Sampling
from umbra.services.http import ApiError
from umbra.services.tinker import wire
from umbra.services.tinker.journal import FutureAnswer, FutureRequest, FuturesJournal, T
from umbra.services.tinker.sampler_process import SampleJob
from umbra.services.tinker.training import SEGMENTS, Training, files_in
from umbra.services.tinker.wire import Checkpoint, Model, SamplerRecord, SessionRecord, read

OLDEST_SDK = (0, 38)
POLL_S = 20.0  # a request for a future waits so long; the SDK gives up after 45 s
HEARTBEAT_S = 600.0  # between notes that a session is alive
SIGNED_S = 3600.0  # URLs of files are good for
API, FILES = "/api/v1/", "/files/"
_CHECKPOINTS = "training_runs/{run}/checkpoints"
_CHECKPOINT = _CHECKPOINTS + "/{name:path}"
log = logging.getLogger("umbra.tinker")


@dataclass(eq=False)
class Api:
    """Sessions, futures and checkpoints; a thread trains, and a process samples."""

    journal: FuturesJournal
    training: Training
    submit: Callable[[SampleJob], None]
    max_context: int
    tokenizer: str
    secret: bytes  # signs URLs
    _waiting: dict[str, asyncio.Event] = field(default_factory=dict[str, asyncio.Event])

    def app(self) -> Starlette:
        """Return the application; a handler gets a request and its body, and returns JSON."""
        calls: dict[str, Callable[[HttpRequest, bytes], Any]] = {
            "POST client/config": self._client_config,
            "POST client/dynamic_config": _answers({}),
            "POST telemetry": _answers({"status": "accepted"}),
            "POST create_session": self._create_session,
            "POST session_heartbeat": self._heartbeat,
            "POST sessions/{session}/finish": self._finish_session,
            "POST create_sampling_session": self._create_sampler,
            "POST get_info": self._get_info,
            "POST weights_info": self._weights_info,
            "POST asample": self._sample,
            "POST retrieve_future": self._retrieve,
            "POST forward_backward": self._pass,
            "GET healthz": _answers({"status": "ok"}),
            "GET get_server_capabilities": self._capabilities,
            "GET samplers/{sampler}": self._get_sampler,
            "GET training_runs": self._runs,
            "GET training_runs/{run}": lambda http, _: self._run(http.path_params["run"]),
            "GET checkpoints": self._checkpoints,
            f"GET {_CHECKPOINTS}": self._checkpoints,
            f"GET {_CHECKPOINT}/external_weights_urls": self._urls,
            f"DELETE {_CHECKPOINT}": self._delete_checkpoint,
        }
        trained = ("create_model", "load_weights", "optim_step", *SEGMENTS)
        calls |= {f"POST {kind}": self._numbered for kind in trained}
        routes = [Route(FILES + "{model}/{name:path}", self._file, methods=["GET"])]
        for name, call in calls.items():
            method, path = name.split(" ")
            routes.append(Route(API + path, _route(call), methods=[method]))
        handlers: Any = dict.fromkeys((UmbraError, Exception, HTTPException), _failed)
        return Starlette(routes=routes, exception_handlers=handlers)

    def resume(self) -> None:
        """Queue requests for samples that an earlier server left unfinished."""
        for request in self.journal.samples():
            self._submit(request, read(request.body, wire.SampleBody))

    def wake(self, request_id: str) -> None:
        """Answer who waits for a request that has an answer."""
        if (event := self._waiting.pop(request_id, None)) is not None:
            event.set()

    # -- sessions and futures ---------------------------------------------------------------------

    def _client_config(self, _http: HttpRequest, data: bytes) -> Any:
        version = read(data, wire.Named).sdk_version
        numbers = re.match(r"(\d+)\.(\d+)", version)
        if not numbers or tuple(map(int, numbers.groups())) < OLDEST_SDK:
            raise ApiError(
                f"this server speaks the wire of the tinker SDK {OLDEST_SDK[0]}.{OLDEST_SDK[1]}, "
                f"the client has {version or 'none'}: pip install -U tinker"
            )
        flags = ("pjwt_auth_enabled", "proto_compress_fwdbwd", "custom_loss_server_side")
        return dict.fromkeys(flags, False)

    def _create_session(self, _http: HttpRequest, _data: bytes) -> Any:
        session = uuid.uuid4().hex
        self.journal.put(SessionRecord(at=time.time()), session, "")
        return {"type": "create_session", "session_id": session}

    def _heartbeat(self, _http: HttpRequest, data: bytes) -> Any:
        name = str(read(data, wire.Named).session_id)
        with self.journal.transaction():
            session, now = self._session(name), time.time()
            if session.at < now - HEARTBEAT_S:
                self.journal.put(replace(session, at=now), name, "")
        return {"type": "session_heartbeat"}

    def _finish_session(self, http: HttpRequest, _data: bytes) -> Any:
        name = http.path_params["session"]
        with self.journal.transaction():
            if (session := self.journal.get(SessionRecord, name)) is not None:
                self.journal.put(replace(session, finished=True), name, "")
        self.training.wake(sweep=True)
        return {}

    def _numbered(self, http: HttpRequest, data: bytes) -> Any:
        return self._accept(http.url.path.removeprefix(API), *read(data, wire.Named).place, data)

    def _pass(self, http: HttpRequest, data: bytes) -> Any:
        if http.headers.get("content-type") != wire.PROTOBUF:
            raise ApiError(f"forward_backward takes {wire.PROTOBUF}: the SDK is too old")
        model_id, seq, forward_only = wire.read_head(data)
        return self._accept("forward" if forward_only else "forward_backward", model_id, seq, data)

    def _accept(self, kind: str, model_id: str, seq: int, data: bytes) -> Any:
        """Write a request of a model and return its future; once, however often it comes."""
        request = FutureRequest(f"{model_id}:{seq}", model_id, seq, kind, data)
        model = self.journal.get(Model, model_id)
        if model is None and seq:
            raise ApiError(f"there is no model {model_id}", status=404)
        self._session(wire.session_of(model_id))
        # One that is done, and whose answer is too old, is unknown.
        is_past = model is not None and seq < model.next
        is_old = is_past and self.journal.answer(request.id) == "unknown"
        if not is_old and self.journal.accept(request):
            self.training.wake()
        return {"request_id": request.id, "model_id": model_id}

    async def _retrieve(self, _http: HttpRequest, data: bytes) -> Any:
        name = read(data, wire.Named).request_id
        event = self._waiting.setdefault(name, asyncio.Event())
        if (answer := self.journal.answer(name)) is None:
            with suppress(TimeoutError):
                await asyncio.wait_for(event.wait(), POLL_S)
            answer = self.journal.answer(name)
        if answer is None:
            pending = {"type": "try_again", "request_id": name, "queue_state": "active"}
            return JSONResponse(pending, 408)
        self.wake(name)
        if not isinstance(answer, FutureAnswer):
            raise ApiError(f"there is no request {name}, or its answer is too old", status=410)
        return Response(answer.body, media_type=answer.media)

    # -- samples ----------------------------------------------------------------------------------

    def _create_sampler(self, _http: HttpRequest, data: bytes) -> Any:
        body = read(data, wire.CreateSampler)
        self._session(body.session_id)
        sampler = SamplerRecord()
        if (path := body.model_path) is None:
            self.training.check_base(body.base_model)
        elif (saved := self._find(Checkpoint, path)).kind == "save_weights_for_sampler":
            sampler = SamplerRecord(saved.weights, path)
        else:
            raise ApiError(f"{path} is not for sampling: save_weights_for_sampler makes those")
        name = wire.sampler_name(body.session_id, body.sampling_session_seq_id)
        self.journal.put(sampler, name, body.session_id)
        return {"type": "create_sampling_session", "sampling_session_id": name}

    def _get_sampler(self, http: HttpRequest, _data: bytes) -> Any:
        name = http.path_params["sampler"]
        path = self._find(SamplerRecord, name).path
        return {"sampler_id": name, "base_model": self.training.base_model, "model_path": path}

    def _sample(self, _http: HttpRequest, data: bytes) -> Any:
        body = read(data, wire.SampleBody)
        sampler, seq = body.sampling_session_id, body.seq_id
        self._find(SamplerRecord, sampler)
        body.check()
        request = FutureRequest(f"{sampler}:{seq}", sampler, seq, "asample", data)
        if self.journal.accept(request):
            self._submit(request, body)
        names = [f"{request.id}:{index}" for index in range(body.num_samples)]
        return {"request_id": request.id, "sample_sequence_ids": names}

    def _submit(self, request: FutureRequest, body: wire.SampleBody) -> None:
        given = body.sampling_params
        prompt = [token for chunk in body.prompt.chunks for token in chunk.tokens]
        stop = [given.stop] if isinstance(given.stop, str) else given.stop
        last = body.prompt_logprobs_last_n or len(prompt)
        job = SampleJob(
            id=request.id,
            weights=self._find(SamplerRecord, request.owner).weights,
            prompt=prompt,
            count=body.num_samples,
            sampling=Sampling(
                temperature=given.temperature, top_p=given.top_p, top_k=max(0, given.top_k)
            ),
            max_tokens=given.max_tokens or self.max_context,
            stop_tokens=None if stop is None else [end for end in stop if isinstance(end, int)],
            stop_texts=[end for end in stop or () if isinstance(end, str)],
            scored=last if body.prompt_logprobs else 0,
        )
        self.submit(job)

    # -- models and checkpoints -------------------------------------------------------------------

    def _get_info(self, _http: HttpRequest, data: bytes) -> Any:
        model = self._find(Model, str(read(data, wire.Named).model_id))
        return {
            "type": "get_info",
            "model_id": model.id,
            "model_name": self.training.base_model,
            "model_data": {"model_name": self.training.base_model, "tokenizer_id": self.tokenizer},
            "optimizer_config": {"type": "adamw"},
            **_lora(model.rank),
        }

    def _weights_info(self, _http: HttpRequest, data: bytes) -> Any:
        rank = self._find(Checkpoint, read(data, wire.Named).tinker_path).weights.rank
        parts = dict.fromkeys(("train_unembed", "train_mlp", "train_attn"), True)
        return {"base_model": self.training.base_model, **_lora(rank), **parts}

    def _capabilities(self, _http: HttpRequest, _data: bytes) -> Any:
        model = {"model_name": self.training.base_model, "max_context_length": self.max_context}
        return {"supported_models": [model | {"trainable": True, "sampleable": True}]}

    def _runs(self, http: HttpRequest, _data: bytes) -> Any:
        page, cursor = _page(http, self.journal.all(Model))
        return {"training_runs": [self._run(name) for name in page], "cursor": cursor}

    def _run(self, name: str) -> dict[str, Any]:
        model = self._find(Model, name)
        saved = self.journal.all(Checkpoint, name)
        newest = {entry.kind: _checkpoint(path, entry) for path, entry in saved.items()}
        metadata = model.user_metadata
        return {
            "training_run_id": name,
            "base_model": self.training.base_model,
            "model_owner": "umbra",
            "last_request_time": datetime.fromtimestamp(model.created, UTC).isoformat(),
            "last_checkpoint": newest.get("save_weights"),
            "last_sampler_checkpoint": newest.get("save_weights_for_sampler"),
            "user_metadata": metadata and {key: str(value) for key, value in metadata.items()},
            **_lora(model.rank),
        }

    def _checkpoints(self, http: HttpRequest, _data: bytes) -> Any:
        saved = self.journal.all(Checkpoint, http.path_params.get("run"))
        page, cursor = _page(http, saved)
        return {"checkpoints": [_checkpoint(path, saved[path]) for path in page], "cursor": cursor}

    def _delete_checkpoint(self, http: HttpRequest, _data: bytes) -> Any:
        path = _path_of(http)
        self._find(Checkpoint, path)
        self.journal.drop(Checkpoint, path)
        self.training.wake(sweep=True)  # which deletes its files
        return {}

    def _urls(self, http: HttpRequest, _data: bytes) -> Any:
        """Tell where the files of an exported checkpoint are, each with a signature."""
        folder = Path(self._find(Checkpoint, _path_of(http)).weights.folder)
        expires = int(time.time() + SIGNED_S)
        urls: dict[str, str] = {}
        for name in files_in(folder):
            path = f"{FILES}{folder.parent.name}/{folder.name}/{name}"
            query = f"?expires={expires}&signature={self._sign(path, expires)}"
            urls[name] = f"http://{http.headers['host']}{quote(path)}{query}"
        until = datetime.now(UTC) + timedelta(seconds=SIGNED_S)
        return {"urls": urls, "expires": until.isoformat()}

    async def _file(self, http: HttpRequest) -> Response:
        path, query = http.url.path, http.query_params
        expires = query.get("expires", "")
        signature = self._sign(path, int(expires)) if expires.isdecimal() else ""
        if not signature or not hmac.compare_digest(signature, query.get("signature", "")):
            raise ApiError("the signature is wrong", status=403)
        if int(expires) < time.time():
            raise ApiError("the URL has expired", status=403)
        model, name = http.path_params["model"], http.path_params["name"]
        return FileResponse(self.training.folder / "models" / model / name)

    def _sign(self, path: str, expires: int) -> str:
        return hmac.new(self.secret, f"{expires} {path}".encode(), hashlib.sha256).hexdigest()

    def _find(self, kind: type[T], name: str) -> T:
        """Return a record; ApiError if there is none."""
        if (record := self.journal.get(kind, name)) is None:
            noun = kind.__name__.lower().replace("record", "")
            raise ApiError(f"there is no {noun} {name}", status=404)
        return record

    def _session(self, name: str) -> SessionRecord:
        """Return a session; ApiError if there is none, or it has finished."""
        if (session := self._find(SessionRecord, name)).finished:
            raise ApiError(f"session {name} has finished", status=410)
        return session


def _route(call: Callable[[HttpRequest, bytes], Any]) -> Callable[[HttpRequest], Any]:
    async def handle(http: HttpRequest) -> Response:
        answer = call(http, await http.body())
        answer = await answer if inspect.isawaitable(answer) else answer
        return answer if isinstance(answer, Response) else JSONResponse(answer)

    return handle


def _answers(value: dict[str, str]) -> Callable[[HttpRequest, bytes], Any]:
    return lambda _http, _data: value


def _lora(rank: int) -> dict[str, Any]:
    return {"is_lora": rank > 0, "lora_rank": rank or None}


def _checkpoint(path: str, saved: Checkpoint) -> dict[str, Any]:
    kinds = {"save_weights": "training", "save_weights_for_sampler": "sampler"}
    return {
        "checkpoint_id": path.split("/", 3)[3],
        "checkpoint_type": kinds.get(saved.kind, "external"),
        "time": saved.at,
        "tinker_path": path,
        "size_bytes": saved.size,
        "user_metadata": saved.user_metadata,
        "expires_at": saved.expires,
    }


def _path_of(http: HttpRequest) -> str:
    return f"tinker://{http.path_params['run']}/{http.path_params['name']}"


def _page(http: HttpRequest, records: Iterable[str]) -> tuple[list[str], dict[str, int]]:
    """Return the part of the names, newest first, that is asked for, and a cursor."""
    try:
        offset = int(http.query_params.get("offset", 0))
        limit = int(http.query_params.get("limit", 1000))
    except ValueError as error:
        raise ApiError("offset and limit have to be numbers") from error
    names = list(records)
    cursor = {"offset": offset, "limit": limit, "total_count": len(names)}
    return names[::-1][offset : offset + limit], cursor


async def _failed(http: HttpRequest, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        detail, status = f"{http.method} {http.url.path} is no route of umbra tinker", 404
    elif isinstance(error, UmbraError):
        detail, status = str(error), error.status if isinstance(error, ApiError) else 400
    else:
        log.error("a request failed", exc_info=error)
        detail, status = f"{type(error).__name__}: {error}", 500
    return JSONResponse({"detail": detail}, status)
