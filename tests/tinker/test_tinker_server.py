"""The Tinker API by the client of its SDK, beside a loop that is written against Transformers."""

import asyncio
import gc
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from click.testing import CliRunner
from fakes.slowness import until
from safetensors.torch import load_file
from torch import Tensor

tinker = pytest.importorskip("tinker", reason="the SDK of the Tinker API is not installed")
from tinker import types  # noqa: E402

from umbra.proto.errors import UsageError  # noqa: E402
from umbra.proto.records import Sampling  # noqa: E402
from umbra.services.config import RunConfig  # noqa: E402
from umbra.services.process.pipe import AsyncPipe  # noqa: E402
from umbra.services.tinker import sampler_process as process  # noqa: E402
from umbra.services.tinker.command import command  # noqa: E402
from umbra.services.tinker.journal import FutureAnswer, FuturesJournal  # noqa: E402
from umbra.services.tinker.sampler import _LiveJob  # noqa: E402
from umbra.services.tinker.sampler_process import SampleJob, SampleReport, SamplerStart  # noqa: E402
from umbra.services.tinker.training import UNNAMED  # noqa: E402
from umbra.services.tinker.wire import Weights, write_samples  # noqa: E402

# The SDK leaves event loops and their sockets to the end of the process.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:DEPRECATED:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings:UserWarning"),
    pytest.mark.timeout(240),
]
NAME = "tiny/model"
STEPS = 10
ADAM = [dict(learning_rate=1e-3 * (1 + k % 3), beta2=0.95 + 0.01 * (k % 2)) for k in range(STEPS)]


