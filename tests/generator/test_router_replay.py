"""Which experts an engine chose travels with its trajectories, and the trainer chooses the same."""

import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from fakes.architectures import ARCHITECTURES
from fakes.policy_rollouts import config
from fakes.trajectories import sample, trajectory
from fakes.versions import finish, load
from fakes.vllm_serve import opened, vllm_config
from torch import Tensor

from umbra.proto.errors import UsageError
from umbra.proto.records import Routing, Sampling, Trajectory, unpack_float32, unpack_int32
from umbra.services.config import TrainerConfig
from umbra.services.config.trajectory_rules import RunFacts, find_fault
from umbra.services.generator.engines.engine import EngineOutput, EngineRequest
from umbra.services.generator.engines.torch_engine import TorchEngine
from umbra.services.generator.line import line_of
from umbra.services.generator.rollout import Rollout, RolloutSettings
from umbra.services.generator.vllm.options import reported_routers, routing
from umbra.services.modeling.experts import Routers, chosen_experts
from umbra.services.modeling.packing import pack
from umbra.services.modeling.scorer import Scorer
from umbra.services.scorer.logprobs import LogprobWorker
from umbra.services.trainer.batch import BatchError, TrainBatch, make_batch
from umbra.services.trainer.learner import Learner

MIXTURES = ("qwen3-moe", "qwen2-moe", "mixtral", "deepseek-v3", "glm4-moe", "gpt-oss", "olmoe")
SOME = ("qwen3-moe", "deepseek-v3", "gpt-oss")  # one for each kind of router
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5]]
MIXTURE = "qwen3-moe"
KIND = (2, 2, 4)  # of that one


def engine(model: Any, **settings: Any) -> TorchEngine:
    values: dict[str, Any] = {"slots": 8, "max_context": 64, "version": 0, **settings}
    return TorchEngine(model, stop_ids=(), tell_routing=True, **values)


def generated(model: Any) -> list[EngineOutput]:
    """Answers of a torch engine that tells its routing: two to each of `PROMPTS`."""
    made = engine(model)
    made.submit(
        EngineRequest(f"{number}-{sample}", prompt, Sampling(), 6 + number - sample)
        for number, prompt in enumerate(PROMPTS)
        for sample in range(2)
    )
    return sorted(finish(made), key=lambda output: output.request_id)


@pytest.mark.parametrize("replay", ["true", "false"])
def test_the_engine_of_a_run_tells_what_its_trainer_replays(tmp_path: Path, replay: str) -> None:
    directory = ARCHITECTURES[MIXTURE].write(tmp_path / "model")
    run = vllm_config(directory, f"trainer.router_replay={replay}", engine="torch", device="cpu")
    with opened(run) as made:
        made.submit([EngineRequest("a", PROMPTS[0], Sampling(), 3)])
        assert (finish(made)[0].routing is not None) == (replay == "true")


def routed(model: Any, seed: int | None = None) -> list[Trajectory]:
    """Samples of `model`; with `seed` their experts are drawn.

    The first two keep what their prompt has in common.
    """
    draw, made = np.random.default_rng(seed), list[Trajectory]()
    for number, output in enumerate(generated(model)):
        one = trajectory(
            PROMPTS[int(output.request_id[0])],
            output.token_ids,
            output.logprobs,
            sample_id=output.request_id,
            group_id=output.request_id[0],
            routing=output.routing,
            reward=float(number % 2),
        )
        if seed is not None and output.routing is not None:
            old = chosen_experts(one)
            scores = draw.random((*old.shape[:2], output.routing.experts))
            new = scores.argsort(-1)[..., : old.shape[2]].astype(old.dtype)
            if number == 1:
                prompt = len(PROMPTS[0])
                new[:prompt] = chosen_experts(made[0])[:prompt]
            routing = msgspec.structs.replace(output.routing, chosen=new.tobytes())
            one = msgspec.structs.replace(one, routing=routing)
        made.append(one)
    return made


def logprobs(scorer: Any, batch: TrainBatch, *, share: bool = True) -> Tensor:
    """Of the learned tokens of `batch`, with gradients, [M]."""
    found = torch.zeros(len(batch.behaviour))
    for micro in pack(batch.tokens, pack_tokens=64, micro_tokens=256, share_prompts=share):
        part, _ = scorer(micro, batch.temperature[micro.source], with_entropy=False)
        found = found.index_put((micro.source,), part)
    return found


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def router_class(model: Any) -> Any:
    return model._can_record_outputs["router_logits"].target_class


