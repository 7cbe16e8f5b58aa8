"""The Tinker API by the client of its SDK, beside a loop that is written against Transformers."""

import gc
import json
import os
import signal
import sqlite3
import subprocess
import sys
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.slowness import until
from safetensors.torch import load_file
from torch import Tensor

tinker = pytest.importorskip("tinker", reason="the SDK of the Tinker API is not installed")
from tinker import types  # noqa: E402

from umbra.services.tinker.training import UNNAMED  # noqa: E402

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
        url, head = f"{self.url}/api/v1/{route}", {"Content-Type": "application/json"}
        request = urllib.request.Request(url, json.dumps(body).encode(), head)
        try:
            with urllib.request.urlopen(request) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)


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


PROMPT = types.ModelInput.from_ints([10, 20, 30])
TWELVE = types.SamplingParams(max_tokens=12, stop=[])
ROWS = [datum(row) for row in data_of(0, "cross_entropy")]
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


def plain(model: Any) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Train `model` by hand; return logprobs of each step and the weights at the end."""
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
    return curve, parameters


def train(client: Any, step: int) -> list[Any]:
    """One step by the SDK: two passes, whose gradients add up, and an optimizer step."""
    loss = LOSSES[step % len(LOSSES)]
    rows = [datum(row) for row in data_of(step, loss)]
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
        scored = client.compute_logprobs(whole).result()
        assert scored[0] is None
        assert scored[3:] == pytest.approx(sequence.logprobs, abs=1e-4)


def downloaded(server: Server, client: Any, name: str, into: Path) -> Path:
    """Export a client's model and fetch its files."""
    path = client.save_weights_external(name).result().path
    rest = server.client().create_rest_client()
    into.mkdir()
    for file, url in rest.get_external_weights_urls(path).result().urls.items():
        urllib.request.urlretrieve(url, into / file)
    return into


@pytest.mark.parametrize("rank", [4, 0], ids=["adapter", "all weights"])
def test_ten_steps_are_those_of_a_loop_on_transformers(
    server: Server, tiny_model_dir: Path, tmp_path: Path, rank: int
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    client = server.model(3, rank)
    base = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    model: Any = base
    if rank:
        first = downloaded(server, client, "first", tmp_path / "first")
        model = PeftModel.from_pretrained(base, first, is_trainable=True)
    ours = [train(client, step) for step in range(STEPS)]
    curve, _ = plain(model)
    for own, wanted in zip(ours, curve, strict=True):
        for got, expected in zip(own, wanted, strict=True):
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    last = downloaded(server, client, "last", tmp_path / "last")
    if rank:
        found = load_file(last / "adapter_model.safetensors")
        wanted_weights = {k.replace(".default", ""): p for k, p in model.named_parameters()}
    else:
        found = load_file(last / "model.safetensors")
        wanted_weights = dict(model.named_parameters())
    assert found
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, wanted_weights[name].detach(), atol=2e-5, rtol=1e-4)


def test_two_clients_get_what_each_gets_alone(server: Server) -> None:
    alone = server.model(5)
    wanted = [train(alone, step) for step in (0, 1, 2)]
    one, other = server.model(5), server.model(5)
    found: list[list[Any]] = []
    for step in (0, 1, 2):
        noise = other.forward_backward([datum(r) for r in data_of(7, "ppo")], "ppo")
        found.append(train(one, step))
        noise.result()
        other.optim_step(types.AdamParams(learning_rate=0.1)).result()
    for own, expected in zip(found, wanted, strict=True):
        for got, same in zip(own, expected, strict=True):
            assert torch.equal(got, same)


def test_samples_are_of_the_version_that_was_pinned(server: Server) -> None:
    service = server.client()
    client = service.create_lora_training_client(NAME, rank=4, seed=1).result()
    samplers = [client.save_weights_and_get_sampling_client().result()]
    for _ in range(2):
        train(client, 0)
        samplers.append(client.save_weights_and_get_sampling_client().result())
    state = client.save_state("here").result().path
    twin = service.create_training_client_from_state_with_optimizer(state).result()
    # All are asked for at once, the oldest last.
    futures = [(one, one.sample(PROMPT, 3, TWELVE)) for one in reversed(samplers)]
    seen: list[list[float]] = []
    for sampler, future in futures:
        check_samples(sampler, future.result())
        seen.append(sampler.compute_logprobs(PROMPT).result()[1:])
    assert seen[0] != pytest.approx(seen[1], abs=1e-3) != pytest.approx(seen[2], abs=1e-3)
    # The newest is what the trainer has, and so is a model that begins with its checkpoint.
    row = {"ids": [10, 20], "target_tokens": [20, 30], "weights": [1.0, 1.0]}
    for trained in (client, twin):
        forward = trained.forward([datum(row)], "cross_entropy").result()
        assert forward.loss_fn_outputs[0]["logprobs"].tolist() == pytest.approx(seen[0], abs=1e-4)
    for got, same in zip(train(client, 3), train(twin, 3), strict=True):
        assert torch.equal(got, same)
    text = service.create_sampling_client(base_model=NAME).result()
    ended = text.sample(PROMPT, 8, types.SamplingParams(max_tokens=64, stop=["e", "a"])).result()
    assert {one.stop_reason for one in ended.sequences} <= {"stop", "length"}


