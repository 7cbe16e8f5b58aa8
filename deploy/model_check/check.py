"""Comparison of trainer and engines with Transformers: logprobs, gradients, weights.

Of a model as it is, or of a copy with few layers and short windows. Both sides compute in float32
and add up in another order: each `Row` has how far rounding alone may take a number. An error grows
with the numbers that are added, and with the square root of their count: the entries of a hidden
state in every layer. The errors of the tests' tiny models stay ten times below these bounds; a
wrong mask is thousands of times above.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from umbra.proto.errors import StartupError, UmbraError, UsageError
from umbra.proto.records import Manifest
from umbra.services.generator.engines.engine import EngineOutput, KvPolicy
from umbra.services.generator.engines.torch_engine import TorchEngine
from umbra.services.generator.vllm import check as vllm_check
from umbra.services.modeling import architectures
from umbra.services.modeling.architectures import keeps_state, layer_kinds
from umbra.services.modeling.attention import Attention
from umbra.services.modeling.micro_batch import Tokens
from umbra.services.modeling.model_directory import check_model_dir, weights_bytes
from umbra.services.modeling.models import load_model, read_weights
from umbra.services.modeling.packing import pack
from umbra.services.modeling.pretrained import AS_IT_IS, loading, read_transformers_config
from umbra.services.modeling.reference import Expected, Reference
from umbra.services.modeling.scorer import Scorer
from umbra.services.modeling.weights import first_names
from umbra.services.reporting import aligned
from umbra.services.trainer.policy import export_policy, load_policy
from umbra.services.trainer.snapshot import tensor_layout, whole_weights, write_shards
from umbra.services.weights.manifest import build_manifest
from umbra.services.weights.memory import shared_memory

LARGE = 600_000_000  # bytes of weights; a copy is made of larger models
WINDOW = 16  # tokens; the sequences that are compared are longer

_LOGPROBS = 1e-5  # nats, for a largest logit of 1
_GRADIENTS = 3e-5  # of a gradient's norm
_VLLM = 1e-4  # nats, whatever the logits
_VLLM_BFLOAT16 = 0.05  # nats, in the mean over tokens
_HIDDEN, _LAYERS = 64, 2  # at which these were measured
_FAMILIES = ((5, 4), (19, 3), (11, 1))  # tokens of each prompt, and how many responses it has
_PACK_TOKENS = 96
_TEMPERATURE = 0.8  # of every second sequence

_ALL_TOKENS, _CHUNK = 1 << 20, 24
_LAYOUTS: tuple[tuple[str, int, bool, int], ...] = (
    # Tokens of a row, shared prompts, tokens whose logits are computed at a time.
    ("rows of one sequence", 1, False, _ALL_TOKENS),
    ("packed rows", _PACK_TOKENS, False, _ALL_TOKENS),
    ("packed rows, shared prompts", _PACK_TOKENS, True, _ALL_TOKENS),
    ("packed rows, logits in chunks", _PACK_TOKENS, True, _CHUNK),
)
_UNPACKED = (_LAYOUTS[0], ("rows of one sequence, logits in chunks", 1, False, _CHUNK))

_CPU = torch.device("cpu")
_PROMPTS = (1, 30, 12, 3, 21, 12, 7)  # tokens of each; more prompts than slots
_SLOTS, _CONTEXT = 4, 64  # of the engine
_STEPS = 6  # made before the weights change
_BUCKET_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison.

    `worst` is the largest difference and `bound` what rounding may make of it, in `unit`. A row
    without `worst` was left out, and `note` says why; where it is no number, nothing came out.
    """

    name: str
    worst: float | None
    bound: float
    unit: str
    note: str = ""

    @property
    def outcome(self) -> str:
        """ "equal", "different" or "left out"."""
        if self.worst is None:
            return "left out"
        # Not the other way round: a difference that is no number is one.
        return "equal" if self.worst <= self.bound else "different"

    def as_text(self) -> str:
        figures = ""
        if self.worst is not None and math.isfinite(self.worst):
            if self.bound:
                figures = f"{self.worst:.1e} {self.unit}, at most {self.bound:.1e}"
            else:
                figures = f"{self.worst:.0f} {self.unit}" if self.worst else "bit for bit"
        return f"{figures} ({self.note})".lstrip() if self.note else figures


