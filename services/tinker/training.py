"""The thread that trains: it does the requests of all models, for each model in order."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec

from umbra.proto.errors import UmbraError, UsageError
from umbra.services.config import RunConfig
from umbra.services.tinker.bodies import (
    CreateModel,
    LoadWeights,
    OptimStep,
    SaveWeights,
    TrainedShape,
    read,
    sampler_name,
)
from umbra.services.tinker.journal import FutureAnswer, FutureRequest, FuturesJournal
from umbra.services.tinker.models import Bench, Benches, ModelFacts, Trainee, seed_of
from umbra.services.tinker.wire import PROTOBUF, read_pass, write_outputs

SWEEP_S = 60.0
ABANDONED_S = 86_400.0  # without a heartbeat, until a session counts as ended
SNAPSHOT_S = 30.0  # of work that a killed server would do again
UNNAMED = 8  # newest versions of a model that are kept for sampling without a name
UNNAMED_WHOLE = 2  # the same of whole weights: the newest, and the one that is still sampled
SEGMENTS = {
    "save_weights": "weights",
    "save_weights_for_sampler": "sampler_weights",
    "save_weights_external": "external_weights",
}
_REPLAYED = ("forward_backward", "optim_step")


class Lanes:
    """Requests of models that wait: each model's in the order of their numbers."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[str, dict[int, FutureRequest]] = {}
        self._next: dict[str, int] = {}
        self._ready: deque[FutureRequest | None] = deque()
        self.closed = False

    def begin(self, lane: str, number: int) -> None:
        """Say which number of a model comes next."""
        with self._changed:
            self._next[lane] = number

    def add(self, request: FutureRequest) -> None:
        with self._changed:
            lane, number = request.lane, self._next.setdefault(request.lane, 0)
            if request.seq == number:
                self._ready.append(request)
                self._changed.notify()
            else:
                self._waiting.setdefault(lane, {})[request.seq] = request

    def take(self, timeout_s: float) -> FutureRequest | None:
        """Wait for the next request; None after a time, a nudge, or once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self.closed, timeout_s)
            return self._ready.popleft() if self._ready and not self.closed else None

    def nudge(self) -> None:
        """Let `take` return."""
        with self._changed:
            self._ready.append(None)
            self._changed.notify()

    def done(self, request: FutureRequest) -> None:
        """Let the model's next request follow."""
        with self._changed:
            number = self._next[request.lane] = request.seq + 1
            following = self._waiting.get(request.lane, {}).pop(number, None)
            if following is not None:
                self._ready.append(following)

    def close(self) -> None:
        with self._changed:
            self.closed = True
            self._changed.notify()