def whole_pass(model: Any, ids: list[int]) -> Tensor:
    """The experts of each token of one sequence, in one pass; [tokens, layers, choices], sorted."""
    routers: Any = Routers.of(model)
    routers.noted = []
    with torch.no_grad():
        model(torch.tensor([ids]))
    return torch.stack(routers.noted, 1).sort(-1)[0]


def sorted_experts(routing: Routing | None) -> Tensor:
    one = chosen_experts(trajectory(routing=routing))
    return torch.from_numpy(one.astype("int64")).sort(-1)[0]


@pytest.mark.parametrize("name", SOME)
def test_engine_tells_the_experts_that_its_routers_choose(name: str) -> None:
    model = ARCHITECTURES[name].model()
    for made in routed(model):
        assert find_fault(made, RunFacts(routing=True)) is None
        ids = [*unpack_int32(made.prompt_ids), *unpack_int32(made.response_ids)[:-1]]
        assert torch.equal(sorted_experts(made.routing), whole_pass(model, ids))


@pytest.mark.parametrize("name", SOME)
def test_replay_of_the_own_choice_changes_nothing(name: str) -> None:
    made = routed(ARCHITECTURES[name].model())
    scorer = Scorer(ARCHITECTURES[name].model()).eval()
    assert scorer.routers is not None
    plain, replayed = make_batch(made, 1000), make_batch(made, 1000, routers=scorer.routers.kind)
    close: Any = {"atol": 2e-5, "rtol": 1e-4}
    torch.testing.assert_close(logprobs(scorer, replayed), logprobs(scorer, plain), **close)
    torch.testing.assert_close(logprobs(scorer, replayed), replayed.behaviour, **close)
    found: list[dict[str, Tensor]] = []
    for batch in (replayed, plain):
        scorer.zero_grad()  # to None
        logprobs(scorer, batch).sum().backward()
        found.append(gradients(scorer.model))
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", MIXTURES)
def test_weights_of_replayed_experts_are_those_of_the_routers_own_formula(name: str) -> None:
    model = ARCHITECTURES[name].model()
    routers: Any = Routers.of(model)
    layers = routers.kind[0]
    kind = router_class(model)
    router: Any = next(module for module in model.modules() if isinstance(module, kind))
    told = torch.tensor([[3, 0], [1, 2], [-1, -1]], dtype=torch.int16)
    routers.replay = told[:, None].expand(3, layers, 2)
    hidden = torch.randn(3, model.config.hidden_size)
    logits, weights, chosen = router(hidden)
    assert torch.equal(chosen[:2], told[:2].long())
    routers.replay = None
    _, own_weights, own = router(hidden)
    assert torch.equal(chosen[2], own[2]) and torch.equal(weights[2], own_weights[2])
    if name in ("deepseek-v3", "glm4-moe"):
        expected = logits.sigmoid().gather(1, chosen)
        expected = router.routed_scaling_factor * expected / expected.sum(1, keepdim=True)
    elif name == "gpt-oss":
        expected = logits.gather(1, chosen).softmax(1)
    else:
        expected = logits.softmax(1).gather(1, chosen)
        if getattr(router, "norm_topk_prob", True):
            expected = expected / expected.sum(1, keepdim=True)
    torch.testing.assert_close(weights, expected)
    weights[0, 0].backward()
    assert router.weight.grad is not None and router.weight.grad.abs().sum() > 0


def test_packed_and_shared_prompts_get_the_experts_of_their_own_sample() -> None:
    """Samples share a prompt only where the engine routed it equally."""
    model = ARCHITECTURES[MIXTURE].model()
    made = routed(model, 1)
    scorer = Scorer(model).eval()
    batch = make_batch(made, 1000, routers=KIND)
    assert batch.tokens.family is not None
    assert batch.tokens.family.tolist() == [0, 0, 1, 2]
    alone = torch.cat([logprobs(scorer, make_batch([one], 1000, routers=KIND)) for one in made])
    for share in (True, False):
        together = logprobs(scorer, batch, share=share)
        torch.testing.assert_close(together, alone, atol=2e-5, rtol=1e-4)
    assert (alone - logprobs(scorer, make_batch(made, 1000))).abs().max() > 0.01