@dataclass(frozen=True, slots=True)
class Outcome:
    """All comparisons of one model; `cuts` tell what its copy lacks."""

    model: str
    architecture: str
    model_type: str
    cuts: Sequence[str]
    rows: Sequence[Row]

    @property
    def equal(self) -> bool:
        return all(row.outcome != "different" for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        rows = [{**asdict(row), "outcome": row.outcome} for row in self.rows]
        for row in rows:
            if not math.isfinite(row["worst"] or 0):
                row["worst"] = None  # JSON has no name for it
        return {**asdict(self), "cuts": list(self.cuts), "rows": rows, "equal": self.equal}

    def as_text(self) -> str:
        heading = [f"{self.model}: {self.architecture}"]
        heading += [f"compared on a copy with {cut}" for cut in self.cuts]
        rows = [(row.name, row.outcome, row.as_text()) for row in self.rows]
        return "\n".join([*heading, *aligned(rows)])


def check_model(path: Path, layers: int = 0, *, vllm: bool = True, workers: int = 1) -> Outcome:
    """Compare Umbra with plain Transformers on the model in `path`; UsageError if it is refused.

    The copy that is compared has so many `layers`; 0 = all, or few of a large model. With `vllm`
    vLLM is compared too, if it is installed; `workers` divide the model there.
    """
    directory = check_model_dir(path, "PATH")
    config = architectures.read_config(directory, "PATH")
    kind = str(config.get("model_type", ""))
    architectures.check_architecture(directory, "PATH", [kind])
    transformers_logging.disable_progress_bar()
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # it reports the layers that a copy leaves out
    try:
        with TemporaryDirectory(prefix="umbra-check-") as scratch:
            subject, model_config, cuts = _take(directory, Path(scratch), layers, [kind])
            rows = list(_compare(directory, subject, Path(scratch), [kind]))
            if vllm:
                rows += _tried("vLLM", compare_vllm(subject, model_config, [kind], workers))
    finally:
        transformers_logging.set_verbosity(verbosity)
    return Outcome(str(path), architectures.architecture(config), kind, cuts, rows)


def _compare(original: Path, directory: Path, scratch: Path, checked: list[str]) -> Iterator[Row]:
    reference = Reference(directory)
    policy, tokenizer = load_policy(directory, "PATH", checked)
    yield from _tried("training", training(policy, reference))
    before = publish(policy)
    vllm_check.change(policy, torch.float32)
    versions = before, publish(policy)
    rows = torch_engine(directory, reference, versions, checked)
    yield from _tried("torch engine", rows)
    del reference, before, versions, rows
    yield from _tried("publishing", publishing(directory, policy, checked))
    rows = export(original, policy, tokenizer, scratch, checked)
    yield from _tried("export", rows)


def _tried(name: str, rows: Iterator[Row]) -> Iterator[Row]:
    """Yield `rows`, and one more if an untested architecture raises."""
    try:
        yield from rows
    except (
        ArithmeticError, AssertionError, AttributeError, LookupError, NotImplementedError,
        RuntimeError, TypeError, UmbraError, ValueError,
    ) as error:  # fmt: skip
        first = str(error).partition("\n")[0]
        yield Row(name, math.nan, 0, "", f"{type(error).__name__}: {first}")


def compare_vllm(
    directory: Path, config: Any, checked: Collection[str] = (), workers: int = 1
) -> Iterator[Row]:
    """Yield rows about vLLM on the model in `directory`; one if vLLM is left out."""
    try:
        result = vllm_check.vllm_differences(
            directory,
            publish,
            checked=checked,
            threads=torch.get_num_threads(),
            tensor_parallel=workers,
        )
    except (UsageError, StartupError) as error:
        if isinstance(error, StartupError) and vllm_check.on_gpu():
            raise
        yield Row("logprobs of vLLM", None, 0.0, "nats", str(error).partition("\n")[0])
        return
    bound, unit = _VLLM * _growth(config), "nats"
    if result.dtype != "float32":
        bound, unit = _VLLM_BFLOAT16, "nats in the mean"
    yield Row("logprobs of vLLM, from disk", result.from_disk, bound, unit)
    yield Row("logprobs of vLLM, the same weights published", result.same, bound, unit)
    yield Row("logprobs of vLLM, others published", result.changed, bound, unit)
    place, names = f"weights in {result.workers} of vLLM's workers", ", ".join(result.stale[:3])
    yield Row(place, len(result.stale), 0.0, "parameters", names)


def _take(
    original: Path, scratch: Path, layers: int, checked: Collection[str]
) -> tuple[Path, PreTrainedConfig, list[str]]:
    """Return a model's directory and config, and what it lacks; UsageError if it won't load.

    It is `original`, or a copy of it below `scratch`, which keeps so many `layers`; 0 = all, or as
    few as have every kind of layer of a `LARGE` model.
    """
    with loading(original, "PATH"):
        config = read_transformers_config(original)
    count: int = config.num_hidden_layers
    fewest = fewest_layers(config)
    remaining = min(count, max(layers, fewest) if layers else count)
    if not layers and weights_bytes(original) > LARGE:
        remaining = min(count, fewest)
    window = getattr(config, "sliding_window", None) or 0
    cuts: list[str] = []
    if remaining < count:
        cuts.append(f"the first {remaining} of {count} layers")
    if window > WINDOW:
        cuts.append(f"windows of {WINDOW} tokens instead of {window}")
    if not cuts:
        return original, config, cuts
    copy, kind = scratch / "copy", AutoModelForCausalLM
    copy.mkdir(parents=True)
    (copy / "config.json").write_text(json.dumps(_cut(config, remaining)), encoding="utf-8")
    with loading(original, "PATH"):
        smaller = read_transformers_config(copy)
        model = read_weights(kind, original, torch.float32, "PATH", checked, config=smaller)
        model.save_pretrained(copy)
        AutoTokenizer.from_pretrained(original, **AS_IT_IS).save_pretrained(copy)
    return copy, smaller, cuts


def fewest_layers(config: PreTrainedConfig) -> int:
    """Return how many of the first layers hold every kind of layer, at least 2.

    Kinds of attention don't count: `_cut` gives the copy all of them.
    """
    fields, count, kinds = config.to_dict(), config.num_hidden_layers, layer_kinds(config)
    last = max((kinds.index(kind) + 1 for kind in kinds), default=0)
    fewest = max(2, last if keeps_state(config) else len(set(kinds)))
    fewest = max(fewest, int(fields.get("first_k_dense_replace") or 0) + 1)
    for key, values in fields.items():
        if key != "layer_types" and isinstance(values, list) and len(values) == count:
            fewest = max(fewest, *(values.index(value) + 1 for value in values))
    return min(count, fewest)


def _cut(config: PreTrainedConfig, layers: int) -> dict[str, Any]:
    """Return the config's fields with so many layers, kinds of attention in turn."""
    fields, count = config.to_dict(), config.num_hidden_layers
    for key, values in fields.items():
        if isinstance(values, list) and len(values) == count:
            fields[key] = values[:layers]
    kinds = list(dict.fromkeys(layer_kinds(config)))
    if kinds and not keeps_state(config):
        fields["layer_types"] = [kinds[index % len(kinds)] for index in range(layers)]
    fields["num_hidden_layers"] = layers
    if (fields.get("sliding_window") or 0) > WINDOW:
        fields["sliding_window"] = WINDOW
    return fields


def difference(name: str, logprobs: Tensor, expected: Expected, config: Any) -> Row:
    """Return the row of the token whose logprob is farthest off; [T] each."""
    bounds = _LOGPROBS * _growth(config) * expected.scale.clamp(min=1)
    off = (logprobs - expected.logprobs).abs()
    at = int((off / bounds).argmax())  # a NaN counts as the largest
    return Row(name, float(off[at]), float(bounds[at]), "nats")


def _growth(config: Any) -> float:
    terms = max(config.hidden_size, _HIDDEN) * max(config.num_hidden_layers, _LAYERS)
    # A gated delta net solves for the updates of 64 tokens at once, and rounding grows as it does.
    solved = 10 if hasattr(config, "linear_key_head_dim") else 1
    return solved * (terms / (_HIDDEN * _LAYERS)) ** 0.5


def training(policy: PreTrainedModel, reference: Reference) -> Iterator[Row]:
    """Yield rows on `policy`, as `load_policy` gives it, with the weights of `reference`."""
    embeddings: Any = policy.get_input_embeddings()
    tokens = _tokens(embeddings.num_embeddings)
    temperatures = torch.where(tokens.owner % 2 == 0, 1.0, _TEMPERATURE)
    weights = torch.randn(len(tokens.learned), generator=torch.Generator().manual_seed(3))
    expected, gradients = _reference(reference, tokens, weights)
    layouts = _UNPACKED if keeps_state(policy.config) else _LAYOUTS
    for name, pack_tokens, share, at_a_time in layouts:
        policy.zero_grad()
        attention = Attention.prepare(policy, policy.device)
        scorer = Scorer(policy, at_a_time * 4 * embeddings.num_embeddings, attention).eval()
        all_logprobs = torch.full((len(tokens.learned),), float("nan"))
        for micro in pack(
            tokens, pack_tokens=pack_tokens, micro_tokens=4 * _PACK_TOKENS, share_prompts=share
        ):
            logprobs, _ = scorer(micro, temperatures[micro.source], with_entropy=False)
            (logprobs * weights[micro.source]).sum().backward()
            all_logprobs[micro.source] = logprobs.detach()
        yield difference(f"logprobs of {name}", all_logprobs, expected, policy.config)
        yield _gradients(f"gradients of {name}", policy, gradients)
    policy.zero_grad()


def _tokens(vocabulary: int) -> Tokens:
    """Return prompts of several lengths with responses of 2 to 40 tokens."""
    generator = torch.Generator().manual_seed(1)
    ids, learned = list[Tensor](), list[Tensor]()
    rows: list[tuple[int, int, int]] = []  # tokens of prompt and response, and which prompt it is
    end = 0
    for family, (size, responses) in enumerate(_FAMILIES):
        prompt = torch.randint(vocabulary, (size,), generator=generator)
        for _ in range(responses):
            count = int(torch.randint(2, 40, (), generator=generator))
            ids += [prompt, torch.randint(vocabulary, (count,), generator=generator)]
            end += size + count
            learned.append(torch.arange(end - count, end))
            rows.append((size, count, family))
    prompts, counts, families = torch.tensor(rows).unbind(1)
    return Tokens(
        ids=torch.cat(ids),
        lengths=prompts + counts,
        learned=torch.cat(learned),
        owner=torch.arange(len(rows)).repeat_interleave(counts),
        prompts=prompts,
        family=families,
    )


def _reference(
    reference: Reference, tokens: Tokens, weights: Tensor
) -> tuple[Expected, dict[str, Tensor]]:
    """Return each sequence's logprobs, and the gradients of their weighted sum."""
    assert tokens.prompts is not None
    reference.model.zero_grad()
    expected: list[Expected] = []
    sequences = zip(
        tokens.ids.split(tokens.lengths.tolist()),
        tokens.prompts.tolist(),
        weights.split((tokens.lengths - tokens.prompts).tolist()),
        strict=True,
    )
    for number, (ids, prompt, own_weights) in enumerate(sequences):
        temperature = _TEMPERATURE if number % 2 else 1.0
        logprobs, scale = reference.logprobs(ids.tolist(), prompt, temperature)
        (logprobs * own_weights).sum().backward()
        expected.append(Expected(logprobs.detach(), scale))
    parameters = reference.model.named_parameters()
    gradients = {name: p.grad for name, p in parameters if p.grad is not None}
    reference.model.zero_grad()
    return _joined(expected), gradients


def _joined(parts: Iterable[tuple[Tensor, Tensor]]) -> Expected:
    return Expected(*map(torch.cat, zip(*parts, strict=True)))


def _gradients(name: str, policy: PreTrainedModel, expected: dict[str, Tensor]) -> Row:
    """Return the largest norm of a parameter's difference, in parts of the gradient's norm.

    Of its own, but at least a thousandth of the whole one: a gradient that cancels to nothing is
    all rounding.
    """
    total = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    worst, at = torch.zeros(()), ""
    for parameter_name, parameter in policy.named_parameters():
        gradient, target = parameter.grad, expected.get(parameter_name)
        if gradient is None and target is None:
            continue
        gradient = torch.zeros_like(parameter) if gradient is None else gradient
        target = torch.zeros_like(parameter) if target is None else target
        share = (gradient - target).norm() / torch.maximum(target.norm(), total / 1000)
        if not share <= worst:
            worst, at = share, parameter_name
    bound = _GRADIENTS * _growth(policy.config)
    return Row(name, float(worst), bound, "of a norm", "" if worst <= bound else at)


class Version(NamedTuple):
    weights: Mapping[str, Tensor]
    manifest: Manifest
    memory: memoryview


def publish(policy: PreTrainedModel, dtype: str = "float32") -> Version:
    manifest = build_manifest(tensor_layout(policy, dtype), _BUCKET_BYTES)
    memory = shared_memory(manifest.total_bytes)
    write_shards(policy, manifest, memory)
    weights = {name: tensor.clone() for name, tensor in whole_weights(policy).items()}
    return Version(weights, manifest, memory)


def torch_engine(
    directory: Path,
    reference: Reference,
    versions: tuple[Version, Version],
    checked: Collection[str] = (),
) -> Iterator[Row]:
    """Yield rows on sampled tokens: of one version, then of two that change in between.

    `directory` has the model with the weights of the first version, `reference` any weights of it.
    """
    model = load_model(directory, _CPU, torch.float32, "PATH", checked)
    engine = TorchEngine(model, stop_ids=(), slots=_SLOTS, max_context=_CONTEXT, version=0)
    words: int = model.get_input_embeddings().num_embeddings
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(words, (n,), generator=generator).tolist() for n in _PROMPTS]
    base, changed = versions
    runs: list[tuple[str, Version, Version, KvPolicy]] = [
        ("torch engine", base, base, "keep"),
        ("torch engine, recompute", base, changed, "recompute"),
        ("torch engine, keep", changed, base, "keep"),
    ]
    for name, old, new, policy in runs:
        outputs = vllm_check.sample(engine, prompts, partial(_changed, engine, new, policy))
        logprobs = torch.cat([torch.tensor(output.logprobs) for output in outputs])
        expected = [
            _expected(reference, prompt, output, old, new, policy)
            for prompt, output in zip(prompts, outputs, strict=True)
        ]
        yield difference(f"logprobs of the {name}", logprobs, _joined(expected), model.config)


