"""An agent's trajectory records the sampled tokens, whatever happens on the way."""

from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import openai
import pytest
import torch
from fakes.agents import WAIT_S, AgentWorld, ask, client, reward, user
from fakes.closeness import assert_same_logprobs
from fakes.fixtures import Closes
from fakes.interrupted import TEMPERATURE, TURNS, teacher_forced
from fakes.rollouts import settings
from fakes.trajectories import sample
from fakes.versions import load, other_weights

from umbra.proto.messages import ReturnedSample
from umbra.proto.records import Sampling, Trajectory, unpack_float32, unpack_int32
from umbra.services.config import EnvironmentConfig
from umbra.services.generator.engines.engine import Engine
from umbra.services.generator.engines.torch_engine import TorchEngine
from umbra.services.generator.runner import RolloutRunner
from umbra.services.modeling.chat import Chat
from umbra.services.modeling.models import load_model

STOPS = [3, *range(6, 101, 5)]  # so many that turns end, of 7, 13 and 10 tokens when greedy
World = Callable[..., AgentWorld]


@pytest.fixture
def world(tokenizer: Any, closes: Closes) -> World:
    """Makes an endpoint over an engine; with `branches`, samples may have so many."""

    def make(
        engine: Engine, temperature: float = TEMPERATURE, branches: int = 1, **options: Any
    ) -> AgentWorld:
        chosen = settings(
            Chat(tokenizer, STOPS),
            sampling=Sampling(temperature=temperature, max_tokens=200),
            max_context=1024,
            branches=branches,
        )
        kind = EnvironmentConfig(kind="agent", branches="train" if branches > 1 else "refuse")
        return closes(AgentWorld(engine, chosen, kind, **options))

    return make


def engine_of(model: Any, version: int) -> TorchEngine:
    options: Any = {"stop_ids": STOPS, "slots": 2, "max_context": 1024, "seed": 5}
    return TorchEngine(model, **options, version=version)


def test_each_line_has_the_tokens_and_logprobs_of_the_version_that_each_span_names(
    world: World, tiny_model_dir: Path, tokenizer: Any
) -> None:
    """New weights come within turns and between; the agent edits and compacts its history."""
    first = load_model(tiny_model_dir, torch.device("cpu"), torch.float32)
    models = {0: first, **{version: other_weights(first, version) for version in (1, 2, 3, 4)}}
    engine = engine_of(load_model(tiny_model_dir, torch.device("cpu"), torch.float32), 0)
    due = [(3, 1), (11, 2), (12, 3), (40, 4)]  # (after so many tokens, version)

    def update(runner: RolloutRunner) -> None:
        if due and engine.decoded_tokens >= due[0][0]:
            _, version = due.pop(0)
            load(engine, models[version].named_parameters(), version, "recompute")

    endpoint = world(engine, branches=8, between=update)
    work = endpoint.begin("talk")
    told: list[tuple[float, ...]] = []  # logprobs of each turn, as the client saw them
    fingerprints: list[str | None] = []

    def say(agent: openai.OpenAI, messages: list[Any]) -> Any:
        completion = agent.chat.completions.create(
            model="m", messages=messages, logprobs=True, temperature=TEMPERATURE
        )
        (choice,) = completion.choices
        assert choice.logprobs is not None
        told.append(tuple(token.logprob for token in choice.logprobs.content or []))
        fingerprints.append(completion.system_fingerprint)
        return choice.message

    with client(work) as agent:
        messages: list[Any] = [user("talk")]
        for turn in range(3):
            messages += [say(agent, messages), user(f"go {turn}")]
        edited = [*messages[:2], user("rather this")]  # behind the first turn
        edited += [say(agent, edited), user("and that")]
        say(agent, edited)
        compact = [user("talk"), user("much was said"), user("now end")]
        say(agent, compact)
        messages.append(say(agent, messages))  # the first history goes on after all
    assert reward(work, 0.5) == 200
    made = endpoint.trajectory()
    assert (made.reward, made.turns, len(made.lines)) == (0.5, 7, 3)
    assert not due
    assert [span.version for span in made.spans[:4]] == [0, 1, 2, 3]
    heard = [{0, 1, 2, 6}, {0, 3, 4}, {5}]  # turns of each line
    for line, own in zip(made.lines, heard, strict=True):
        prompt, tokens = unpack_int32(line.prompt_ids), unpack_int32(line.response_ids)
        assert [s.start for s in line.spans] == [0, *(s.end for s in line.spans[:-1])]
        assert line.spans[-1].end == len(tokens)
        mask = torch.tensor(list(line.loss_mask)).bool()
        got = torch.tensor(unpack_float32(line.logprobs))
        expected = torch.cat(
            [teacher_forced(models[s.version], prompt, tokens)[s.start : s.end] for s in line.spans]
        )
        assert_same_logprobs(got[mask], expected[mask], first)
        seen = [value for turn in sorted(own) for value in told[turn]]
        assert torch.equal(got[mask], torch.tensor(seen))
    assert made.newest_version == 4 and fingerprints[-1] == "version-4"
    assert made.lines[1].prompt_ids == made.lines[0].prompt_ids
    shared = len(told[0])
    assert made.lines[1].response_ids[: 4 * shared] == made.response_ids[: 4 * shared]
    # Whoever had tokenised the messages again would have trained on other tokens.
    history = [m if isinstance(m, dict) else m.model_dump() for m in messages]
    again = tokenizer(
        tokenizer.apply_chat_template(history, tokenize=False), add_special_tokens=False
    )["input_ids"]
    assert again != [*unpack_int32(made.prompt_ids), *unpack_int32(made.response_ids)]


