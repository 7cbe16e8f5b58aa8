"""Comparison of generators with Transformers, and of their weights with the published ones."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from umbra.deploy.model_check.outcome import Row, difference
from umbra.proto.records import Manifest, Sampling
from umbra.services.generator.engines.engine import EngineOutput, EngineRequest, KvPolicy
from umbra.services.generator.engines.torch_engine import TorchEngine
from umbra.services.modeling.models import load_model
from umbra.services.modeling.reference import Expected, Reference
from umbra.services.trainer.policy import export_policy, load_policy
from umbra.services.trainer.snapshot import tensor_layout, whole_weights, write_shards
from umbra.services.weights.manifest import build_manifest
from umbra.services.weights.memory import private_memory

_CPU = torch.device("cpu")
_PROMPTS = (1, 30, 12, 3, 21, 12, 7)  # tokens of each; more prompts than slots
_SLOTS = 4
_TOKENS = 24  # sampled for each
_CONTEXT = 64
_STEPS = 6  # made before the weights change
_CHANGE = 0.2  # how far another version is from the first, in each tensor's own spread
_BUCKET_BYTES = 1 << 20
_NAMES_SHOWN = 3


class Version(NamedTuple):
    weights: Mapping[str, Tensor]
    manifest: Manifest
    memory: memoryview


def publish(policy: PreTrainedModel, dtype: str = "float32") -> Version:
    manifest = build_manifest(tensor_layout(policy, dtype), _BUCKET_BYTES)
    memory = private_memory(manifest.total_bytes)
    write_shards(policy, manifest, memory)
    weights = {name: tensor.clone() for name, tensor in whole_weights(policy).items()}
    return Version(weights, manifest, memory)


@torch.no_grad()
def change(policy: PreTrainedModel) -> None:
    """Move every weight, as an update would, but further."""
    generator = torch.Generator().manual_seed(5)
    for weight in policy.parameters():
        spread = weight.std() if weight.numel() > 1 else weight.abs()
        weight.add_(torch.randn(weight.shape, generator=generator) * spread * _CHANGE)


def compare_torch_engine(
    directory: Path,
    reference: Reference,
    versions: tuple[Version, Version],
    checked: Collection[str] = (),
) -> Iterator[Row]:
    """Rows about sampled tokens: one version throughout, then a change while they are sampled.

    Args:
        directory: of the model, which has the weights of the first version.
        reference: of the same model, with any weights.
        versions: two that differ.
        checked: see `check_architecture`.
    """
    model = load_model(directory, _CPU, torch.float32, "PATH", checked)
    engine = TorchEngine(model, stop_ids=(), slots=_SLOTS, max_context=_CONTEXT, version=0)
    vocabulary, generator = (
        model.get_input_embeddings().num_embeddings,
        torch.Generator().manual_seed(2),
    )
    prompts = [torch.randint(vocabulary, (n,), generator=generator).tolist() for n in _PROMPTS]
    one, other = versions
    runs: list[tuple[str, Version, Version, KvPolicy]] = [
        ("torch engine", one, one, "keep"),
        ("torch engine, recompute", one, other, "recompute"),
        ("torch engine, keep", other, one, "keep"),
    ]
    for name, old, new, policy in runs:
        outputs = _generate(engine, prompts, new, policy)
        found = torch.cat([torch.tensor(output.logprobs) for output in outputs])
        expected = [
            _expected(reference, prompt, output, old, new, policy)
            for prompt, output in zip(prompts, outputs, strict=True)
        ]
        joined = Expected(*(torch.cat(parts) for parts in zip(*expected, strict=True)))
        yield difference(f"logprobs of the {name}", found, joined, model.config)


def compare_publishing(
    directory: Path, policy: PreTrainedModel, checked: Collection[str] = ()
) -> Iterator[Row]:
    """Rows about what a model from `directory`, which has other weights, gets of `policy`."""
    for dtype in ("float32", "bfloat16"):
        model = load_model(directory, _CPU, getattr(torch, dtype), "PATH", checked)
        engine = TorchEngine(model, stop_ids=(), slots=1, max_context=_CONTEXT)
        sent = publish(policy, dtype)
        engine.load(sent.manifest, sent.memory, 1, "keep")
        yield _same(f"weights published in {dtype}", policy.state_dict(), model.state_dict())


def compare_export(
    original: Path,
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    scratch: Path,
    checked: Collection[str] = (),
) -> Iterator[Row]:
    """Rows about the export of `policy`, which began as the model in `original`, or a part of it.

    A tensor that the export lacks is one that Transformers does not read (layers for multi-token
    prediction, say); one that only the export has would be found by nobody.
    """
    out = export_policy(policy, tokenizer, scratch / "export", whole_weights(policy))
    again, _ = load_policy(out, "PATH", checked)
    yield _same("weights exported", policy.state_dict(), again.state_dict())
    strange = sorted(_stored(out) - _stored(original))
    yield Row("names exported", len(strange), 0, "names", _some(strange))


def _generate(
    engine: TorchEngine, prompts: Sequence[Sequence[int]], new: Version, policy: KvPolicy
) -> list[EngineOutput]:
    """Return an output for each prompt; after some steps the weights become `new`."""
    sampling = Sampling(max_tokens=_TOKENS)
    engine.submit(
        EngineRequest(str(index), prompt, sampling, _TOKENS) for index, prompt in enumerate(prompts)
    )
    outputs = [output for _ in range(_STEPS) for output in engine.poll()]
    engine.load(new.manifest, new.memory, engine.version + 1, policy)
    while engine.busy:
        outputs += engine.poll()
    return sorted(outputs, key=lambda output: int(output.request_id))


def _expected(
    reference: Reference,
    prompt: Sequence[int],
    output: EngineOutput,
    old: Version,
    new: Version,
    policy: KvPolicy,
) -> Expected:
    """Return Transformers' logprobs of `output`, whose last span was served by `new`."""
    tokens, first = [*prompt, *output.token_ids], len(prompt)
    before = output.spans[0].end if len(output.spans) > 1 else 0
    with torch.no_grad():
        if before and policy == "keep":
            # The last of the tokens before is sampled, but not read.
            read = first + before - 1
            return reference.changed(tokens, first, read, old.weights, new.weights)
        reference.load(old.weights)
        earlier = reference.logprobs(tokens, first)
        reference.load(new.weights)
        later = reference.logprobs(tokens, first)
    return Expected(
        *(torch.cat((a[:before], b[before:])) for a, b in zip(earlier, later, strict=True))
    )


def _same(name: str, expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> Row:
    """Count tensors that differ in any bit, cast to the type of those `found`."""
    wrong = sorted(set(expected) ^ set(found))
    for key in expected.keys() & found.keys():
        wanted = expected[key].to(found[key].dtype)
        bits = (
            one.detach().contiguous().view(-1).view(torch.uint8) for one in (wanted, found[key])
        )
        if not torch.equal(*bits):
            wrong.append(key)
    return Row(name, len(wrong), 0, "tensors", _some(sorted(wrong)))


def _stored(directory: Path) -> set[str]:
    names: set[str] = set()
    for file in directory.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            names.update(opened.keys())
    return names


def _some(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