def publishing(
    directory: Path, policy: PreTrainedModel, checked: Collection[str] = ()
) -> Iterator[Row]:
    """Yield rows on publishing `policy` to a model from `directory`, with other weights."""
    for dtype in ("float32", "bfloat16"):
        model = load_model(directory, _CPU, getattr(torch, dtype), "PATH", checked)
        engine = TorchEngine(model, stop_ids=(), slots=1, max_context=_CONTEXT)
        version = publish(policy, dtype)
        engine.load(version.manifest, version.memory, 1, "keep")
        yield _same(f"weights published in {dtype}", policy.state_dict(), model.state_dict())


def export(
    original: Path,
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    scratch: Path,
    checked: Collection[str] = (),
) -> Iterator[Row]:
    """Yield rows on the export of `policy`, which began as the model in `original` or a part.

    A tensor that the export lacks is one that Transformers does not read (layers for multi-token
    prediction, say); one that only the export has would be found by nobody.
    """
    out = export_policy(policy, tokenizer, scratch / "export", whole_weights(policy))
    reloaded, _ = load_policy(out, "PATH", checked)
    yield _same("weights exported", policy.state_dict(), reloaded.state_dict())
    extra = sorted(_stored(out) - _stored(original))
    yield Row("names exported", len(extra), 0, "names", first_names(extra))