class Interruption:
    """Takes all samples back once the engine has decoded `cut` more tokens."""

    def __init__(self, engine: Engine, cut: int) -> None:
        self.begun, self.over = False, Event()
        self.returned: list[ReturnedSample] = []
        self._engine, self._until = engine, engine.decoded_tokens + cut

    def __call__(self, runner: RolloutRunner) -> None:
        if not self.begun and self._engine.decoded_tokens >= self._until:
            self.begun = True
            self.returned = runner.drain("next")
            self.over.set()


def converse(endpoint: AgentWorld, hint: str) -> bool:
    """An agent that says `hint` after each turn; whether it came to its end."""
    work = endpoint.lease()
    messages = [user(work["row"]["prompt"])]
    for turn in range(TURNS):
        status, said = ask(work, *messages)
        if status == 410:
            return False
        assert status == 200, said
        messages += [said["choices"][0]["message"], user(f"{hint} {turn}")]
    return reward(work, float(len(messages))) == 200


def play(world: World, model: Any, cuts: list[int], *hints: str) -> Trajectory:
    """The greedy trajectory of an agent that the next generator goes on with after each cut.

    At each attempt it says another of `hints`, the last from then on.
    """
    partial = None
    for attempt, cut in enumerate([*cuts, 10_000], start=1):
        engine = engine_of(model, attempt)
        interruption = Interruption(engine, cut)
        endpoint = world(engine, 0.0, between=interruption)
        endpoint.add(sample({"prompt": "talk"}, attempt=attempt, trajectory=partial))
        hint = hints[min(attempt, len(hints)) - 1]
        done = False
        while not interruption.begun and not done:  # a sample that restarts has another session
            done = converse(endpoint, hint)
        if done:
            return endpoint.trajectory()
        assert interruption.over.wait(WAIT_S)
        endpoint.close()
        partial = interruption.returned[0].partial
    raise AssertionError("it does not end")


@pytest.mark.parametrize("cuts", [[9], [4, 8, 6]])
def test_a_sample_goes_on_token_for_token_on_another_generator(
    model: Any, world: World, cuts: list[int]
) -> None:
    whole = play(world, model, [], "go")
    pieces = play(world, model, cuts, "go")
    assert len(pieces.spans) == len(cuts) + 1
    for name in ("prompt_ids", "response_ids", "loss_mask", "reward", "turns"):
        assert getattr(pieces, name) == getattr(whole, name), name


def test_an_agent_that_does_not_do_the_same_again_begins_anew(model: Any, world: World) -> None:
    whole = play(world, model, [], "go")
    again = play(world, model, [9], "come", "go")
    assert [span.version for span in again.spans] == [2]
    assert (again.response_ids, again.reward) == (whole.response_ids, whole.reward)