class Training:
    """The worker that does requests, and writes their answers into the journal.

    Args:
        folder: gets states, versions and exports.
        base_model: the name that clients know the model by.
        told: is called with each request that has an answer.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        base_model: str,
        journal: FuturesJournal,
        told: Callable[[str], None],
    ) -> None:
        self.folder, self._base_model = folder, base_model
        self._journal, self._told = journal, told
        self._benches = Benches(config)
        self._trainees: dict[str, Trainee] = {}
        self._sweep_at, self._began = 0.0, time.time()
        self.lanes = Lanes()

    def resume(self) -> int:
        """Queue requests that an earlier server left unfinished; return their number."""
        for model_id, facts in self._journal.all("model").items():
            self.lanes.begin(model_id, facts["next"])
        left = [one for one in self._journal.requests("queued") if one.kind != "asample"]
        for request in left:
            self.lanes.add(request)
        return len(left)

    def run(self) -> None:
        """Do requests until the lanes are closed."""
        while not self.lanes.closed:
            if (request := self.lanes.take(SWEEP_S)) is not None:
                self._do(request)
                self.lanes.done(request)
                self._told(request.id)
            if request is None or time.monotonic() >= self._sweep_at:
                self._sweep()

    def _do(self, request: FutureRequest) -> None:
        """Do a request; its answer and all that it changed are written together."""
        begun = time.monotonic()
        change = _nothing
        try:
            answer, change = self._perform(request)
        except UsageError as error:
            answer = FutureAnswer.failure(str(error), "user")
        except (UmbraError, RuntimeError, OSError) as error:
            answer = FutureAnswer.failure(str(error), "server")
        update: dict[str, Any] = {"next": request.seq + 1}
        if (trainee := self._trainees.get(request.lane)) is not None:
            if answer.failed and request.kind == "forward_backward":
                trainee.faulty = True
            trainee.cost_s += time.monotonic() - begun
            if request.kind == "load_weights" or (
                request.kind == "optim_step" and trainee.cost_s >= SNAPSHOT_S
            ):
                update |= self._write_state(trainee, request.seq)
        with self._journal.transaction():
            change()
            self._journal.finish(request, answer, keep=request.kind in _REPLAYED)
            known = self._journal.get("model", request.lane)
            if known is not None:
                self._journal.put("model", request.lane, {**known, **update}, known["session"])
            if "snapshot" in update:
                self._journal.trim(request.lane, request.seq)
        if "snapshot" in update or request.kind in SEGMENTS:
            self._collect(request.lane)

    def _write_state(self, trainee: Trainee, seq: int) -> dict[str, Any]:
        """Write a model as it is after request `seq`, so that none before is done again."""
        file = self._place(trainee.facts.id) / f"state-{seq}"
        self._bench(trainee).save(trainee, file)
        trainee.cost_s = 0.0
        return {"snapshot": seq, "state": str(file)}

    def _sweep(self) -> None:
        """Drop old answers, expired checkpoints, and versions of ended sessions."""
        self._sweep_at = time.monotonic() + SWEEP_S
        self._journal.purge()
        now = _stamp(0)
        for path, checkpoint in self._journal.all("checkpoint").items():
            if checkpoint["expires"] and checkpoint["expires"] < now:
                self._journal.drop("checkpoint", path)
        silent = time.time() - ABANDONED_S
        for session, held in self._journal.all("session").items():
            if held["finished"] or max(held["at"], self._began) < silent:
                self._journal.end(session)
        models = list(self._journal.all("model"))
        for model_id in models:
            self._collect(model_id)
        known = {self._place(model_id).name for model_id in models}
        for place in (self.folder / "models").glob("*"):
            if place.name not in known:  # its model was never made
                shutil.rmtree(place, ignore_errors=True)

    def _collect(self, model_id: str) -> None:
        """Delete a model's files that nothing needs; all of it, once its session has ended.

        Checkpoints stay, with the model that they are listed under.
        """
        if (held := self._journal.get("model", model_id)) is None:
            return
        place = self._place(model_id)
        kept = {one["file"] for one in self._journal.all("checkpoint", model_id).values()}
        if self._journal.get("session", held["session"]) is None:
            self._trainees.pop(model_id, None)
            if not kept:
                self._journal.drop("model", model_id)
        else:
            kept.add(held["state"] or held["facts"]["source"])
            unnamed = [str(file) for file in place.glob("sampler_weights-*")]
            unnamed = sorted(set(unnamed) - kept, key=lambda file: int(file.rpartition("-")[2]))
            kept |= {*unnamed[-(UNNAMED if held["facts"]["shape"]["rank"] else UNNAMED_WHOLE) :]}
        for file in place.glob("*"):
            if str(file) not in kept:
                _delete(file)
        if not kept:
            shutil.rmtree(place, ignore_errors=True)

    def _perform(self, request: FutureRequest) -> tuple[FutureAnswer, Callable[[], None]]:
        """Do `request`; return its answer and the journal entries to write with it."""
        match request.kind:
            case "create_model":
                return self._create(request)
            case "load_weights":
                return self._load(request)
            case "forward_backward" | "forward":
                trainee = self._trainee(request.lane)
                asked = read_pass(request.body)
                found, metrics = self._bench(trainee).run_pass(trainee, asked)
                return FutureAnswer(write_outputs(found, metrics), PROTOBUF), _nothing
            case "optim_step":
                trainee = self._trainee(request.lane)
                norm = self._step(trainee, request)
                return FutureAnswer.json({"metrics": {"grad_norm:mean": norm}}), _nothing
            case _:
                return self._save(request)

    def _step(self, trainee: Trainee, request: FutureRequest) -> float:
        bench = self._bench(trainee)
        try:
            adam = read(request.body, OptimStep).adam_params
            settings = adam.settings()
        except UsageError:
            bench.drop(trainee)
            raise
        return bench.step(trainee, settings, adam.grad_clip_norm)

    def _create(self, request: FutureRequest) -> tuple[FutureAnswer, Callable[[], None]]:
        asked = read(request.body, CreateModel)
        self._check_base(asked.base_model)
        lora, shape = asked.lora_config, TrainedShape()
        if lora is not None and lora.rank:
            shape = TrainedShape(lora.rank, lora.train_mlp, lora.train_attn, lora.train_unembed)
        facts = ModelFacts(
            id=request.lane,
            session=asked.session_id,
            shape=shape,
            seed=seed_of(request.lane, lora.seed if lora is not None else None),
            created=time.time(),
            user_metadata=asked.user_metadata,
        )
        change = self._begin(facts)
        return FutureAnswer.json({"model_id": facts.id, "type": "create_model"}), change

    def _begin(self, facts: ModelFacts) -> Callable[[], None]:
        self._trainees[facts.id] = self._benches.of(facts.shape).begin(facts)
        held: dict[str, Any] = {"facts": msgspec.to_builtins(facts), "session": facts.session}
        held |= {"next": 1, "snapshot": 0, "state": ""}
        return lambda: self._journal.put("model", facts.id, held, facts.session)

    def _load(self, request: FutureRequest) -> tuple[FutureAnswer, Callable[[], None]]:
        asked = read(request.body, LoadWeights)
        saved = self._journal.get("checkpoint", asked.path)
        if saved is None or saved["kind"] != "save_weights":
            raise UsageError(
                f"{asked.path} is no training checkpoint of this server: save_state makes them"
            )
        if asked.base_model is not None:
            self._check_base(asked.base_model)
        change = _nothing
        if request.seq == 0:
            assert asked.session_id is not None
            # The checkpoint may be deleted before there is a snapshot of the new model.
            source = self._place(request.lane) / "source"
            _link(Path(saved["file"]), source)
            facts = ModelFacts(
                id=request.lane,
                session=asked.session_id,
                shape=msgspec.convert(saved["shape"], TrainedShape),
                seed=0,
                created=time.time(),
                source=str(source),
                with_optimizer=asked.optimizer,
                user_metadata=asked.user_metadata,
            )
            change = self._begin(facts)
        else:
            trainee = self._trainee(request.lane)
            self._bench(trainee).load(trainee, Path(saved["file"]), optimizer=asked.optimizer)
        told = {"path": asked.path, "model_id": request.lane, "type": "load_weights"}
        return FutureAnswer.json(told), change

    def _save(self, request: FutureRequest) -> tuple[FutureAnswer, Callable[[], None]]:
        asked = read(request.body, SaveWeights)
        trainee = self._trainee(request.lane)
        bench, facts = self._bench(trainee), trainee.facts
        kind, segment, checksum = request.kind, SEGMENTS[request.kind], ""
        if asked.kind != "snapshot":
            raise UsageError(f"sampling clients of kind {asked.kind!r} are not supported")
        unnamed = kind == "save_weights_for_sampler" and asked.sampling_session_seq_id is not None
        path = f"tinker://{facts.id}/{segment}/{asked.name}"
        if not unnamed and not asked.overwrite and self._journal.get("checkpoint", path):
            raise UsageError(f"{path} exists: choose another name, or overwrite=True")
        # Numbers of requests are used once, so no file is ever written over another.
        file = self._place(facts.id) / f"{segment}-{request.seq}"
        if kind == "save_weights":
            bench.save(trainee, file)
        elif kind == "save_weights_external":
            bench.export(trainee, file, self._base_model)
        else:
            checksum = bench.publish(trainee, file)
        data: dict[str, Any] = {
            "kind": kind,
            "model": facts.id,
            "file": str(file),
            "checksum": checksum,
            "shape": msgspec.to_builtins(facts.shape),
            "size": _size(file),
            "at": _stamp(0),
            "expires": _stamp(asked.ttl_seconds) if asked.ttl_seconds else None,
            "user_metadata": asked.user_metadata,
        }
        if not unnamed:
            told = {"path": path, "type": kind}
            return FutureAnswer.json(told), lambda: self._journal.put(
                "checkpoint", path, data, facts.id
            )
        assert asked.sampling_session_seq_id is not None
        sampler = sampler_name(facts.session, asked.sampling_session_seq_id)
        told = {"sampling_session_id": sampler, "type": kind}
        held = {key: data[key] for key in ("shape", "file", "checksum")} | {"path": None}
        return FutureAnswer.json(told), lambda: self._journal.put(
            "sampler", sampler, held, facts.session
        )

    def _trainee(self, model_id: str) -> Trainee:
        """Return a model, loaded from its newest snapshot if need be.

        Raises:
            UsageError: there is none.
        """
        if (found := self._trainees.get(model_id)) is not None:
            return found
        held = self._journal.get("model", model_id)
        if held is None:
            raise UsageError(f"there is no model {model_id}")
        facts = msgspec.convert(held["facts"], ModelFacts)
        bench = self._benches.of(facts.shape)
        snapshot = held["snapshot"]
        if held["state"]:
            facts_now = msgspec.structs.replace(facts, source=held["state"], with_optimizer=True)
            trainee = bench.begin(facts_now)
            trainee.facts = facts
        else:
            trainee = bench.begin(facts)
        self._trainees[model_id] = trainee
        begun = time.monotonic()
        for request in self._journal.requests("past", model_id, snapshot):
            self._replay(bench, trainee, request)
        trainee.cost_s = time.monotonic() - begun
        return trainee

    def _replay(self, bench: Bench, trainee: Trainee, request: FutureRequest) -> None:
        """Repeat an answered request whose effect on the model was lost."""
        failed = request.state == "failed"
        if request.kind == "optim_step":
            if failed:
                bench.drop(trainee)
            else:
                adam = read(request.body, OptimStep).adam_params
                bench.step(trainee, adam.settings(), adam.grad_clip_norm)
        elif failed:
            trainee.faulty = True
        else:
            bench.run_pass(trainee, read_pass(request.body))

    def _bench(self, trainee: Trainee) -> Bench:
        return self._benches.of(trainee.facts.shape)

    def _place(self, model_id: str) -> Path:
        return self.folder / "models" / model_id.replace(":", "-")

    def _check_base(self, name: str) -> None:
        if name != self._base_model:
            raise UsageError(
                f"base_model {name!r} is not served here, {self._base_model!r} is: start the "
                "server with that model, or with --name"
            )


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _link(file: Path, name: Path) -> None:
    """Have the content of `file` under another name too, where that can be without a copy."""
    name.parent.mkdir(parents=True, exist_ok=True)
    name.unlink(missing_ok=True)
    try:
        os.link(file, name)
    except FileNotFoundError as error:
        raise UsageError(f"{file.name} was deleted") from error
    except OSError:
        shutil.copyfile(file, name)


def _nothing() -> None:
    pass


def files_in(folder: Path) -> list[str]:
    """Return the files of an exported checkpoint, relative to its folder."""
    return sorted(str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file())


def _size(path: Path) -> int:
    files = [path / name for name in files_in(path)] if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)


def _stamp(later_s: float) -> str:
    return (datetime.now(UTC) + timedelta(seconds=later_s)).isoformat()