def _changed(engine: TorchEngine, new: Version, policy: KvPolicy) -> list[EngineOutput]:
    """Return the outputs of some steps, after which the weights become `new`."""
    outputs = [output for _ in range(_STEPS) for output in engine.poll()]
    engine.load(new.manifest, new.memory, engine.version + 1, policy)
    return outputs


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
            position = first + before - 1
            return reference.changed(tokens, first, position, old.weights, new.weights)
        reference.load(old.weights)
        earlier = reference.logprobs(tokens, first)
        reference.load(new.weights)
        later = reference.logprobs(tokens, first)
    return Expected(
        *(torch.cat((a[:before], b[before:])) for a, b in zip(earlier, later, strict=True))
    )


def _same(name: str, expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> Row:
    """Count tensors that differ in any bit, cast to the type of `tensors`."""
    wrong = sorted(set(expected) ^ set(tensors))
    for key in expected.keys() & tensors.keys():
        pair = expected[key].to(tensors[key].dtype), tensors[key]
        if not torch.equal(*(one.detach().contiguous().view(-1).view(torch.uint8) for one in pair)):
            wrong.append(key)
    return Row(name, len(wrong), 0, "tensors", first_names(sorted(wrong)))


def _stored(directory: Path) -> set[str]:
    names: set[str] = set()
    for file in directory.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            names.update(opened.keys())
    return names
