"""The thread that trains, around models that only note their requests."""

import json
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from umbra.services.config import RunConfig
from umbra.services.tinker.journal import FutureRequest, FuturesJournal
from umbra.services.tinker.models import Trainee
from umbra.services.tinker.training import Training
from umbra.services.tinker.wire import _PB, SessionRecord

MODEL = "s:train:0"


class Notes:
    """A bench whose models are lists of what was done; `fails` breaks half done, once."""

    rank, fails = 4, ""
    begin = staticmethod(lambda *_, **__: Trainee([], []))  # pyright: ignore[reportUnknownLambdaType]

    def note(self, trainee: Any, what: str) -> Any:
        trainee.data.append(what)
        if what == self.fails:
            self.fails = ""
            raise RuntimeError("no memory")
        return [], {}

    def run_pass(self, trainee: Any, request: Any) -> Any:
        return self.note(trainee, request.loss_fn)

    def step(self, trainee: Any, _: Any) -> Any:
        return self.note(trainee, "step")[1].get("norm")

    def drop(self, trainee: Any) -> None:
        self.note(trainee, "drop")


class Client:
    def __init__(self, journal: FuturesJournal, folder: Path) -> None:
        journal.put(SessionRecord(at=time.time()), "s", "")
        self.bench, self._own, self._number = Notes(), (RunConfig(), folder, "b", journal), 0
        self.start()

    def start(self) -> None:
        self.training: Any = Training(*self._own)
        self.training._benches[4] = self.bench

    def do(self, kind: str, loss: str = "", **body: Any) -> bool:
        number, journal = self._number, self.training.journal
        place = {"model_id": MODEL, "seq_id": number} if number else {}
        data = json.dumps({**place, **body}).encode()
        data = _PB["Request"](loss_fn=loss).SerializeToString() if loss else data
        journal.accept(FutureRequest(f"{MODEL}:{number}", MODEL, number, kind, data))
        self.training._do(journal.next())
        self._number += 1
        return not journal.answer(f"{MODEL}:{number}").failed

    def model(self) -> Any:
        return self.training._trainee(MODEL)[1].data


def test_a_model_is_what_its_requests_have_made_of_it_whatever_fails(tmp_path: Path) -> None:
    new: Any = {"session_id": "s", "model_seq_id": 0, "base_model": "b", "lora_config": {"rank": 4}}
    with closing(FuturesJournal(tmp_path / "journal")) as journal:
        client = Client(journal, tmp_path)
        assert client.do("create_model", **new) and client.do("forward_backward", "a")
        assert not client.do("load_weights", path="tinker://typo", optimizer=True)
        client.start()
        assert client.model() == ["a"], "what it has not stepped by is kept"
        assert client.do("optim_step", adam_params={}) and client.do("forward_backward", "b")
        client.start()
        client.bench.fails = "step"
        assert not client.do("forward", "c")  # the model cannot be brought back
        assert client.do("forward", "c") and client.model() == ["a", "step", "b", "c"]
        client.bench.fails = "step"
        assert not client.do("optim_step", adam_params={})
        assert client.model() == ["a", "step", "b", "drop"], "there is no half step"