def test_recomputed_layers_meet_the_same_experts(tmp_path: Path) -> None:
    """Activation checkpointing runs the routers again in the backward pass."""
    directory = ARCHITECTURES[MIXTURE].write(tmp_path / "model")
    made = routed(ARCHITECTURES[MIXTURE].model(), 2)
    found: list[dict[str, Tensor]] = []
    for recompute in ("false", "true", "selective"):
        keys = {"router_replay": "true", "activation_checkpointing": recompute}
        learner = Learner(ARCHITECTURES[MIXTURE].model(), config(directory, **keys).trainer, 2)
        batch = make_batch(made, 1000, routers=learner.replayed)
        (micro,) = pack(batch.tokens, pack_tokens=64, micro_tokens=256, share_prompts=True)
        learner.backward(learner.score(micro, batch.temperature[micro.source])[0].sum())
        found.append(gradients(learner.model))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_a_token_keeps_the_experts_of_the_pass_that_predicted_the_next(policy: Any) -> None:
    """Also where the cache of a sequence under way is computed again with new weights."""
    old, new = (ARCHITECTURES[MIXTURE].model(seed) for seed in (0, 1))
    made = engine(ARCHITECTURES[MIXTURE].model(0))
    made.submit([EngineRequest("s", PROMPTS[1], Sampling(), 8)])
    for _ in range(4):
        made.poll()
    load(made, new.named_parameters(), 1, policy)
    (seen,) = made.peek(["s"])
    (output,) = finish(made)
    assert [(span.version, span.start, span.end) for span in output.spans] == [(0, 0, 4), (1, 4, 8)]
    ids = [*PROMPTS[1], *output.token_ids[:-1]]
    before = len(PROMPTS[1]) + 3  # tokens that the old weights read
    chosen = sorted_experts(output.routing)
    assert len(chosen) == len(ids)
    assert torch.equal(chosen[:before], whole_pass(old, ids)[:before])
    assert not torch.equal(chosen[:before], whole_pass(new, ids)[:before])
    if policy == "recompute":
        assert torch.equal(chosen[before:], whole_pass(new, ids)[before:])
    assert seen.routing is not None and output.routing is not None
    assert output.routing.chosen.startswith(seen.routing.chosen)


def test_a_resumed_sample_keeps_the_experts_of_its_first_segment() -> None:
    model, later = (ARCHITECTURES[MIXTURE].model(seed) for seed in (0, 1))
    first = generated(model)[0]
    told: Any = {"spans": first.spans, "routing": first.routing, "finish_reason": "partial"}
    partial = trajectory(PROMPTS[0], first.token_ids, first.logprobs, **told)
    resumed = line_of(partial, partial.sampling)
    assert resumed is not None
    again = engine(later, version=1)
    again.submit([EngineRequest("s", [*PROMPTS[0], *resumed.ids], Sampling(), 4)])
    known = len(PROMPTS[0]) + len(resumed.ids) - 1
    resumed.add_model(finish(again)[0])
    ids = [*PROMPTS[0], *resumed.ids[:-1]]
    chosen = sorted_experts(resumed.routing)
    assert torch.equal(chosen[:known], whole_pass(model, ids)[:known])
    assert torch.equal(chosen[known:], whole_pass(later, ids)[known:])


ROUTING = Routing(layers=2, choices=2, experts=4, chosen=bytes([0, 1, 2, 3] * 4))
WANTED, KNOWN = RunFacts(routing=True), RunFacts(routing=True, routers=KIND)