class Server:
    """`umbra tinker` as a process, which can be killed and started again at its address."""

    def __init__(self, model: Path, folder: Path, engine: str = "torch") -> None:
        self._model, self.folder = model, folder
        self._flags = f"--device cpu --context 128 --engine {engine} "
        self._flags += f"--name {NAME} --dir {folder} --bind "
        self._address = "127.0.0.1:0"
        self._clients: list[Any] = []
        self.start()

    def start(self) -> None:
        read, write = os.pipe()
        words = (self._flags + self._address).split()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "umbra", "tinker", str(self._model), *words],
            env={**os.environ, "UMBRA_READY_FD": str(write), "OMP_NUM_THREADS": "1"},
            pass_fds=[write],
        )
        os.close(write)
        with os.fdopen(read) as ready:
            self.url = json.loads(ready.readline())["url"]
        self._address = self.url.removeprefix("http://")

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def sampler(self) -> int:
        """Return its pid, once it is there."""
        pid = self._process.pid
        found: list[str] = []
        while not found:
            found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(found[0])

    def samples(self) -> dict[str, int]:
        """Return how many accepted requests for samples are in each state."""
        with closing(sqlite3.connect(self.folder / "journal.sqlite")) as journal:
            query = "SELECT state, count(*) FROM requests WHERE kind = 'asample' GROUP BY state"
            return dict(journal.execute(query).fetchall())

    def end(self, service: Any) -> None:
        """Close a client and with it its session."""
        self._clients.remove(service)
        service.close("success").result()

    def close(self) -> None:
        while self._clients:
            self.end(self._clients[-1])
        self.kill()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the SDK leaves its first connection open
            gc.collect()

    def client(self) -> Any:
        self._clients.append(tinker.ServiceClient(base_url=self.url, api_key="tml-any"))
        return self._clients[-1]

    def model(self, seed: int | None = None, rank: int = 4) -> Any:
        """Return a model of a client of its own."""
        return self.client().create_lora_training_client(NAME, rank=rank, seed=seed).result()

    def post(self, route: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        answer = httpx.post(f"{self.url}/api/v1/{route}", json=body, timeout=60.0)
        return answer.status_code, answer.json()


@pytest.fixture(scope="module")
def server(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with closing(Server(tiny_model_dir, tmp_path_factory.mktemp("tinker"))) as server:
        yield server


def data_of(step: int, loss: str) -> list[dict[str, list[Any]]]:
    """Three sequences of a step, some targets other than the next tokens, and their inputs."""
    draw = torch.Generator().manual_seed(step)
    made: list[dict[str, list[Any]]] = []
    for length in (9, 5, 14):
        ids = torch.randint(5, 90, (length + 1,), generator=draw).tolist()
        values = torch.randn(length, generator=draw)
        row = {"ids": ids[:-1], "target_tokens": [7, *ids[2:]]}
        if loss == "cross_entropy":
            row["weights"] = values.abs().tolist()
        else:
            row |= {"advantages": values.tolist(), "logprobs": (values - 4.4).tolist()}
        made.append(row)
    return made


def datum(row: dict[str, list[Any]]) -> Any:
    inputs: Any = {key: value for key, value in row.items() if key != "ids"}
    return types.Datum(model_input=types.ModelInput.from_ints(row["ids"]), loss_fn_inputs=inputs)


def data(step: int, loss: str) -> list[Any]:
    return [datum(row) for row in data_of(step, loss)]


def scored(client: Any, ids: list[int]) -> list[float]:
    """Logprobs of `ids` but for the first, by what `client` trains."""
    row = {"ids": ids[:-1], "target_tokens": ids[1:], "weights": [1.0] * len(ids[1:])}
    found = client.forward([datum(row)], "cross_entropy").result()
    return found.loss_fn_outputs[0]["logprobs"].tolist()


PROMPT = types.ModelInput.from_ints([10, 20, 30])
TWELVE = types.SamplingParams(max_tokens=12, stop=[])
ROWS = data(0, "cross_entropy")
ADAM_PARAMS = types.AdamParams(learning_rate=1e-2)
SETTINGS: dict[str, dict[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
    "cispo": {},
    "dro": {"beta": 0.05},
}
LOSSES = tuple(SETTINGS)


def plain_loss(loss: str, p: Tensor, row: dict[str, list[Any]]) -> Tensor:
    """The formulas of the API's documentation."""
    if loss == "cross_entropy":
        return -(p * torch.tensor(row["weights"])).sum()
    q, a = torch.tensor(row["logprobs"]), torch.tensor(row["advantages"])
    ratio = torch.exp(p - q)
    match loss:
        case "importance_sampling":
            return -(ratio * a).sum()
        case "ppo":
            return -torch.min(ratio * a, torch.clamp(ratio, 0.9, 1.1) * a).sum()
        case "cispo":
            return -(torch.clamp(ratio, 0.0, 4.0).detach() * p * a).sum()
        case _:
            return -(p * a - 0.5 * 0.05 * (p - q) ** 2).sum()


def plain(model: Any) -> list[list[Tensor]]:
    """Train `model` by hand; return logprobs of each step."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1.0, eps=1e-8, weight_decay=0.0)
    curve: list[list[Tensor]] = []
    for step in range(STEPS):
        loss, curve_here = LOSSES[step % len(LOSSES)], []
        for row in data_of(step, loss):
            logits = model(torch.tensor([row["ids"]])).logits[0].float()
            p = logits.log_softmax(-1).gather(-1, torch.tensor(row["target_tokens"])[:, None])[:, 0]
            plain_loss(loss, p, row).backward()
            curve_here.append(p.detach())
        curve.append(curve_here)
        adam = ADAM[step]
        optimizer.param_groups[0].update(lr=adam["learning_rate"], betas=(0.9, adam["beta2"]))
        torch.nn.utils.clip_grad_norm_(parameters, 5.0)
        optimizer.step()
        optimizer.zero_grad()
    return curve


def train(client: Any, step: int) -> list[Any]:
    """One step by the SDK: two passes, whose gradients add up, and an optimizer step."""
    loss = LOSSES[step % len(LOSSES)]
    rows = data(step, loss)
    passes = [client.forward_backward(part, loss, SETTINGS[loss]) for part in (rows[:2], rows[2:])]
    adam = types.AdamParams(eps=1e-8, grad_clip_norm=5.0, **ADAM[step])
    done = client.optim_step(adam)
    outputs = [output for one in passes for output in one.result().loss_fn_outputs]
    done.result()
    return [output["logprobs"].to_torch() for output in outputs]


def check_samples(client: Any, response: Any) -> None:
    """Assert that three samples have the logprobs of the version that `client` has pinned."""
    assert len(response.sequences) == 3
    for sequence in response.sequences:
        assert sequence.stop_reason == "length" and len(sequence.tokens) == 12
        whole = types.ModelInput.from_ints([10, 20, 30, *sequence.tokens])
        prompted = client.compute_logprobs(whole).result()
        assert prompted[0] is None
        assert prompted[3:] == pytest.approx(sequence.logprobs, abs=1e-4)


def downloaded(server: Server, client: Any, name: str, into: Path) -> Path:
    """Export a client's model and fetch its files."""
    path = client.save_weights_external(name).result().path
    rest = server.client().create_rest_client()
    into.mkdir()
    for file, url in rest.get_external_weights_urls(path).result().urls.items():
        urllib.request.urlretrieve(url, into / file)
    return into


@pytest.mark.parametrize("rank", [4, 0], ids=["adapter", "all weights"])
def test_ten_steps_beside_another_client_are_those_of_a_loop_on_transformers(
    server: Server, tiny_model_dir: Path, tmp_path: Path, rank: int
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    client, other = server.model(3, rank), server.model(5, rank)
    base = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    model: Any = base
    if rank:
        first = downloaded(server, client, "first", tmp_path / "first")
        model = PeftModel.from_pretrained(base, first, is_trainable=True)
    ours: list[list[Any]] = []
    for step in range(STEPS):
        noise = other.forward_backward(data(7, "ppo"), "ppo")
        ours.append(train(client, step))
        noise.result()
        other.optim_step(types.AdamParams(learning_rate=0.1)).result()
    torch.testing.assert_close(ours, plain(model), atol=1e-4, rtol=0)
    last = downloaded(server, client, "last", tmp_path / "last")
    found = load_file(last / ("adapter_model.safetensors" if rank else "model.safetensors"))
    named = {name.replace(".default", ""): p.detach() for name, p in model.named_parameters()}
    wanted = {name: named[name] for name in found}
    assert found
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("engine", "rank"), [("torch", 4), ("vllm", 4), ("vllm", 0)])
def test_samples_are_of_the_version_that_was_pinned(
    server: Server, vllm_model_dir: Path, tmp_path: Path, engine: str, rank: int
) -> None:
    """Logprobs equal the pinned version's by its trainer, and stops end a sample."""
    own_server: Any = nullcontext(server)
    if engine == "vllm":
        pytest.importorskip("vllm", reason='vLLM is not installed (pip install "umbra-rl[vllm]")')
        own_server = closing(Server(vllm_model_dir, tmp_path / "vllm", engine))
    with own_server as own:
        service = own.client()
        first, trained = (
            service.create_lora_training_client(NAME, rank=rank, seed=1).result() for _ in "ab"
        )
        samplers = [trained.save_weights_and_get_sampling_client().result()]
        for _ in range(2):
            train(trained, 0)
        samplers.append(trained.save_weights_and_get_sampling_client().result())
        text = json.loads((vllm_model_dir / "tokenizer.json").read_text())
        known = text["model"]["vocab"].items()
        letters = {token for word, token in known if "a" in word or "e" in word}
        # All are asked for at once, the oldest last.
        cases: list[Any] = [
            (samplers[1], (trained, first), ["a", "e"], letters),
            (samplers[0], (first, trained), [70, 74], {70, 74}),
        ]
        futures = [
            sampler.sample(PROMPT, 6, types.SamplingParams(max_tokens=40, stop=stop))
            for sampler, _, stop, _ in cases
        ]
        for future, (_, clients, _, ends) in zip(futures, cases, strict=True):
            sampled, found = list[float](), ([], [])
            for sequence in future.result().sequences:
                ids = [10, 20, 30, *sequence.tokens]
                for client, logprobs in zip(clients, found, strict=True):
                    logprobs.extend(scored(client, ids)[2:])
                sampled += sequence.logprobs
                is_stop = [token in ends for token in sequence.tokens]
                assert not any(is_stop[:-1])
                assert sequence.stop_reason == ("stop" if is_stop[-1] else "length")
            assert found[0] == pytest.approx(sampled, abs=1e-4)
            assert found[1] != pytest.approx(sampled, abs=1e-3)
        if engine == "vllm":
            with pytest.raises(Exception, match="no logprobs of prompts"):
                samplers[0].compute_logprobs(PROMPT).result()
            return
        # A model that begins with its checkpoint goes on as the trained one.
        state = trained.save_state("here").result().path
        twin = service.create_training_client_from_state_with_optimizer(state).result()
        prompted = samplers[1].compute_logprobs(PROMPT).result()
        assert scored(twin, [10, 20, 30]) == pytest.approx(prompted[1:], abs=1e-4)
        torch.testing.assert_close(train(trained, 3), train(twin, 3), atol=0, rtol=0)


SPARED = ("pass", "third pass", "second step", "end")  # the same calls are killed once
# Each gets a client of the service and the results of the calls before.
CALLS: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "model": lambda service, _: service.create_lora_training_client(NAME, rank=4, seed=9),
    "pass": lambda _, made: made["model"].forward_backward(ROWS, "cross_entropy"),
    "second pass": lambda _, made: made["model"].forward_backward(ROWS[:1], "cross_entropy"),
    "step": lambda _, made: made["model"].optim_step(ADAM_PARAMS),
    "state": lambda _, made: made["model"].save_state("kept"),
    "export": lambda _, made: made["model"].save_weights_external("kept"),
    "sampler": lambda _, made: made["model"].save_weights_for_sampler("kept"),
    "unnamed": lambda _, made: made["model"].save_weights_and_get_sampling_client(),
    "samples": lambda _, made: made["unnamed"].sample(PROMPT, 3, TWELVE),
    "third pass": lambda _, made: made["model"].forward_backward(ROWS[1:], "cross_entropy"),
    "second step": lambda _, made: made["model"].optim_step(ADAM_PARAMS),
    "end": lambda _, made: made["model"].save_state("end"),
}


@pytest.mark.fault
@pytest.mark.timeout(900)
def test_a_killed_server_goes_on_at_each_call(
    server: Server, tiny_model_dir: Path, tmp_path: Path
) -> None:
    with closing(Server(tiny_model_dir, tmp_path / "killed")) as own:
        services = [server.client(), own.client()]
        made: list[dict[str, Any]] = [{}, {}]
        for name, call in CALLS.items():
            future = call(services[1], made[1])
            if name not in SPARED:
                own.kill()  # before it is accepted, while it is done, or after
                own.start()
            made[1][name] = future.result()
            made[0][name] = call(services[0], made[0]).result()
        for found in made:
            check_samples(found["unnamed"], found["samples"])
        twins = [
            service.create_training_client_from_state_with_optimizer(found["end"].path).result()
            for service, found in zip(services, made, strict=True)
        ]
        rest = own.client().create_rest_client()
        rest.delete_checkpoint_from_tinker_path(made[1]["end"].path).result()
        own.kill()  # it goes on from the state that the model began with
        own.start()
        for client in twins:
            client.forward_backward(ROWS, "cross_entropy").result()
            client.optim_step(ADAM_PARAMS).result()
        found = [client.forward(ROWS, "cross_entropy").result() for client in twins]
        for one, other in zip(*(output.loss_fn_outputs for output in found), strict=True):
            assert one["logprobs"].tolist() == other["logprobs"].tolist()


@pytest.mark.fault
@pytest.mark.parametrize("killed", ["sampler", "server"])
def test_samples_are_answered_when_a_process_dies_that_has_them(
    tiny_model_dir: Path, tmp_path: Path, killed: str
) -> None:
    with closing(Server(tiny_model_dir, tmp_path / "killed")) as own:
        client = own.model(9)
        train(client, 0)
        sampler = client.save_weights_and_get_sampling_client().result()
        before = own.sampler()
        os.kill(before, signal.SIGSTOP)  # so that it has its requests for ever
        futures = [sampler.sample(PROMPT, 3, TWELVE) for _ in range(4)]
        until(lambda: own.samples() == {"queued": 4}, "all are accepted")
        if killed == "server":
            own.kill()
        os.kill(before, signal.SIGKILL)
        if killed == "server":
            own.start()
        for future in futures:
            check_samples(sampler, future.result())
        assert own.samples().keys() == {"done"} and before != own.sampler()


def test_weights_that_are_not_finite_harm_nobody_else(server: Server) -> None:
    good, bad = server.model(), server.model()
    bad.forward_backward(ROWS, "cross_entropy").result()
    bad.optim_step(types.AdamParams(learning_rate=1e30)).result()
    broken = bad.save_weights_and_get_sampling_client().result()
    future = broken.sample(PROMPT, 3, TWELVE)
    sampler = good.save_weights_and_get_sampling_client().result()
    check_samples(sampler, sampler.sample(PROMPT, 3, TWELVE).result())
    with pytest.raises(Exception, match="not finite"):
        future.result()


def test_files_are_those_that_something_needs(server: Server) -> None:
    service, rest = server.client(), server.client().create_rest_client()
    client = service.create_lora_training_client(NAME, rank=4).result()
    place = server.folder.resolve() / "models" / client.model_id.replace(":", "-")
    for _ in range(UNNAMED + 2):
        client.save_weights_and_get_sampling_client().result()
    client.save_state("kept").result()
    kept = client.save_state("kept", overwrite=True).result().path
    until(lambda: len(list(place.iterdir())) == UNNAMED + 1, "old ones are removed")
    server.end(service)
    last = [f"weights-{UNNAMED + 4}"]
    until(lambda: [file.name for file in place.iterdir()] == last, "one is kept")
    twin = server.client().create_training_client_from_state(kept).result()
    assert [run.training_run_id for run in rest.list_training_runs(1000).result().training_runs]
    rest.delete_checkpoint_from_tinker_path(kept).result()
    until(lambda: not place.exists(), "nothing needs it")
    assert twin.forward(ROWS, "cross_entropy").result().loss_fn_outputs
    runs = rest.list_training_runs(1000).result().training_runs
    assert client.model_id not in [run.training_run_id for run in runs]


def test_a_repeated_request_is_applied_once(server: Server) -> None:
    client = server.model()
    client.forward_backward(data(0, "ppo"), "ppo").result()
    body = {"model_id": client.model_id, "seq_id": 2, "adam_params": {"learning_rate": 0.1}}
    told = [server.post("optim_step", body) for _ in range(3)]
    assert told[0][0] == 200 and told[0] == told[1] == told[2]
    name = {"request_id": told[0][1]["request_id"]}
    answers = [server.post("retrieve_future", name) for _ in "ab"]
    assert answers[0] == answers[1] and "grad_norm:mean" in answers[0][1]["metrics"]
    status, error = server.post("optim_step", {**body, "adam_params": {}})
    assert status == 400 and "another content" in error["detail"]
    status, error = server.post("optim_step", {**body, "seq_id": 3})
    answer = server.post("retrieve_future", {"request_id": error["request_id"]})[1]
    assert "no pass since the last step" in answer["error"] and answer["category"] == "user"
    body = {"model_id": client.model_id, "seq_id": 4, "kind": "snapshot"}
    told = [
        server.post("save_weights_for_sampler", {**body, "sampling_session_seq_id": number})
        for number in (7, 8)  # as the SDK numbers a second try
    ]
    assert told[0] == told[1] and told[0][0] == 200, told


def test_what_differs_is_refused(server: Server) -> None:
    service = server.client()
    client = service.create_lora_training_client(NAME, rank=4).result()
    rows = data(0, "ppo")
    sampler = service.create_sampling_client(base_model=NAME).result()
    seeded, plain = types.SamplingParams(seed=1), types.SamplingParams()
    new_model = service.create_lora_training_client
    refusals: list[tuple[Callable[[], Any], str]] = [
        (lambda: new_model("other/model"), "not served here"),
        (lambda: new_model(NAME, 4, train_mlp=False), "on all layers here"),
        (lambda: service.create_sampling_client(base_model="other/model"), "not served"),
        (lambda: client.forward_backward(rows, "gspo"), "not supported"),
        (lambda: client.forward_backward(rows, "dro"), "beta"),
        (lambda: client.forward_backward(rows, "ppo", {"clip": 1.0}), "no setting"),
        (lambda: client.forward_backward(rows, "cross_entropy"), "weights"),
        (lambda: client.optim_step(types.AdamParams()), "a pass since the last"),
        (lambda: client.save_state("a/b"), "checkpoint name"),
        (lambda: client.save_state("a", ttl_seconds=10**12), "ttl_seconds"),
        (lambda: client.create_sampling_client("tinker://x/weights/y"), "no checkpoint"),
        (lambda: sampler.sample(PROMPT, 1, seeded), "seed is not supported"),
        (lambda: sampler.sample(PROMPT, 1, plain, topk_prompt_logprobs=2), "topk_prompt_logprobs"),
    ]
    for call, why in refusals:
        with pytest.raises(Exception, match=why):
            call().result()
    assert "pip install" in server.post("client/config", {"sdk_version": "0.19.0"})[1]["detail"]
    assert server.post("copy_weights", {})[0] == 404
    new = {"model_id": client.model_id, "seq_id": 99, "adam_params": {}, "from_tomorrow": 1}
    assert server.post("optim_step", new)[0] == 200  # its future fails, once it is its turn


def test_an_address_of_others_needs_a_key(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UMBRA_TINKER_KEY", raising=False)
    words = [str(tiny_model_dir), "--bind", "0.0.0.0:0", "--dir", str(tmp_path)]
    done = CliRunner().invoke(command, words)
    assert isinstance(done.exception, UsageError) and "UMBRA_TINKER_KEY" in str(done.exception)


# -- requests that a sampler gets, and the journal that keeps requests -----------------------------

ANSWER = FutureAnswer(b"{}")


def job(name: str, count: int = 1) -> SampleJob:
    return SampleJob(name, Weights(4, "v1"), [1], count, Sampling(), 8, None)


class Asked:
    """A process of which only the pipe is there."""

    def __init__(self) -> None:
        self.answers: asyncio.Queue[tuple[str, FutureAnswer]] = asyncio.Queue()
        loop: Any = None
        self.process = process.SamplerProcess(
            RunConfig(), 1, loop, lambda *answer: self.answers.put_nowait(answer)
        )
        self._pipes: list[AsyncPipe[Any]] = []

    async def sampler(self, *wanted: str) -> AsyncPipe[Any]:
        """Let the next sampler join, which gets these requests; its end of the pipe."""
        ours, theirs = socket.socketpair()
        pipe: AsyncPipe[Any] = AsyncPipe(theirs, SamplerStart | SampleJob)
        self._pipes.append(pipe)
        self.process._join(ours, SamplerStart(b"", 0))
        assert isinstance(await pipe.receive(), SamplerStart)
        assert [await pipe.receive() for _ in wanted] == [job(name) for name in wanted]
        return pipe

    async def end(self) -> None:
        """End all samplers; nothing more may have been answered."""
        for pipe in self._pipes:
            pipe.close()
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
        assert self.answers.empty()


def test_the_next_sampler_gets_the_requests_without_an_answer() -> None:
    async def play() -> None:
        asked = Asked()
        for name in "ab":
            asked.process.submit(job(name))
        first = await asked.sampler("a", "b")
        first.send(SampleReport("b", ANSWER))
        assert await asked.answers.get() == ("b", ANSWER)
        asked.process.submit(job("c"))
        second = await asked.sampler("a", "c")
        for pipe in (second, first):  # which is late
            pipe.send(SampleReport("a", ANSWER))
        second.send(SampleReport("c", ANSWER))
        assert {(await asked.answers.get())[0] for _ in "ac"} == {"a", "c"}
        await asked.end()

    asyncio.run(play())


def test_a_request_with_which_samplers_end_fails() -> None:
    async def play() -> None:
        asked = Asked()
        asked.process.submit(job("bad"))
        for _ in range(process.TRIES):
            (await asked.sampler("bad")).close()
        await asked.sampler()
        name, answer = asked.answers.get_nowait()
        assert name == "bad" and answer.failed and b"3 samplers ended" in answer.body
        await asked.end()

    asyncio.run(play())


def test_the_sampler_leaves_the_trainer_its_gpu() -> None:
    cases = {("auto", 0): "auto", ("cuda", 1): "cuda", ("cpu", 4): "cpu", ("auto", 3): "cuda:1"}
    assert {case: process.device_beside(*case) for case in cases} == cases


def test_samples_are_told_in_the_order_of_their_start() -> None:
    """That of their ends would put short ones first."""
    first, second = ([1, 2], [-0.5, -0.5], False), ([3], [-0.25], True)
    live = _LiveJob(job("a", count=2), samples={"a/1": second, "a/0": first})
    assert live.answer().body == write_samples([first, second])


def test_a_journal_of_another_schema_is_refused(tmp_path: Path) -> None:
    for _ in range(2):  # the second finds the first one's schema
        FuturesJournal(tmp_path / "journal").close()
    with closing(sqlite3.connect(tmp_path / "journal")) as file:
        file.execute("PRAGMA user_version = 1")
    with pytest.raises(UsageError, match="has schema 1, not 3: name another --dir"):
        FuturesJournal(tmp_path / "journal")