@pytest.mark.parametrize("rank", [4, 0], ids=["adapter", "all weights"])
def test_vllm_samples_of_the_version_that_was_pinned(
    vllm_model_dir: Path, tmp_path: Path, rank: int
) -> None:
    pytest.importorskip("vllm", reason='vLLM is not installed (pip install "umbra-rl[vllm]")')
    with closing(Server(vllm_model_dir, tmp_path / "vllm", engine="vllm")) as own:
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
        stops: list[Any] = [[70, 74], ["a", "e"]]
        ends = [{70, 74}, {token for word, token in known if "a" in word or "e" in word}]
        futures = [
            one.sample(PROMPT, 6, types.SamplingParams(max_tokens=40, stop=stop))
            for one, stop in zip(samplers, stops, strict=True)
        ]
        pairs = (first, trained), (trained, first)
        for (client, other), future, stop in zip(pairs, futures, ends, strict=True):
            found: dict[str, list[float]] = {"own": [], "same": [], "different": []}
            for sequence in future.result().sequences:
                ids = [10, 20, 30, *sequence.tokens]
                row = {"ids": ids[:-1], "target_tokens": ids[1:], "weights": [1.0] * len(ids[1:])}
                for name, one in (("same", client), ("different", other)):
                    scored = one.forward([datum(row)], "cross_entropy").result()
                    found[name] += scored.loss_fn_outputs[0]["logprobs"].tolist()[2:]
                found["own"] += sequence.logprobs
                is_stop = [token in stop for token in sequence.tokens]
                assert not any(is_stop[:-1])
                assert sequence.stop_reason == ("stop" if is_stop[-1] else "length")
            assert found["same"] == pytest.approx(found["own"], abs=1e-4)
            assert found["different"] != pytest.approx(found["own"], abs=1e-3)
        with pytest.raises(Exception, match="no logprobs of prompts"):
            samplers[0].compute_logprobs(PROMPT).result()


def test_a_custom_loss_is_its_own_gradient(server: Server) -> None:
    clients = [server.model(2) for _ in "ab"]
    rows = [datum(row) for row in data_of(1, "cross_entropy")]

    def loss(data: list[Any], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        weights = [one.loss_fn_inputs["weights"].to_torch() for one in data]
        return -sum((p * w).sum() for p, w in zip(logprobs, weights, strict=True)), {}  # type: ignore[return-value]

    clients[0].forward_backward_custom(rows, loss).result()
    clients[1].forward_backward(rows, "cross_entropy").result()
    steps = [client.optim_step(types.AdamParams()).result().metrics for client in clients]
    assert steps[0]["grad_norm:mean"] == pytest.approx(steps[1]["grad_norm:mean"], rel=1e-5)


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
    client.forward_backward([datum(r) for r in data_of(0, "ppo")], "ppo").result()
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
    rows = [datum(row) for row in data_of(0, "ppo")]
    refusals: list[tuple[Callable[[], Any], str]] = [
        (lambda: service.create_lora_training_client("other/model").result(), "not served here"),
        (lambda: service.create_sampling_client(base_model="other/model").result(), "not served"),
        (
            lambda: service.create_lora_training_client(NAME, 4, train_mlp=False).result(),
            "on all layers here",
        ),
        (lambda: client.forward_backward(rows, "gspo").result(), "not supported"),
        (lambda: client.forward_backward(rows, "dro").result(), "beta"),
        (lambda: client.forward_backward(rows, "ppo", {"clip": 1.0}).result(), "no setting"),
        (lambda: client.forward_backward(rows, "cross_entropy").result(), "weights"),
        (lambda: client.optim_step(types.AdamParams()).result(), "a pass since the last"),
        (lambda: client.save_state("a/b").result(), "checkpoint name"),
        (lambda: client.create_sampling_client("tinker://x/weights/y").result(), "no checkpoint"),
    ]
    for call, why in refusals:
        with pytest.raises(Exception, match=why):
            call()
    sampler = service.create_sampling_client(base_model=NAME).result()
    prompt = types.ModelInput.from_ints([10])
    with pytest.raises(Exception, match="seed is not supported"):
        sampler.sample(prompt, 1, types.SamplingParams(seed=1)).result()
    with pytest.raises(Exception, match="topk_prompt_logprobs"):
        sampler.sample(prompt, 1, types.SamplingParams(), topk_prompt_logprobs=2).result()
    assert "pip install" in server.post("client/config", {"sdk_version": "0.19.0"})[1]["detail"]
    assert server.post("copy_weights", {})[0] == 404
    new = {"model_id": client.model_id, "seq_id": 99, "adam_params": {}, "from_tomorrow": 1}
    assert server.post("optim_step", new)[0] == 200  # its future fails, once it is its turn


def test_an_address_of_others_needs_a_key(tiny_model_dir: Path, tmp_path: Path) -> None:
    program = [sys.executable, "-m", "umbra", "tinker", str(tiny_model_dir), "--bind", "0.0.0.0:0"]
    done = subprocess.run(
        [*program, "--dir", str(tmp_path)],
        capture_output=True,
        text=True,
        env={key: value for key, value in os.environ.items() if key != "UMBRA_TINKER_KEY"},
    )
    assert done.returncode == 2 and "UMBRA_TINKER_KEY" in done.stderr