def test_routing_is_checked_with_its_trajectory() -> None:
    for changes, facts, fault in (
        ({}, KNOWN, None),
        ({"chosen": bytes(12)}, WANTED, "routing is of 3 tokens, 4 to 4 are needed"),
        ({"chosen": bytes(15)}, WANTED, "15 bytes, no multiple of 4"),
        ({"chosen": bytes([4] * 16)}, WANTED, "experts beyond 3"),
        ({"layers": 1 << 62}, WANTED, "routing of 46"),
        ({"choices": 5}, WANTED, "to 5 of 4 experts"),
        ({"layers": 4, "choices": 1}, KNOWN, r"\(4, 1, 4\), of the trainer's model \(2, 2, 4\)"),
        ({}, RunFacts(routing=False), "router_replay is off"),
        (None, WANTED, "has no routing"),
        (None, RunFacts(routing=False), None),
    ):
        routing = msgspec.structs.replace(ROUTING, **changes) if changes is not None else None
        found = find_fault(trajectory(routing=routing), facts)
        assert found is None if fault is None else re.search(fault, str(found))
        if routing is None:
            assert find_fault(trajectory(), facts, trained=False) is None
            with pytest.raises(BatchError, match="has no routing"):
                make_batch([trajectory()], 1000, routers=KIND)


def test_stage_of_the_policy_replays_too() -> None:
    model = ARCHITECTURES[MIXTURE].model()
    made = routed(model, 3)
    tasks = [sample({}, sample_id=t.sample_id, trajectory=t) for t in made]
    worker = LogprobWorker(model, TrainerConfig(pack_tokens=64), replay=True)
    scores: Any = {score.sample_id: score for (score,) in worker.score(tasks, lambda: None)}
    expected = logprobs(Scorer(model).eval(), make_batch(made, 1000, routers=KIND))
    found = torch.cat([torch.tensor(unpack_float32(scores[t.sample_id].logprobs)) for t in made])
    torch.testing.assert_close(found, expected.detach(), atol=2e-5, rtol=1e-4)
    ((score,),) = worker.score([sample({}, trajectory=trajectory())], lambda: None)
    assert "has no routing" in score.error
    with pytest.raises(UsageError, match="no routers"):
        LogprobWorker(ARCHITECTURES["qwen3"].model(), TrainerConfig(), replay=True)


def test_what_cannot_be_replayed_is_refused(tmp_path: Path) -> None:
    dense = ARCHITECTURES["qwen3"].model()
    with pytest.raises(UsageError, match="no routers"):
        Learner(dense, config(tmp_path, router_replay="true").trainer, 2)
    with pytest.raises(UsageError, match="no routers"):
        engine(dense)
    with pytest.raises(UsageError, match="lower generator"):
        engine(ARCHITECTURES[MIXTURE].model(), max_context=1 << 23)
    with pytest.raises(UsageError, match="vLLM on CPUs"):
        reported_routers(ARCHITECTURES[MIXTURE].model(), "cpu", 64)


def test_a_router_without_topk_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = routed(ARCHITECTURES[MIXTURE].model())
    scorer = Scorer(ARCHITECTURES[MIXTURE].model()).eval()
    kind = router_class(scorer.model)
    plain = kind.forward

    def sorting(self: Any, hidden: Tensor) -> Any:
        logits, _, _ = plain(self, hidden)
        weights, chosen = logits.softmax(-1).sort(-1, descending=True)
        return logits, weights[:, : self.top_k], chosen[:, : self.top_k]

    monkeypatch.setattr(kind, "forward", sorting)
    with pytest.raises(UsageError, match="do not choose by topk"):
        logprobs(scorer, make_batch(made, 1000, routers=KIND))


def test_vllm_tells_all_layers_and_we_those_with_a_router() -> None:
    """Layers without one have zeros there; here the first has none."""
    routers = reported_routers(ARCHITECTURES["deepseek-v3"].model(), "cuda", 64)
    rows = np.array([[[0, 0], [3, 1]], [[0, 0], [7, 2]], [[0, 0], [5, 6]]], dtype=np.uint8)
    told = routing(routers, rows[:2], rows[2:])
    assert (told.layers, told.choices, told.experts) == (1, 2, 8)
    assert chosen_experts(trajectory(routing=told)).tolist() == [[[3, 1]], [[7, 2]], [[5, 6]]]
    assert routing(routers, None).chosen == b""


def test_eval_samples_carry_no_routing() -> None:
    output = generated(ARCHITECTURES[MIXTURE].model())[0]
    for pinned, kept in ((-1, True), (3, False)):
        settings: Any = RolloutSettings(chat=None, sampling=Sampling(), max_context=64)  # type: ignore[arg-type]
        rollout = Rollout(sample({}, pinned_version=pinned), settings)
        made = rollout.trajectory(output)
        assert (made.routing is not None) == kept
