"""The routes of the Tinker API, as SDK 0.38 calls them.

A request that trains or samples is written into the journal and answered with a future, which the
client polls. What cannot be done fails its future, so that a model's later requests go on; a route
that is not here, and an SDK that speaks otherwise, are refused.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from umbra.proto.errors import UsageError
from umbra.proto.records import Sampling
from umbra.services.http import ApiError
from umbra.services.tinker.bodies import (
    Numbered,
    SampleBody,
    SamplingSession,
    TrainedShape,
    read,
    sampler_name,
)
from umbra.services.tinker.journal import ConflictError, FutureAnswer, FutureRequest, FuturesJournal
from umbra.services.tinker.samplers import SampleJob
from umbra.services.tinker.training import Training, files_in
from umbra.services.tinker.wire import PROTOBUF, read_head

OLDEST_SDK = (0, 38)
POLL_S = 20.0  # a request for a future waits so long; the SDK gives up after 45 s
HEARD_S = 600.0  # between notes that a session is alive
SIGNED_S = 3600.0  # URLs of files are good for
FILES = "/files/"
log = logging.getLogger("umbra.tinker")
Handler = Callable[[HttpRequest], Awaitable[Response]]


class Api:
    """Sessions, futures and checkpoints; a thread trains, and processes sample."""

    def __init__(
        self,
        journal: FuturesJournal,
        training: Training,
        submit: Callable[[SampleJob], None],
        base_model: str,
        max_context: int,
        tokenizer: str,
        secret: bytes,
    ) -> None:
        self._journal, self._training, self._to_samplers = journal, training, submit
        self._base_model, self._max_context = base_model, max_context
        self._tokenizer, self._secret = tokenizer, secret
        self._waiting: dict[str, asyncio.Event] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def app(self) -> Starlette:
        posts: dict[str, Handler] = {
            "client/config": self._client_config,
            "client/dynamic_config": _empty,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "sessions/{session}/finish": self._finish_session,
            "telemetry": _accepted,
            "create_sampling_session": self._create_sampling_session,
            "get_info": self._get_info,
            "weights_info": self._weights_info,
            "asample": self._sample,
            "retrieve_future": self._retrieve,
            "forward_backward": self._pass,
        }
        trained = ("create_model", "load_weights", "optim_step", "save_weights")
        trained += ("save_weights_for_sampler", "save_weights_external")
        posts |= {kind: self._numbered(kind) for kind in trained}
        gets: dict[str, Handler] = {
            "healthz": _healthy,
            "get_server_capabilities": self._capabilities,
            "samplers/{sampler}": self._get_sampler,
            "training_runs": self._runs,
            "training_runs/{run}": self._run,
            "training_runs/{run}/checkpoints": self._checkpoints,
            "checkpoints": self._checkpoints,
            "training_runs/{run}/checkpoints/{name:path}/external_weights_urls": self._urls,
        }
        prefix = "/api/v1/"
        routes = [Route(prefix + path, call, methods=["POST"]) for path, call in posts.items()]
        routes += [Route(prefix + path, call, methods=["GET"]) for path, call in gets.items()]
        checkpoint = prefix + "training_runs/{run}/checkpoints/{name:path}"
        routes.append(Route(checkpoint, self._delete_checkpoint, methods=["DELETE"]))
        routes.append(Route(FILES + "{model}/{name:path}", self._file, methods=["GET"]))
        handlers: Any = {
            UsageError: _refused,
            ApiError: _refused,
            ConflictError: _refused,
            404: _no_route,
            405: _no_route,
            Exception: _broken,
        }
        return Starlette(routes=routes, exception_handlers=handlers)

    def resume(self) -> int:
        """Queue samples that a server before this one left undone; return how many."""
        left = [one for one in self._journal.requests("queued") if one.kind == "asample"]
        for request in left:
            self._submit(request, read(request.body, SampleBody))
        return len(left)

    def told(self, request_id: str) -> None:
        """Wake who waits for the answer; called on any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._wake, request_id)

    def sampled(self, request_id: str, answer: FutureAnswer) -> None:
        """Write the answer to a request for samples."""
        self._journal.finish(FutureRequest(request_id, "", 0, "asample", b""), answer)
        self.told(request_id)

    def _wake(self, request_id: str) -> None:
        if (event := self._waiting.pop(request_id, None)) is not None:
            event.set()

    async def _client_config(self, http: HttpRequest) -> Response:
        told = _object(await http.body())
        version = str(told.get("sdk_version", ""))
        numbers = re.match(r"(\d+)\.(\d+)", version)
        if not numbers or (int(numbers[1]), int(numbers[2])) < OLDEST_SDK:
            oldest = ".".join(map(str, OLDEST_SDK))
            raise ApiError(
                f"this server speaks the wire of the tinker SDK {oldest}, the client has "
                f"{version or 'none'}: pip install -U tinker"
            )
        flags = {"pjwt_auth_enabled": False, "proto_compress_fwdbwd": False}
        return JSONResponse(flags | {"custom_loss_server_side": False})

    async def _create_session(self, http: HttpRequest) -> Response:
        told = _object(await http.body())
        session = uuid.uuid4().hex
        kept = {key: told.get(key) for key in ("tags", "user_metadata", "display_name")}
        self._journal.put("session", session, {**kept, "at": time.time(), "finished": False})
        return JSONResponse({"type": "create_session", "session_id": session})

    async def _heartbeat(self, http: HttpRequest) -> Response:
        session = str(_object(await http.body()).get("session_id"))
        with self._journal.transaction():
            if (held := self._session(session))["at"] < time.time() - HEARD_S:
                self._journal.put("session", session, {**held, "at": time.time()})
        return JSONResponse({"type": "session_heartbeat"})

    async def _finish_session(self, http: HttpRequest) -> Response:
        session = http.path_params["session"]
        with self._journal.transaction():
            if (held := self._journal.get("session", session)) is not None:
                self._journal.put("session", session, {**held, "finished": True})
        self._training.lanes.nudge()
        return JSONResponse({})

    def _numbered(self, kind: str) -> Handler:
        async def handle(http: HttpRequest) -> Response:
            body = await http.body()
            numbered = read(body, Numbered)
            return self._accept(kind, *numbered.place, body)

        return handle

    async def _pass(self, http: HttpRequest) -> Response:
        if http.headers.get("content-type") != PROTOBUF:
            raise ApiError(f"forward_backward takes {PROTOBUF}: the SDK is too old")
        body = await http.body()
        model_id, seq, forward_only = read_head(body)
        return self._accept("forward" if forward_only else "forward_backward", model_id, seq, body)

    def _accept(self, kind: str, model_id: str, seq: int, body: bytes) -> Response:
        """Write a request of a model and answer with its future; once, however often it comes."""
        request = FutureRequest(f"{model_id}:{seq}", model_id, seq, kind, body)
        told = {"request_id": request.id, "model_id": model_id}
        held = self._journal.get("model", model_id)
        if held is None and seq:
            raise ApiError(f"there is no model {model_id}", status=404)
        self._session(model_id.rpartition(":train:")[0])
        is_past = held is not None and seq < held["next"]
        if is_past and self._journal.answer(request.id) == "unknown":
            return JSONResponse(told)  # done so long ago that its answer is gone
        if self._journal.accept(request):
            self._training.lanes.add(request)
        return JSONResponse(told)

    async def _create_sampling_session(self, http: HttpRequest) -> Response:
        asked = read(await http.body(), SamplingSession)
        self._session(asked.session_id)
        held: dict[str, Any] = {"shape": {}, "file": "", "checksum": "", "path": None}
        if asked.model_path is not None:
            saved = self._checkpoint(asked.model_path)
            if saved["kind"] != "save_weights_for_sampler":
                raise ApiError(
                    f"{asked.model_path} is not for sampling: save_weights_for_sampler makes those"
                )
            held |= {key: saved[key] for key in ("shape", "file", "checksum")}
            held["path"] = asked.model_path
        elif asked.base_model != self._base_model:
            raise ApiError(
                f"base_model {asked.base_model!r} is not served here: {self._base_model!r} is"
            )
        sampler = sampler_name(asked.session_id, asked.sampling_session_seq_id)
        self._journal.put("sampler", sampler, held, asked.session_id)
        told = {"type": "create_sampling_session", "sampling_session_id": sampler}
        return JSONResponse(told)

    async def _sample(self, http: HttpRequest) -> Response:
        body = await http.body()
        asked = read(body, SampleBody)
        sampler = asked.sampling_session_id
        if self._journal.get("sampler", sampler) is None:
            raise ApiError(f"there is no sampling session {sampler}", status=404)
        request = FutureRequest(f"{sampler}:{asked.seq_id}", sampler, asked.seq_id, "asample", body)
        asked.check()
        if self._journal.accept(request):
            self._submit(request, asked)
        names = [f"{request.id}:{index}" for index in range(asked.num_samples)]
        return JSONResponse({"request_id": request.id, "sample_sequence_ids": names})

    def _submit(self, request: FutureRequest, asked: SampleBody) -> None:
        held = self._journal.get("sampler", request.lane)
        assert held is not None
        params = asked.sampling_params
        prompt = [token for chunk in asked.prompt.chunks for token in chunk.tokens]
        stop = [params.stop] if isinstance(params.stop, str) else params.stop
        scored = 0
        if asked.prompt_logprobs:
            scored = asked.prompt_logprobs_last_n or len(prompt)
        self._to_samplers(
            SampleJob(
                id=request.id,
                shape=msgspec.convert(held["shape"], TrainedShape),
                version=held["file"],
                checksum=held["checksum"],
                prompt=prompt,
                count=asked.num_samples,
                sampling=Sampling(
                    temperature=params.temperature, top_p=params.top_p, top_k=max(0, params.top_k)
                ),
                max_tokens=params.max_tokens or self._max_context,
                stop_tokens=None if stop is None else [one for one in stop if isinstance(one, int)],
                stop_texts=[one for one in stop or () if isinstance(one, str)],
                scored=scored,
            )
        )

    async def _retrieve(self, http: HttpRequest) -> Response:
        name = str(_object(await http.body()).get("request_id"))
        self._loop = asyncio.get_running_loop()
        event = self._waiting.setdefault(name, asyncio.Event())
        answer = self._journal.answer(name)
        if answer is None:
            try:
                async with asyncio.timeout(POLL_S):
                    await event.wait()
            except TimeoutError:
                pending = {"type": "try_again", "request_id": name, "queue_state": "active"}
                return JSONResponse(pending, 408)
            answer = self._journal.answer(name)
        else:
            self._waiting.pop(name, None)
        if not isinstance(answer, FutureAnswer):
            raise ApiError(f"there is no request {name}, or its answer is too old", status=410)
        return Response(answer.body, media_type=answer.media)

    async def _get_info(self, http: HttpRequest) -> Response:
        model_id = str(_object(await http.body()).get("model_id"))
        shape = self._model(model_id)["facts"]["shape"]
        return JSONResponse(
            {
                "type": "get_info",
                "model_id": model_id,
                "model_name": self._base_model,
                "model_data": {"model_name": self._base_model, "tokenizer_id": self._tokenizer},
                "is_lora": shape["rank"] > 0,
                "lora_rank": shape["rank"] or None,
                "optimizer_config": {"type": "adamw"},
            }
        )

    async def _weights_info(self, http: HttpRequest) -> Response:
        shape = self._checkpoint(str(_object(await http.body()).get("tinker_path")))["shape"]
        told = {"base_model": self._base_model, "is_lora": shape["rank"] > 0}
        parts = {key: shape[key] for key in ("train_unembed", "train_mlp", "train_attn")}
        return JSONResponse(told | parts | {"lora_rank": shape["rank"] or None})

    async def _capabilities(self, _http: HttpRequest) -> Response:
        model = {"model_name": self._base_model, "max_context_length": self._max_context}
        return JSONResponse({"supported_models": [model | {"trainable": True, "sampleable": True}]})

    async def _get_sampler(self, http: HttpRequest) -> Response:
        name = http.path_params["sampler"]
        held = self._journal.get("sampler", name)
        if held is None:
            raise ApiError(f"there is no sampling session {name}", status=404)
        told = {"sampler_id": name, "base_model": self._base_model, "model_path": held["path"]}
        return JSONResponse(told)

    async def _runs(self, http: HttpRequest) -> Response:
        names = list(self._journal.all("model"))
        page, cursor = _page(http, names)
        return JSONResponse({"training_runs": [self._told(n) for n in page], "cursor": cursor})

    async def _run(self, http: HttpRequest) -> Response:
        return JSONResponse(self._told(http.path_params["run"]))

    async def _checkpoints(self, http: HttpRequest) -> Response:
        saved = self._journal.all("checkpoint", http.path_params.get("run"))
        page, cursor = _page(http, list(saved))
        told = [_checkpoint(path, saved[path]) for path in page]
        return JSONResponse({"checkpoints": told, "cursor": cursor})

    async def _delete_checkpoint(self, http: HttpRequest) -> Response:
        path = _path_of(http)
        self._checkpoint(path)
        self._journal.drop("checkpoint", path)
        self._training.lanes.nudge()  # which deletes its files
        return JSONResponse({})

    async def _urls(self, http: HttpRequest) -> Response:
        """Tell where the files of an exported checkpoint are, each with a signature."""
        folder = Path(self._checkpoint(_path_of(http))["file"])
        expires = int(time.time() + SIGNED_S)
        urls = {}
        for name in files_in(folder):
            path = f"{FILES}{folder.parent.name}/{folder.name}/{name}"
            query = f"?expires={expires}&signature={self._sign(path, expires)}"
            urls[name] = f"http://{http.headers['host']}{quote(path)}{query}"
        until = datetime.now(UTC) + timedelta(seconds=SIGNED_S)
        return JSONResponse({"urls": urls, "expires": until.isoformat()})

    async def _file(self, http: HttpRequest) -> Response:
        path, query = http.url.path, http.query_params
        expires = query.get("expires", "")
        wanted = self._sign(path, int(expires)) if expires.isdecimal() else ""
        if not wanted or not hmac.compare_digest(wanted, query.get("signature", "")):
            raise ApiError("the signature is wrong", status=403)
        if int(expires) < time.time():
            raise ApiError("the URL has expired", status=403)
        model, name = http.path_params["model"], http.path_params["name"]
        return FileResponse(self._training.folder / "models" / model / name)

    def _sign(self, path: str, expires: int) -> str:
        return hmac.new(self._secret, f"{expires} {path}".encode(), hashlib.sha256).hexdigest()

    def _session(self, name: str) -> dict[str, Any]:
        """Return a session; ApiError if there is none, or it has finished."""
        held = self._journal.get("session", name)
        if held is None:
            raise ApiError(f"there is no session {name}", status=404)
        if held["finished"]:
            raise ApiError(f"session {name} has finished", status=410)
        return held

    def _model(self, name: str) -> dict[str, Any]:
        held = self._journal.get("model", name)
        if held is None:
            raise ApiError(f"there is no model {name}", status=404)
        return held

    def _checkpoint(self, path: str) -> dict[str, Any]:
        held = self._journal.get("checkpoint", path)
        if held is None:
            raise ApiError(f"there is no checkpoint {path}", status=404)
        return held

    def _told(self, name: str) -> dict[str, Any]:
        facts = self._model(name)["facts"]
        saved = self._journal.all("checkpoint", name)
        newest = {held["kind"]: _checkpoint(path, held) for path, held in saved.items()}
        metadata = facts["user_metadata"]
        return {
            "training_run_id": name,
            "base_model": self._base_model,
            "model_owner": "umbra",
            "is_lora": facts["shape"]["rank"] > 0,
            "lora_rank": facts["shape"]["rank"] or None,
            "last_request_time": datetime.fromtimestamp(facts["created"], UTC).isoformat(),
            "last_checkpoint": newest.get("save_weights"),
            "last_sampler_checkpoint": newest.get("save_weights_for_sampler"),
            "user_metadata": metadata and {key: str(value) for key, value in metadata.items()},
        }


