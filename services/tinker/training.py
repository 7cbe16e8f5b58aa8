"""The thread that trains: it does the requests of all models, for each model in order."""

from __future__ import annotations

import shutil
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from umbra.proto.errors import UmbraError, UsageError, foreseen
from umbra.services.config import RunConfig
from umbra.services.tinker import wire
from umbra.services.tinker.journal import FutureAnswer, FutureRequest, FuturesJournal
from umbra.services.tinker.models import Bench, Trainee
from umbra.services.tinker.wire import Checkpoint, Model, SamplerRecord, SessionRecord, read

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


@dataclass(eq=False)
class Training:
    """The worker that does requests, and writes their answers into the journal."""

    config: RunConfig
    folder: Path  # gets states, versions and exports
    base_model: str  # the name that clients know the model by
    journal: FuturesJournal

    def __post_init__(self) -> None:
        self._benches: dict[int, Bench] = {}
        self._trainees: dict[str, tuple[Bench, Trainee]] = {}
        # What a request makes, with its name and its parent: written with the answer.
        self._records: list[tuple[Model | SamplerRecord | Checkpoint, str, str]] = []
        self._sweep_at, self._began = 0.0, time.time()
        self._wake = threading.Event()
        self._closed = False

    def wake(self, *, sweep: bool = False, close: bool = False) -> None:
        """Have the thread look for requests, `sweep`, or end."""
        self._closed |= close
        if sweep:
            self._sweep_at = 0.0
        self._wake.set()

    def run(self) -> None:
        """Do requests until the end."""
        while not self._closed:
            if (request := self.journal.next()) is not None:
                self._do(request)
            elif (wait_s := self._sweep_at - time.monotonic()) > 0:
                self._wake.wait(wait_s)
                self._wake.clear()
            if time.monotonic() >= self._sweep_at:
                self._sweep()

    def _do(self, request: FutureRequest) -> None:
        """Do a request; its answer and all that it changed are written together."""
        begun, kind = time.monotonic(), request.kind
        self._records.clear()
        try:
            answer = _HANDLERS[kind](self, request)
        except Exception as error:  # noqa: BLE001 - else it would end each server again
            answer = FutureAnswer.failure(foreseen(error, f"{kind} of {request.owner}"))
            if not isinstance(error, UmbraError):  # it is brought back as the journal has it
                self._trainees.pop(request.owner, None)
        update: dict[str, Any] = {"next": request.seq + 1}
        if (pair := self._trainees.get(request.owner)) is not None:
            bench, trainee = pair
            trainee.faulty |= answer.failed and kind == "forward_backward"
            if answer.failed and kind == "optim_step":
                bench.drop(trainee)
            trainee.cost_s += time.monotonic() - begun
            is_long = kind == "optim_step" and trainee.cost_s >= SNAPSHOT_S
            if is_long or (kind == "load_weights" and not answer.failed):
                # None of the requests until now is done again.
                state = self._place(request.owner) / f"state-{request.seq}"
                bench.save(trainee, state)
                trainee.cost_s = 0.0
                update |= {"snapshot": request.seq, "state": str(state)}
        with self.journal.transaction():
            for record in self._records:
                self.journal.put(*record)
            self.journal.finish(request.id, answer, keep=kind in ("forward_backward", "optim_step"))
            if (model := self.journal.get(Model, request.owner)) is not None:
                self.journal.put(replace(model, **update), model.id, model.session)
            if "snapshot" in update:
                self.journal.trim(request.owner, request.seq)
        if "snapshot" in update or kind in SEGMENTS:
            self._collect(request.owner)

    def _sweep(self) -> None:
        """Drop old answers, expired checkpoints, and versions of ended sessions."""
        self._sweep_at = time.monotonic() + SWEEP_S
        self.journal.purge()
        now, silent = _stamp(0), time.time() - ABANDONED_S
        for path, checkpoint in self.journal.all(Checkpoint).items():
            if checkpoint.expires and checkpoint.expires < now:
                self.journal.drop(Checkpoint, path)
        for name, session in self.journal.all(SessionRecord).items():
            if session.finished or max(session.at, self._began) < silent:
                self.journal.end(name)
        for model_id in self.journal.all(Model):
            self._collect(model_id)
        known = {self._place(model_id) for model_id in self.journal.all(Model)}
        for place in set((self.folder / "models").glob("*")) - known:
            shutil.rmtree(place, ignore_errors=True)  # of a model that is gone, or was never made

    def _collect(self, model_id: str) -> None:
        """Delete a model's files that nothing needs; once its session has ended, the model too.

        Checkpoints stay, with the model that they are listed under.
        """
        if (model := self.journal.get(Model, model_id)) is None:
            return
        place = self._place(model_id)
        checkpoints = self.journal.all(Checkpoint, model_id).values()
        needed = {checkpoint.weights.folder for checkpoint in checkpoints}
        if self.journal.get(SessionRecord, model.session) is None:
            self._trainees.pop(model_id, None)
            if not needed:
                self.journal.drop(Model, model_id)
        else:
            needed.add(model.state)
            unnamed = {str(folder) for folder in place.glob("sampler_weights-*")} - needed
            newest = sorted(unnamed, key=lambda folder: int(folder.rpartition("-")[2]))
            needed |= {*newest[-(UNNAMED if model.rank else UNNAMED_WHOLE) :]}
        for folder in place.glob("*"):
            if str(folder) not in needed:
                shutil.rmtree(folder, ignore_errors=True)

    # -- what a request does; its answer is returned ----------------------------------------------

    def _create(self, request: FutureRequest) -> FutureAnswer:
        body = read(request.body, wire.CreateModel)
        self.check_base(body.base_model)
        lora, name = body.lora_config or wire.Lora(0), request.owner
        seed = zlib.crc32(name.encode()) if lora.seed is None else lora.seed
        session = wire.session_of(name)
        self._begin(Model(name, session, lora.rank, seed, time.time(), body.user_metadata))
        return FutureAnswer.json({"model_id": name, "type": "create_model"})

    def _begin(self, model: Model, source: str = "", *, optimizer: bool = True) -> None:
        bench = self._bench(model.rank)
        self._trainees[model.id] = bench, bench.begin(model, source, optimizer=optimizer)
        self._records.append((model, model.id, model.session))

    def _load(self, request: FutureRequest) -> FutureAnswer:
        body = read(request.body, wire.LoadWeights)
        saved = self.journal.get(Checkpoint, body.path)
        if saved is None or saved.kind != "save_weights":
            raise UsageError(
                f"{body.path} is no training checkpoint of this server: save_state makes them"
            )
        self.check_base(body.base_model or self.base_model)
        weights, name = saved.weights, request.owner
        if request.seq:
            bench, trainee = self._trainee(name)
            bench.load(trainee, weights.folder, optimizer=body.optimizer)
        else:
            session, metadata = wire.session_of(name), body.user_metadata
            model = Model(name, session, weights.rank, 0, time.time(), metadata)
            self._begin(model, weights.folder, optimizer=body.optimizer)
        return FutureAnswer.json({"path": body.path, "model_id": name, "type": "load_weights"})

    def _pass(self, request: FutureRequest) -> FutureAnswer:
        bench, trainee = self._trainee(request.owner)
        outputs = bench.run_pass(trainee, wire.read_pass(request.body))
        return FutureAnswer(wire.write_outputs(*outputs), wire.PROTOBUF)

    def _step(self, request: FutureRequest) -> FutureAnswer:
        bench, trainee = self._trainee(request.owner)
        norm = bench.step(trainee, read(request.body, wire.OptimStep).adam_params)
        return FutureAnswer.json({"metrics": {"grad_norm:mean": norm}})

    def _save(self, request: FutureRequest) -> FutureAnswer:
        body = read(request.body, wire.SaveWeights)
        model_id, kind, segment = request.owner, request.kind, SEGMENTS[request.kind]
        if body.kind != "snapshot":
            raise UsageError(f"sampling clients of kind {body.kind!r} are not supported")
        bench, trainee = self._trainee(model_id)
        number = body.sampling_session_seq_id if kind == "save_weights_for_sampler" else None
        path = f"tinker://{model_id}/{segment}/{body.name}"
        if number is None and not body.overwrite and self.journal.get(Checkpoint, path):
            raise UsageError(f"{path} exists: choose another name, or overwrite=True")
        # Numbers of requests are used once, so none is ever written over another.
        folder = self._place(model_id) / f"{segment}-{request.seq}"
        checksum = ""
        if kind == "save_weights":
            bench.save(trainee, folder)
        elif kind == "save_weights_external":
            bench.export(trainee, folder, self.base_model)
        else:
            checksum = bench.publish(trainee, folder)
        weights = wire.Weights(bench.rank, str(folder), checksum)
        if number is not None:
            session = wire.session_of(model_id)
            sampler = wire.sampler_name(session, number)
            self._records.append((SamplerRecord(weights), sampler, session))
            return FutureAnswer.json({"sampling_session_id": sampler, "type": kind})
        size = sum((folder / name).stat().st_size for name in files_in(folder))
        expires = _stamp(body.ttl_seconds) if body.ttl_seconds else None
        checkpoint = Checkpoint(weights, kind, size, _stamp(0), expires, body.user_metadata)
        self._records.append((checkpoint, path, model_id))
        return FutureAnswer.json({"path": path, "type": kind})

    def _trainee(self, model_id: str) -> tuple[Bench, Trainee]:
        """Return a model; if need be its newest snapshot, and do the requests after it again."""
        if (pair := self._trainees.get(model_id)) is not None:
            return pair
        if (model := self.journal.get(Model, model_id)) is None:
            raise UsageError(f"there is no model {model_id}")
        begun, bench = time.monotonic(), self._bench(model.rank)
        trainee = bench.begin(model)
        for request in self.journal.past(model_id, model.snapshot):
            match request.kind, request.state:
                case "optim_step", "done":
                    bench.step(trainee, read(request.body, wire.OptimStep).adam_params)
                case "optim_step", _:
                    bench.drop(trainee)
                case _, "done":
                    bench.run_pass(trainee, wire.read_pass(request.body))
                case _:
                    trainee.faulty = True
        trainee.cost_s = time.monotonic() - begun
        self._trainees[model_id] = bench, trainee  # not before it is whole
        return bench, trainee

    def _bench(self, rank: int) -> Bench:
        if rank not in self._benches:
            self._benches[rank] = Bench(self.config, rank)
        return self._benches[rank]

    def _place(self, model_id: str) -> Path:
        return self.folder / "models" / model_id.replace(":", "-")

    def check_base(self, name: str | None) -> None:
        if name != self.base_model:
            raise UsageError(
                f"base_model {name!r} is not served here, {self.base_model!r} is: start the "
                "server with that model, or with --name"
            )


_HANDLERS: dict[str, Callable[[Training, FutureRequest], FutureAnswer]] = {
    "create_model": Training._create,
    "load_weights": Training._load,
    **dict.fromkeys(("forward", "forward_backward"), Training._pass),
    "optim_step": Training._step,
    **dict.fromkeys(SEGMENTS, Training._save),
}


def files_in(folder: Path) -> list[str]:
    """Return the files of a checkpoint, relative to its folder."""
    return sorted(str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file())


def _stamp(later_s: float) -> str:
    return (datetime.now(UTC) + timedelta(seconds=later_s)).isoformat()