def _checkpoint(path: str, held: dict[str, Any]) -> dict[str, Any]:
    kinds = {"save_weights": "training", "save_weights_for_sampler": "sampler"}
    return {
        "checkpoint_id": path.split("/", 3)[3],
        "checkpoint_type": kinds.get(held["kind"], "external"),
        "time": held["at"],
        "tinker_path": path,
        "size_bytes": held["size"],
        "user_metadata": held["user_metadata"],
        "expires_at": held["expires"],
    }


def _path_of(http: HttpRequest) -> str:
    return f"tinker://{http.path_params['run']}/{http.path_params['name']}"


def _page(http: HttpRequest, names: list[str]) -> tuple[list[str], dict[str, int]]:
    """Return the part of `names`, newest first, that is asked for, and a cursor."""
    try:
        offset = int(http.query_params.get("offset", 0))
        limit = int(http.query_params.get("limit", 1000))
    except ValueError as error:
        raise ApiError("offset and limit have to be numbers") from error
    cursor = {"offset": offset, "limit": limit, "total_count": len(names)}
    return names[::-1][offset : offset + limit], cursor


def _object(body: bytes) -> dict[str, Any]:
    return read(body, dict[str, Any])


async def _empty(_http: HttpRequest) -> Response:
    return JSONResponse({})


async def _accepted(_http: HttpRequest) -> Response:
    return JSONResponse({"status": "accepted"})


async def _healthy(_http: HttpRequest) -> Response:
    return JSONResponse({"status": "ok"})


async def _refused(_http: HttpRequest, error: Exception) -> Response:
    status = error.status if isinstance(error, ApiError) else 400
    return JSONResponse({"detail": str(error)}, status)


async def _broken(_http: HttpRequest, error: Exception) -> Response:
    log.error("a request failed", exc_info=error)
    return JSONResponse({"detail": f"{type(error).__name__}: {error}"}, 500)


async def _no_route(http: HttpRequest, _error: Exception) -> Response:
    told = f"{http.method} {http.url.path} is no route of umbra tinker"
    return JSONResponse({"detail": told}, 404)
